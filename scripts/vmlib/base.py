"""What machines install that is not the project, gathered on this machine: they have no network to fetch it from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cmdop_migrate.config import DEFAULT_STATE_DIR
from cmdop_migrate.criu.install import fetch
from cmdop_migrate.errors import CmdopError
from scripts.vmlib import inputs
from scripts.vmlib.model import CACHE, PROJECT, VmTrouble


def criu() -> Path:
    """A private CRIU as the project fetches it: this host's, or one of our own."""
    for prefix in (Path(DEFAULT_STATE_DIR, "criu"), CACHE / "criu"):
        found = sorted(prefix.glob("criu-*"))
        if found:
            return found[-1]
    try:
        fetch.fetch(CACHE / "criu", lambda words: print(f"test-vm: {words}", flush=True))
    except CmdopError as error:
        raise VmTrouble(f"no CRIU for the machines: {error.message} {error.hint}") from error
    return sorted((CACHE / "criu").glob("criu-*"))[-1]


def gather() -> Path:
    """-> the directory; it appears whole, by rename."""
    tree = criu()
    made = CACHE / f"base-{inputs.base(tree.name)}"
    if made.exists():
        return made
    for old in CACHE.glob("base-*"):
        shutil.rmtree(old)
    work = CACHE / f"base-work.{os.getpid()}"
    (work / "store").mkdir(parents=True)
    (work / "requirements").write_text("".join(f"{one}\n" for one in inputs.requirements()))
    for version in inputs.PYTHONS:
        chosen = [f"--platform={one}" for one in inputs.PLATFORMS]
        where = ["-d", str(work / f"wheels-{version}"), "-r", str(work / "requirements")]
        _pip("download", "--only-binary=:all:", f"--python-version={version}", *chosen, *where)
    _pip("download", "--no-deps", "-d", str(work / "store"), inputs.s3_server())
    shutil.copytree(tree, work / "criu" / tree.name, symlinks=True)
    work.rename(made)
    return made


def _pip(*words: str) -> None:
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise VmTrouble(f"pip {words[0]} failed:\n{done.stderr[-1500:]}")


def wheel(into: Path) -> None:
    """Of the project, as it is in this checkout."""
    _pip("wheel", "--no-deps", "-w", str(into), str(PROJECT))
