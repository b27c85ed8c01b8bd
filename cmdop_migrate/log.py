"""Log diagnostics to stderr, as requested with -v, and always to a file on this host.

The log tells an engineer what the program did; `events` tells what happened to a session. Neither ever contains a key,
a credential or the input of a user."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

LOGGER = "cmdop_migrate"
ROTATE_AT = 4 << 20  # bytes; one older file is kept


class Secret:
    """Wrap a value that must never be printed."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "**redacted**"

    __str__ = __repr__


class _File(logging.FileHandler):
    """Write the log file, and ignore errors such as a full disk: they must not fail the command or fill the screen."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's own name
        return


def get(name: str) -> logging.Logger:
    """Return the logger of one part of the program."""
    return logging.getLogger(f"{LOGGER}.{name}")


def set_up(file: Path | None, verbosity: int) -> None:
    """Set up logging; the main function of each program calls this once. Log to no file if it cannot be written."""
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
