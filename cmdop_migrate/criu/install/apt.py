"""Download packages of a newer suite from the mirror that this host already trusts, without changing the host.

Mirror, components and keyring come from apt's own settings, and so do proxy and mirror credentials (Dir::Etc stays).
Only sources, preferences, lists, cache and package status are private, in one directory that is removed afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate.errors import Blocked, Unreachable

# Suites in order of age. The oldest whose CRIU works is used: that is the least new code for the host.
SERIES: Mapping[str, tuple[str, ...]] = {
    "debian": ("trixie", "forky", "sid"),
    "ubuntu": ("noble", "oracular", "plucky", "questing", "resolute"),
}
# Other names of base suites in sources. Suites with other names (-updates, -security, third parties) are not the
# archive itself.
_OLDER = {
    "debian": ("oldoldstable", "oldstable", "stable", "testing", "unstable", "bullseye", "bookworm"),
    "ubuntu": ("focal", "jammy"),
}
_UPDATE_TIMEOUT = 600.0


@dataclass(frozen=True)
class Archive:
    """Describe one archive in apt's sources: its address, the components used, and the key that must have signed it."""

    family: str
    uri: str
    release: str
    components: tuple[str, ...]
    signed_by: str | None

    @property
    def suites(self) -> tuple[str, ...]:
        """Return the suites to try, oldest first, none older than the suite that the host runs."""
        known = SERIES[self.family]
        return known[known.index(self.release) :] if self.release in known else known


def paragraphs(text: str) -> list[dict[str, str]]:
    """Parse deb822 text into one dict for each paragraph, keys in lower case, continuation lines as written."""
    parsed: list[dict[str, str]] = [{}]
    key = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            parsed.append({})
        elif line[0] in " \t":
            parsed[-1][key] = parsed[-1].get(key, "") + "\n" + line
        else:
            key, _, value = line.partition(":")
            key = key.strip().lower()
            parsed[-1][key] = value.strip()
    return [paragraph for paragraph in parsed if paragraph]


def signed_by(source: str, deb822: bool, uri: str, release: str) -> str | None:
    """Return the Signed-By of the entry for (uri, release) in a sources file, as written: path, fingerprint or key."""
    if deb822:
        for entry in paragraphs(source):
            uris = [word.rstrip("/") for word in entry.get("uris", "").split()]
            if uri.rstrip("/") in uris and release in entry.get("suites", "").split():
                return entry.get("signed-by")
        return None
    for line in source.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)", line)
        if match and match[2].rstrip("/") == uri.rstrip("/") and match[3] == release:
            option = re.search(r"\bsigned-by=(\S+)", match[1] or "", re.IGNORECASE)
            return option[1] if option else None
    return None


def base_archives(targets: Iterable[Mapping[str, str]]) -> list[tuple[Archive, str]]:
    """Return the distribution's own archives among apt's index targets, each with the sources file that names it."""
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for target in targets:
        if target.get("created-by") != "Packages" or target.get("target-of") != "deb":
            continue
        release = target.get("release", "")
        origin = target.get("origin", "").lower()
        for family in SERIES:
            # Origin is known only after an update; without it the suite's name decides.
            if origin in ("", family) and release in SERIES[family] + _OLDER[family]:
                file = target.get("sourcesentry", "").rpartition(":")[0]
                uri = target.get("repo-uri", "").rstrip("/")
                components = merged.setdefault((family, uri, release, file), [])
                if target.get("component") and target["component"] not in components:
                    components.append(target["component"])
    return [
        (Archive(family, uri, release, tuple(components), None), file)
        for (family, uri, release, file), components in merged.items()
        if uri and components
    ]


def configured_archive() -> Archive:
    """Return the distribution's archive in the sources of this host's apt. Raise Blocked if apt has no such archive."""
    listing = _run(["apt-get", "indextargets"], 60.0)
    for archive, file in base_archives(paragraphs(listing)):
        path = Path(file)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        key = signed_by(text, path.suffix == ".sources", archive.uri, archive.release)
        return Archive(archive.family, archive.uri, archive.release, archive.components, key)
    raise Blocked(
        "apt has no Debian or Ubuntu archive among its sources from which CRIU could be fetched",
        "Add the distribution's archive to /etc/apt/sources.list.d, or install CRIU 4.2 or newer and set `criu`.",
    )


