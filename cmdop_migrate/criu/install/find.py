"""Find a CRIU that works on this kernel, or fetch one into a private prefix.

PREFIX/lock              held while fetching
PREFIX/verdicts.json     what was found to work here, so that finding is cheap
PREFIX/criu-VERSION/     one unpacked CRIU with its libraries; appears whole, by rename
PREFIX/work-*/           a fetch under way, or what a killed one left; never looked into
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cmdop_migrate.criu.install import apt
from cmdop_migrate.criu.install.probe_cache import Verdict, Verdicts
from cmdop_migrate.errors import Blocked, Unreachable
from cmdop_migrate.util import locks

Source = Literal["configured", "system", "private"]
Say = Callable[[str], None]
Version = tuple[int, int, int]

SYSTEM_NAMES = ("/usr/sbin/criu", "/usr/bin/criu", "/usr/local/sbin/criu", "/usr/local/bin/criu")
HALF_CACHE, HALF_CACHE_AGE = "/run/criu.kdat.tmp", 30.0  # CRIU's own names; it takes milliseconds to write
_PROBE_TIMEOUT = 30.0
# From kernel 6.16 on, SO_PASSCRED on an inet socket answers EOPNOTSUPP; CRIU before 4.2 takes that as fatal.
_STRICT_KERNEL = (6, 16)
_STRICT_CRIU = (4, 2, 0)


@dataclass(frozen=True)
class Criu:
    """A CRIU to run: `argv` is the command up to its own arguments."""

    argv: tuple[str, ...]
    version: Version
    source: Source


@dataclass(frozen=True)
class Candidate:
    """A CRIU not yet known to work. `binary` is what is on disk, `argv` how to start it."""

    argv: tuple[str, ...]
    binary: Path
    source: Source


def parse_version(text: str) -> Version | None:
    """From `criu --version`, or a package version with epoch and revision."""
    match = re.search(r"(?:^|[\s:])v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def kernel_version(release: str) -> tuple[int, int]:
    """`6.18.44-cloud` -> (6, 18). A release that does not start like this counts as the oldest."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def too_old(version: Version, release: str) -> str | None:
    """Why this version cannot serve this kernel although it may start on it; None when nothing is known against it."""
    if version < _STRICT_CRIU and kernel_version(release) >= _STRICT_KERNEL:
        shown = ".".join(map(str, version))
        return f"CRIU {shown} cannot dump network sockets on kernel {release}: from 6.16 on it takes CRIU 4.2"
    return None


def find(configured: str | None, prefix: Path) -> Criu | None:
    """The CRIU to use: the configured one, else the system's, else the private one; None when none works.

    Blocked when a configured one does not work: what somebody asked for by name is not replaced behind their back.
    """
    _clear_half_cache()
    verdicts = Verdicts(prefix)
    if configured:
        verdict = _judge(Candidate((configured,), Path(configured), "configured"), verdicts, fresh=False)
        if verdict.problem:
            verdict = _judge(Candidate((configured,), Path(configured), "configured"), verdicts, fresh=True)
        if verdict.problem:
            raise Blocked(
                f"the CRIU set in the settings does not work here: {configured}: {verdict.problem}",
                "Set `criu` to one that passes `criu check`, or remove it and run `cmdop-migrate doctor --fix`.",
            )
        return Criu((configured,), verdict.version, "configured")
    candidates = [*_system(), *_private(prefix)]
    # A bad verdict may come from a passing state (no loopback yet), so it only ever ranks: it never has the last word.
    for fresh in (False, True):
        for candidate in candidates:
            verdict = _judge(candidate, verdicts, fresh)
            if not verdict.problem:
                return Criu(candidate.argv, verdict.version, candidate.source)
    return None


def _clear_half_cache() -> None:
    """What CRIU learnt of the kernel it keeps in /run, written under a second name first. One that was killed just then
    leaves that name, and every CRIU on this machine has to learn it all anew from then on, while a session waits."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(HALF_CACHE).st_mtime > HALF_CACHE_AGE:
            os.unlink(HALF_CACHE)


def problems(configured: str | None, prefix: Path) -> list[str]:
    """Why each CRIU on this machine is not used; for people."""
    candidates = [Candidate((configured,), Path(configured), "configured")] if configured else []
    verdicts = Verdicts(prefix)
    judged = [(each, _judge(each, verdicts, fresh=False)) for each in (*candidates, *_system(), *_private(prefix))]
    return [f"{each.binary}: {verdict.problem}" for each, verdict in judged if verdict.problem]


def features(criu: Criu, names: tuple[str, ...]) -> frozenset[str]:
    """Those of CRIU's optional features that this kernel has."""
    return frozenset(name for name in names if _call((*criu.argv, "check", "--feature", name))[0] == 0)


