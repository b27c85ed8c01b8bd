"""Decide whether a fork of the fork server would run a command exactly as the client itself.

Every command loads this module before anything else, so it imports only modules that the interpreter has loaded anyway.
"""

from __future__ import annotations

import os
import sys

from cmdop_migrate import __version__

SOCKET = "ready.sock"  # in run_dir
INTERRUPTED = 130  # exit status after Ctrl-C: the process exits without joining its threads
SWITCH = "CMDOP_MIGRATE_READY"
TEST_PREFIX = "CMDOP_MIGRATE_TEST_"  # fault points: a test means the process that it started itself
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAX_REQUEST = 8 << 20  # an argv and an environ are at most 6 MiB: a quarter of the largest stack the kernel counts with
_PREFIXES = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "OPENSSL_",
)  # environment variables that are read only when a process starts


def of_this_process() -> bytes:
    """Return facts that are equal in two processes if the same arguments run the same code in the same way. Attributes
    that can be changed after the start (locale, time zone, streams, limits) are not among them: a fork takes them
    over."""
    first = 0 if sys.flags.safe_path else 1  # the script's directory, or the current one
    parent = os.path.dirname(PACKAGE)  # in PYTHONPATH of processes that this package starts
    path = list(dict.fromkeys(entry for entry in sys.path[first:] if entry != parent))
    set_before = sorted(
        item for item in os.environ.items() if item[0].startswith(_PREFIXES) and item[0] != "PYTHONPATH"
    )
    codes = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
    flags = (tuple(sys.flags), sorted(sys._xoptions.items()), sys.warnoptions)
    facts = (__version__, sys.executable, sys.version, PACKAGE, path, set_before, codes, flags)
    return repr(facts).encode("utf-8", "backslashreplace")


def is_off(value: str | None) -> bool:
    """Return True if this value of CMDOP_MIGRATE_READY turns the fork server off."""
    return value in ("0", "false")
