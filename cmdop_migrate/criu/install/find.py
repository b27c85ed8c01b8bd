"""Find a CRIU that works on this kernel: a configured one, the system's, or a private one that `fetch` unpacked.

PREFIX/lock              held while fetching
PREFIX/verdicts.json     cached results of probing CRIUs on this kernel
PREFIX/criu-VERSION/     one unpacked CRIU with its libraries; complete as soon as it exists (rename)
PREFIX/work-*/           a running fetch, or the remains of a killed one; never read
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cmdop_migrate.criu.install.probe_cache import ProbeCache, ProbeResult
from cmdop_migrate.errors import Blocked

Source = Literal["configured", "system", "private"]
Version = tuple[int, int, int]

SYSTEM_NAMES = ("/usr/sbin/criu", "/usr/bin/criu", "/usr/local/sbin/criu", "/usr/local/bin/criu")
HALF_CACHE, HALF_CACHE_AGE = "/run/criu.kdat.tmp", 30.0  # CRIU's own file, written within milliseconds
_PROBE_TIMEOUT = 30.0
# From kernel 6.16 on, SO_PASSCRED on an inet socket fails with EOPNOTSUPP, which is fatal for CRIU before 4.2.
_STRICT_KERNEL = (6, 16)
_STRICT_CRIU = (4, 2, 0)


@dataclass(frozen=True)
class Criu:
    """Describe a CRIU to run: `argv` is the command up to its own arguments."""

    argv: tuple[str, ...]
    version: Version
    source: Source


@dataclass(frozen=True)
class Candidate:
    """Describe a CRIU that was not probed yet. `binary` is the file, `argv` the command that starts it."""

    argv: tuple[str, ...]
    binary: Path
    source: Source


def parse_version(text: str) -> Version | None:
    """Return the version in the output of `criu --version`, or in a package version with epoch and revision."""
    match = re.search(r"(?:^|[\s:])v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def kernel_version(release: str) -> tuple[int, int]:
    """Return (6, 18) for `6.18.44-cloud`, and (0, 0) for a release without such a beginning."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def too_old(version: Version, release: str) -> str | None:
    """Return the reason why this version is known not to work on this kernel although it may start, or None."""
    if version < _STRICT_CRIU and kernel_version(release) >= _STRICT_KERNEL:
        shown = ".".join(map(str, version))
        return f"CRIU {shown} cannot dump network sockets on kernel {release}: from 6.16 on CRIU 4.2 is needed"
    return None


def find(configured: str | None, prefix: Path) -> Criu | None:
    """Return the CRIU to use: the configured one, else the system's, else the private one; None when none works.

    Raise Blocked if the configured CRIU does not work: it is not silently replaced by another one.
    """
    _clear_half_cache()
    cache = ProbeCache(prefix)
    if configured:
        result = _probe(Candidate((configured,), Path(configured), "configured"), cache, fresh=False)
        if result.problem:
            result = _probe(Candidate((configured,), Path(configured), "configured"), cache, fresh=True)
        if result.problem:
            raise Blocked(
                f"the CRIU in the settings does not work here: {configured}: {result.problem}",
                "Set `criu` to one that passes `criu check`, or remove it and run `cmdop-migrate doctor --fix`.",
            )
        return Criu((configured,), result.version, "configured")
    candidates = [*_system(), *_private(prefix)]
    # A cached failure may have a passing cause (no loopback yet), so a CRIU that failed is probed again at the end.
    for fresh in (False, True):
        for candidate in candidates:
            result = _probe(candidate, cache, fresh)
            if not result.problem:
                return Criu(candidate.argv, result.version, candidate.source)
    return None


def _clear_half_cache() -> None:
    """Remove the half-written cache of a killed CRIU. CRIU caches what it probed of the kernel in /run, written to a
    temporary name first. If that name exists, every CRIU on this host probes the kernel again, while a session is
    frozen."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(HALF_CACHE).st_mtime > HALF_CACHE_AGE:
            os.unlink(HALF_CACHE)


def problems(configured: str | None, prefix: Path) -> list[str]:
    """Return, for each CRIU on this host that does not work, the reason as text."""
    candidates = [Candidate((configured,), Path(configured), "configured")] if configured else []
    cache = ProbeCache(prefix)
    probed = [(each, _probe(each, cache, fresh=False)) for each in (*candidates, *_system(), *_private(prefix))]
    return [f"{each.binary}: {result.problem}" for each, result in probed if result.problem]


def features(criu: Criu, names: tuple[str, ...]) -> frozenset[str]:
    """Return those of these optional features of CRIU that this kernel supports."""
    return frozenset(name for name in names if _call((*criu.argv, "check", "--feature", name))[0] == 0)


def working_private(prefix: Path) -> Criu | None:
    """Return the newest CRIU in the prefix that works, probed again."""
    cache = ProbeCache(prefix)
    for candidate in _private(prefix):
        result = _probe(candidate, cache, fresh=True)
        if not result.problem:
            return Criu(candidate.argv, result.version, "private")
    return None


def _system() -> list[Candidate]:
    paths = dict.fromkeys(path for path in (shutil.which("criu"), *SYSTEM_NAMES) if path)
    return [Candidate((path,), Path(path), "system") for path in paths if os.access(path, os.X_OK)]


def _private(prefix: Path) -> list[Candidate]:
    trees = sorted(prefix.glob("criu-*"), key=lambda tree: parse_version(tree.name[5:]) or (0, 0, 0), reverse=True)
    return [private_candidate(tree) for tree in trees]


def private_candidate(tree: Path) -> Candidate:
    """Return the CRIU in an unpacked tree, started by the tree's own loader, so that it uses no library of the
    system."""
    binary = tree / "usr/sbin/criu"
    patterns = [f"{top}/*/{name}" for top in ("usr/lib", "lib") for name in ("ld-linux*.so.*", "ld64.so.*")]
    loaders = sorted(path for pattern in patterns for path in tree.glob(pattern))
    if not loaders:
        return Candidate((str(binary),), binary, "private")
    libraries = dict.fromkeys(str(tree / top / loaders[0].parent.name) for top in ("usr/lib", "lib"))
    return Candidate((str(loaders[0]), "--library-path", ":".join(libraries), str(binary)), binary, "private")


def _probe(candidate: Candidate, cache: ProbeCache, fresh: bool) -> ProbeResult:
    release = os.uname().release
    known = None if fresh else cache.get(release, candidate.binary)
    if known is not None:
        return known
    result = examine(candidate, release)
    # Without root CRIU cannot probe the kernel: its failure is not cached.
    if os.geteuid() == 0:
        cache.put(release, candidate.binary, result)
    return result


def examine(candidate: Candidate, release: str) -> ProbeResult:
    """Run the candidate and `criu check`, and return the result."""
    code, words = _call((*candidate.argv, "--version"))
    version = parse_version(words) if code == 0 else None
    if version is None:
        return ProbeResult((0, 0, 0), f"does not start: {_last_line(words)}")
    reason = too_old(version, release)
    if reason:
        return ProbeResult(version, reason)
    code, words = _call((*candidate.argv, "check"))
    return ProbeResult(version, "" if code == 0 else f"`criu check` fails: {_last_line(words)}")


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