def fetch(prefix: Path, say: Say) -> Criu:
    """Make sure the prefix holds a CRIU that works here, and return it. Changes nothing outside the prefix.

    Killed at any moment it leaves no new CRIU or a whole one. Two at once: the second waits, and uses the first's.
    """
    if shutil.which("apt-get") is None:
        raise Blocked("no CRIU that works on this kernel was found", install_hint(read_os_release()))
    try:
        prefix.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise Blocked(
            f"cannot write to {prefix}: {error.strerror}", "Run as root, or set `state_dir` elsewhere."
        ) from error
    with _locked(prefix, say):
        for left in prefix.glob("work-*"):
            shutil.rmtree(left, ignore_errors=True)
        found = _working_private(prefix)
        if found:
            return found
        work = Path(tempfile.mkdtemp(prefix="work-", dir=prefix))
        work.chmod(0o755)
        try:
            return _fetch_into(prefix, work, say)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _fetch_into(prefix: Path, work: Path, say: Say) -> Criu:
    archive = apt.configured_archive()
    release = os.uname().release
    refused: list[str] = []
    failures: list[Unreachable] = []
    for suite in archive.suites:
        say(f"looking for CRIU in {suite} at {archive.uri}")
        (work / suite).mkdir()
        source = apt.PrivateApt(archive, suite, work / suite)
        try:
            source.update()
            offered = source.candidate("criu")
            reason = "has no CRIU" if offered is None else too_old(parse_version(offered) or (0, 0, 0), release)
            if offered is None or reason:
                refused.append(f"{suite}: {reason}")
                continue
            debs = source.download("criu")
        except Unreachable as failure:
            failures.append(failure)
            continue
        size = sum(deb.stat().st_size for deb in debs)
        say(f"unpacking CRIU {offered}: {len(debs)} packages, {size / 1e6:.1f} MB, into {prefix}")
        tree = work / suite / "tree"
        apt.unpack(debs, tree)
        name = "criu-" + re.sub(r"[^A-Za-z0-9.+~-]", "_", offered)
        verdict = _examine(private_candidate(tree), release)
        if not verdict.problem:
            return _install(tree, prefix / name, work, prefix)
        refused.append(f"{suite}: CRIU {offered}: {verdict.problem}")
    if failures and not refused:
        raise Unreachable(f"cannot fetch CRIU: {failures[-1].message}", failures[-1].hint)
    reasons = "; ".join([*refused, *(failure.message for failure in failures)])
    raise Blocked(f"no CRIU for kernel {release} in the archive: {reasons}", "Install one by hand and set `criu`.")


def _install(tree: Path, target: Path, work: Path, prefix: Path) -> Criu:
    # The rename is what makes it exist; everything it names must be on disk before.
    os.sync()
    if target.exists():
        target.rename(work / "replaced")
    tree.rename(target)
    found = _working_private(prefix)
    if found is None:
        raise Blocked(f"the CRIU just fetched stopped working: {target}", "Run `cmdop-migrate doctor` to see why.")
    return found


def _working_private(prefix: Path) -> Criu | None:
    verdicts = Verdicts(prefix)
    for candidate in _private(prefix):
        verdict = _judge(candidate, verdicts, fresh=True)
        if not verdict.problem:
            return Criu(candidate.argv, verdict.version, "private")
    return None


def _locked(prefix: Path, say: Say) -> contextlib.AbstractContextManager[None]:
    return locks.held(prefix / "lock", lambda: say("waiting for another fetch of CRIU to end"))


def _system() -> list[Candidate]:
    paths = dict.fromkeys(path for path in (shutil.which("criu"), *SYSTEM_NAMES) if path)
    return [Candidate((path,), Path(path), "system") for path in paths if os.access(path, os.X_OK)]


def _private(prefix: Path) -> list[Candidate]:
    trees = sorted(prefix.glob("criu-*"), key=lambda tree: parse_version(tree.name[5:]) or (0, 0, 0), reverse=True)
    return [private_candidate(tree) for tree in trees]


def private_candidate(tree: Path) -> Candidate:
    """CRIU in an unpacked tree, started by the tree's own loader so that it never meets the system's libraries."""
    binary = tree / "usr/sbin/criu"
    patterns = [f"{top}/*/{name}" for top in ("usr/lib", "lib") for name in ("ld-linux*.so.*", "ld64.so.*")]
    loaders = sorted(path for pattern in patterns for path in tree.glob(pattern))
    if not loaders:
        return Candidate((str(binary),), binary, "private")
    libraries = dict.fromkeys(str(tree / top / loaders[0].parent.name) for top in ("usr/lib", "lib"))
    return Candidate((str(loaders[0]), "--library-path", ":".join(libraries), str(binary)), binary, "private")


def _judge(candidate: Candidate, verdicts: Verdicts, fresh: bool) -> Verdict:
    release = os.uname().release
    known = None if fresh else verdicts.get(release, candidate.binary)
    if known is not None:
        return known
    verdict = _examine(candidate, release)
    # Without root CRIU cannot even look: that says nothing about the kernel.
    if os.geteuid() == 0:
        verdicts.put(release, candidate.binary, verdict)
    return verdict


def _examine(candidate: Candidate, release: str) -> Verdict:
    code, words = _call((*candidate.argv, "--version"))
    version = parse_version(words) if code == 0 else None
    if version is None:
        return Verdict((0, 0, 0), f"does not start: {_last_line(words)}")
    reason = too_old(version, release)
    if reason:
        return Verdict(version, reason)
    code, words = _call((*candidate.argv, "check"))
    return Verdict(version, "" if code == 0 else f"`criu check` fails: {_last_line(words)}")


def _call(argv: tuple[str, ...]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout + done.stderr


def _last_line(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no output"])[-1]


def read_os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """What the distribution says it is; empty when it does not."""
    try:
        return parse_os_release(path.read_text(encoding="utf-8"))
    except OSError:
        return {}


def parse_os_release(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def install_hint(release: dict[str, str]) -> str:
    """The command that brings CRIU on this distribution."""
    names = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    commands = {
        "fedora": "dnf install criu",
        "rhel": "dnf install criu",
        "centos": "dnf install criu",
        "arch": "pacman -S criu",
        "suse": "zypper install criu",
        "opensuse": "zypper install criu",
        "alpine": "apk add criu",
        "gentoo": "emerge sys-process/criu",
        "void": "xbps-install criu",
        "nixos": "add pkgs.criu to environment.systemPackages",
    }
    for name in names:
        if name in commands:
            return f"Install CRIU 4.2 or newer: {commands[name]}."
    return "Install the package criu, version 4.2 or newer, or set `criu` to the path of one."
