"""Fetch a CRIU that works on this kernel into a private prefix (`doctor --fix`).

Fetching belongs to set-up: `find` never calls it. The layout of the prefix is in `find`'s docstring.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cmdop_migrate.criu.install import apt
from cmdop_migrate.criu.install.find import (
    Criu,
    examine,
    parse_version,
    private_candidate,
    too_old,
    working_private,
)
from cmdop_migrate.errors import Blocked, Unreachable
from cmdop_migrate.util import locks

Say = Callable[[str], None]


def fetch(prefix: Path, say: Say) -> Criu:
    """Make sure that the prefix holds a CRIU that works here, and return it. Change nothing outside the prefix.

    If this is killed at any moment, the prefix has no new CRIU or a complete one. A second process that fetches at the
    same time waits, and uses the result of the first. Raise Blocked or Unreachable.
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
        if (present := working_private(prefix)) is not None:
            return present
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
        result = examine(private_candidate(tree), release)
        if not result.problem:
            return _install(tree, prefix / name, work, prefix)
        refused.append(f"{suite}: CRIU {offered}: {result.problem}")
    if failures and not refused:
        raise Unreachable(f"cannot fetch CRIU: {failures[-1].message}", failures[-1].hint)
    reasons = "; ".join([*refused, *(failure.message for failure in failures)])
    raise Blocked(f"no CRIU for kernel {release} in the archive: {reasons}", "Install one by hand and set `criu`.")


def _install(tree: Path, target: Path, work: Path, prefix: Path) -> Criu:
    # The tree exists from the rename on; its files must be on disk before.
    os.sync()
    if target.exists():
        target.rename(work / "replaced")
    tree.rename(target)
    installed = working_private(prefix)
    if installed is None:
        raise Blocked(f"the CRIU just fetched does not work: {target}", "Run `cmdop-migrate doctor` to see why.")
    return installed


def _locked(prefix: Path, say: Say) -> contextlib.AbstractContextManager[None]:
    return locks.held(prefix / "lock", lambda: say("waiting for another fetch of CRIU to end"))


def read_os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """Return the fields of /etc/os-release; empty if it cannot be read."""
    try:
        return parse_os_release(path.read_text(encoding="utf-8"))
    except OSError:
        return {}


def parse_os_release(text: str) -> dict[str, str]:
    """Parse the text of /etc/os-release."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}


def install_hint(release: dict[str, str]) -> str:
    """Return a hint with the command that installs CRIU on this distribution."""
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
