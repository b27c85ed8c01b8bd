"""What a command and the ready process must have in common for the one to be done by a fork of the other.

Loaded by every command before anything else: nothing but what the interpreter
has loaded anyway.
"""

from __future__ import annotations

import os
import sys

from cmdop_migrate import __version__

SOCKET = "ready.sock"  # in run_dir
INTERRUPTED = 130  # how a command ends that somebody has stopped: as soon as it can, whatever its threads do
SWITCH = "CMDOP_MIGRATE_READY"
TEST_PREFIX = "CMDOP_MIGRATE_TEST_"  # steps at which a test stops the process it started
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAX_REQUEST = 8 << 20  # an argv and an environ are at most 6 MiB: a quarter of the largest stack the kernel counts with
_PREFIXES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OPENSSL_")  # read once, when a process starts


def of_this_process() -> bytes:
    """Equal where the same words would run the same code in the same way. What can still be changed after the start
    (locale, time zone, streams, limits) is not here: a fork takes it over."""
    first = 0 if sys.flags.safe_path else 1  # the script's directory, or the current one
    parent = os.path.dirname(PACKAGE)  # in PYTHONPATH for processes of our own
    path = list(dict.fromkeys(one for one in sys.path[first:] if one != parent))
    set_before = sorted(
        item for item in os.environ.items() if item[0].startswith(_PREFIXES) and item[0] != "PYTHONPATH"
    )
    codes = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())
    flags = (tuple(sys.flags), sorted(sys._xoptions.items()), sys.warnoptions)
    facts = (__version__, sys.executable, sys.version, PACKAGE, path, set_before, codes, flags)
    return repr(facts).encode("utf-8", "backslashreplace")


def is_off(value: str | None) -> bool:
    return value in ("0", "false")
