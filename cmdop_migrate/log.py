"""Diagnostics: to stderr as asked for with -v, and always to a file on this host.

The log tells an engineer what the program did; `events` tells what happened to
a session. Neither ever holds a key, a credential or what a user typed.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

LOGGER = "cmdop_migrate"
ROTATE_AT = 4 << 20  # the file before it is kept


class Secret:
    """A value that never prints itself."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "**redacted**"

    __str__ = __repr__


class _File(logging.FileHandler):
    """A log that cannot be written, on a full disk, is no reason to fail or to fill the screen."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's own name
        return


def get(name: str) -> logging.Logger:
    return logging.getLogger(f"{LOGGER}.{name}")


def set_up(file: Path | None, verbosity: int) -> None:
    """Called once by each program's main. No file when the state dir cannot be written."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    console = logging.StreamHandler(sys.stderr)
    console.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    console.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
    logger.addHandler(console)
    if file is not None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if file.exists() and file.stat().st_size > ROTATE_AT:
                file.replace(file.with_name(file.name + ".1"))
            handler = _File(file)
        except OSError:
            return
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
