"""Diagnose whether this machine can run sessions, and install what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from cmdop_migrate.config import Config
from cmdop_migrate.criu.install import fetch, find
from cmdop_migrate.errors import Blocked, CmdopError, NotRoot, Unreachable
from cmdop_migrate.host import drain_journal, resources
from cmdop_migrate.preflight.facts.machine import CriuFacts, gather
from cmdop_migrate.preflight.rules import doctor
from cmdop_migrate.preflight.rules.doctor import Check

Say = Callable[[str], None]

# The tool a session needs -> the Debian package that brings it.
PACKAGES = {"tini-static": "tini", "nft": "nftables", "ip": "iproute2", "tar": "tar"}
FEATURES = ("uffd-noncoop", "mem_dirty_track")
_INSTALL_TIMEOUT = 900.0
# Not fatal: the machine works, and is kept empty on purpose.
DRAINED = Check("drained", "degraded", "this host is being drained: no session starts here", "cmdop-migrate undrain")


def criu_prefix(config: Config) -> Path:
    """Return the directory of this host's private CRIU."""
    return config.state_dir / "criu"


def diagnose(config: Config) -> list[Check]:
    """Check every need of this machine, in order. `rules.doctor.usable` tells whether sessions can work. Change
    nothing."""
    checks = doctor.run(gather(config.state_dir, _criu_facts(config)))
    return [*checks, *([DRAINED] if drain_journal.read_flag(config.state_dir) else [])]


def fix(config: Config, say: Say) -> list[Check]:
    """Install what is missing, then diagnose again. `say` receives each step before it is done.

    Everything that can be done is done before the first failure is raised.
    """
    if os.geteuid() != 0:
        raise NotRoot("installing what is missing takes root", "Run it with sudo.")
    failures: list[CmdopError] = []
    for repair in (_install_packages, _provide_criu):
        try:
            repair(config, say)
        except CmdopError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return diagnose(config)


def _provide_criu(config: Config, say: Say) -> None:
    prefix = criu_prefix(config)
    if find.find(config.criu, prefix) is None:
        criu = fetch.fetch(prefix, say)
        say(f"CRIU {'.'.join(map(str, criu.version))} is ready in {prefix}")


def _install_packages(config: Config, say: Say) -> None:
    tools = gather(config.state_dir, CriuFacts()).tools
    missing = [package for tool, package in PACKAGES.items() if tools.get(tool) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Blocked(f"not installed: {', '.join(missing)}", "Install these with the distribution's package manager.")
    say(f"installing {', '.join(missing)}")
    # The package lists may be missing (images ship without) or stale; only then is fetching them worth the time.
    if _apt("install", "--yes", "--no-install-recommends", *missing) is not None:
        failed = _apt("update") or _apt("install", "--yes", "--no-install-recommends", *missing)
        if failed is not None:
            raise Unreachable(
                f"apt-get could not install {', '.join(missing)}: {failed}", "Run apt-get update by hand."
            )


def _apt(*arguments: str) -> str | None:
    """Run apt-get. Return None on success, else its last line of error output."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    argv = ["apt-get", "-qq", *arguments]
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_INSTALL_TIMEOUT:.0f} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit {done.returncode}")


def _criu_facts(config: Config) -> CriuFacts:
    try:
        tries = (find.find(config.criu, prefix) for prefix in resources.criu_prefixes(config))
        criu = next((found for found in tries if found is not None), None)
    except Blocked as error:
        return CriuFacts(problems=(error.message,))
    if criu is None:
        return CriuFacts(problems=tuple(find.problems(config.criu, criu_prefix(config))))
    version = ".".join(map(str, criu.version))
    return CriuFacts(version, criu.source, find.features(criu, FEATURES))
