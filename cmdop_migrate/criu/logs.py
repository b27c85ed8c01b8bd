"""CRIU's log -> what went wrong, what to do. Filled in below."""

from __future__ import annotations

from pathlib import Path

from cmdop_migrate.errors import CriuFailed


def failure(what: str, log_path: Path, errmsg: str = "") -> CriuFailed:
    text = log_path.read_text(errors="replace") if log_path.exists() else ""
    return CriuFailed(what + errmsg + text[-2000:])