class PrivateApt:
    """Access one suite of an archive with an apt that shares nothing writable with the system's."""

    def __init__(self, archive: Archive, suite: str, work: Path) -> None:
        self.suite = suite
        self.debs = work / "cache" / "archives"
        self._conf = work / "apt.conf"
        for directory in (work / "state" / "lists" / "partial", self.debs / "partial", work / "log"):
            directory.mkdir(parents=True)
        architecture = _run(["dpkg", "--print-architecture"], 10.0).strip()
        (work / "suite.sources").write_text(source_text(archive, suite, architecture), encoding="utf-8")
        self._conf.write_text(conf_text(work, sandboxed=_open_to_all(work)), encoding="utf-8")

    def update(self) -> None:
        """Fetch the signed index. Raise Unreachable: no answer, no such suite, or a signature that is not trusted."""
        _run(["apt-get", "-c", str(self._conf), "-qq", "update"], _UPDATE_TIMEOUT)

    def candidate(self, package: str) -> str | None:
        """Return the version of the package in this suite, None if it has none."""
        policy = _run(["apt-cache", "-c", str(self._conf), "policy", package], 60.0)
        match = re.search(r"^\s*Candidate:\s*(\S+)", policy, re.MULTILINE)
        return match[1] if match and match[1] != "(none)" else None

    def download(self, package: str) -> list[Path]:
        """Download the package and all its dependencies; apt checks each file against the signed index."""
        options = ["-qq", "--yes", "--no-install-recommends", "--download-only"]
        _run(["apt-get", "-c", str(self._conf), *options, "install", package], _UPDATE_TIMEOUT)
        return sorted(self.debs.glob("*.deb"))


def unpack(debs: Sequence[Path], into: Path) -> None:
    """Unpack the packages into `into`. No maintainer script is run."""
    into.mkdir()
    for deb in debs:
        _run(["dpkg-deb", "-x", str(deb), str(into)], 120.0)


def source_text(archive: Archive, suite: str, architecture: str) -> str:
    """Return a deb822 source for `suite`, otherwise equal to the host's own one."""
    lines = [
        "Types: deb",
        f"URIs: {archive.uri}",
        f"Suites: {suite}",
        f"Components: {' '.join(archive.components)}",
        f"Architectures: {architecture}",
        "Targets: Packages",
    ]
    if archive.signed_by:
        lines.append(f"Signed-By: {archive.signed_by}")
    return "\n".join(lines) + "\n"


def conf_text(work: Path, sandboxed: bool) -> str:
    """Return the apt.conf that apt reads after the system's settings: it overrides those it names and keeps the
    others."""
    hooks = ("APT::Update", "DPkg")
    cleared = [f"#clear {scope}::{hook};" for scope in hooks for hook in ("Pre-Invoke", "Post-Invoke")]
    # The system's hooks act on the system (docker-clean empties its cache, others notify daemons): they must not run.
    cleared += [
        "#clear APT::Update::Post-Invoke-Success;",
        "#clear APT::Update::Post-Invoke-Stats;",
        "#clear AptCli::Hooks;",
    ]
    values = {
        "Dir::Etc::sourcelist": str(work / "suite.sources"),
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State": str(work / "state"),
        "Dir::State::lists": "lists/",
        # An empty status file: every library is downloaded, also those that are installed here.
        "Dir::State::status": "/dev/null",
        "Dir::State::extended_states": "extended_states",
        "Dir::Cache": str(work / "cache"),
        "Dir::Cache::archives": "archives/",
        "Dir::Log": str(work / "log"),
        "APT::Default-Release": "",
        "APT::Update::Error-Mode": "any",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        # Set explicitly, because the system's settings may be too lax for programs that run as root.
        "APT::Get::AllowUnauthenticated": "false",
        "Acquire::AllowInsecureRepositories": "false",
        "Acquire::AllowWeakRepositories": "false",
        "Acquire::AllowDowngradeToInsecureRepositories": "false",
    }
    if not sandboxed:
        # apt's own user cannot enter a state dir that is closed to others.
        values["APT::Sandbox::User"] = "root"
    return "\n".join([*cleared, *(f'{key} "{value}";' for key, value in values.items())]) + "\n"


def _open_to_all(directory: Path) -> bool:
    return all(path.stat().st_mode & 0o001 for path in (directory, *directory.parents))


def _run(argv: Sequence[str], timeout: float) -> str:
    """Return the standard output of a package tool. Raise Unreachable with its error messages when it fails."""
    if shutil.which(argv[0]) is None:
        raise Blocked(f"{argv[0]} is not installed", "Install CRIU 4.2 or newer by hand and set `criu` to its path.")
    env = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(
            f"{argv[0]} did not finish within {timeout:.0f} s", "Check the network and apt's proxy."
        ) from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))] or [done.stderr.strip()]
        raise Unreachable(
            f"{argv[0]} failed: {'; '.join(errors[-3:])}", "Run `apt-get update` and check that it works."
        )
    return done.stdout
