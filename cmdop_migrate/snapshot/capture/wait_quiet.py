"""Try a checkpoint again while what is in its way goes away by itself (`--wait-quiet`).

A sandboxed command in its own pid namespace, a debugger, a connection no program has accepted yet: each is gone in a
moment. Such findings and failures are marked `passing`; everything else is raised at once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from cmdop_migrate import log, units
from cmdop_migrate.errors import Blocked, CmdopError, CriuFailed
from cmdop_migrate.host.host import Host
from cmdop_migrate.snapshot.capture import dump_checks

# Waited for without being asked: a session that was frozen just as a program started another one.
STARTING, START = "shared_memory", 2.0
SHORTEST, LONGEST = 0.02, 0.5  # seconds between two looks
_log = log.get("checkpoint")
Progress = Callable[[str], None]
R = TypeVar("R")


class Patient(Protocol):
    """A wish that tells how long to wait."""

    @property
    def wait_quiet(self) -> float: ...


W = TypeVar("W", bound=Patient)
Attempt = Callable[[Host, str, W, Progress], R]


def retried(attempt: Attempt[W, R]) -> Callable[..., R]:
    """Wrap a checkpoint: an attempt that fails for a passing reason is made again until the time given is over."""

    @functools.wraps(attempt)
    def until_quiet(this_host: Host, reference: str, wanted: W, progress: Progress = lambda _: None) -> R:
        began, pause = time.monotonic(), SHORTEST
        while True:
            try:
                return attempt(this_host, reference, wanted, progress)
            except (Blocked, CriuFailed) as error:
                moment = START if isinstance(error, Blocked) and error.check == STARTING else 0.0
                until = began + max(wanted.wait_quiet, moment)
                if not error.passing or time.monotonic() >= until:
                    raise _waited(error, time.monotonic() - began, wanted.wait_quiet) from None
                _log.info("waiting: %s", error.message.partition("\n")[0])
                progress("waiting")
            wait(this_host, reference, until, pause)
            pause = min(2 * pause, LONGEST)  # a failed dump froze the session: not many times a second

    return until_quiet


def settle(this_host: Host, reference: str, seconds: float) -> None:
    """Wait until nothing passing is in the way of a checkpoint, for so many seconds at most."""
    wait(this_host, reference, time.monotonic() + seconds, 0.0)


def wait(this_host: Host, reference: str, until: float, pause: float) -> None:
    """Look again and again, until nothing passing is in the way or the time (of the monotonic clock) has come. One
    that does not pass ends the waiting: the next attempt reports it. `pause`: before the first look."""
    while time.monotonic() < until:
        time.sleep(min(pause, max(0.0, until - time.monotonic())))
        pause = min(max(2 * pause, SHORTEST), LONGEST)
        record = this_host.find(reference)
        found = dump_checks.blockers(this_host.cgroup(record.session), record)
        if not found or not all(one.passing for one in found):
            return


def _waited(error: CmdopError, seconds: float, asked: float) -> CmdopError:
    if asked and error.passing:
        first, line, rest = error.message.partition("\n")
        error.message = f"{first} (waited {units.show_duration(seconds)} for it to pass){line}{rest}"
    return error
