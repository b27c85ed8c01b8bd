"""Retry a checkpoint while the obstacle is one that passes by itself (`--wait-quiet`).

A sandboxed command in its own pid namespace, a debugger, a connection no program has accepted yet: each is gone in a
moment. Such findings and failures are marked `passing`; every other error is raised immediately.
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

# Retried even without --wait-quiet: a session that was frozen just as a program started another one.
STARTING_CHECK, STARTING_SECONDS = "shared_memory", 2.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.5  # seconds between two attempts
_log = log.get("checkpoint")
Progress = Callable[[str], None]
R = TypeVar("R")


class WaitOptions(Protocol):
    """Describe options that say how long to wait."""

    @property
    def wait_quiet(self) -> float: ...


W = TypeVar("W", bound=WaitOptions)
Attempt = Callable[[Host, str, W, Progress], R]


def retry_until_quiet(attempt: Attempt[W, R]) -> Callable[..., R]:
    """Wrap a checkpoint: repeat an attempt that fails for a passing reason until `wait_quiet` seconds are over."""

    @functools.wraps(attempt)
    def until_quiet(this_host: Host, reference: str, options: W, progress: Progress = lambda _: None) -> R:
        began, pause = time.monotonic(), SHORTEST_PAUSE
        while True:
            try:
                return attempt(this_host, reference, options, progress)
            except (Blocked, CriuFailed) as error:
                is_starting = isinstance(error, Blocked) and error.check == STARTING_CHECK
                until = began + max(options.wait_quiet, STARTING_SECONDS if is_starting else 0.0)
                if not error.passing or time.monotonic() >= until:
                    raise _waited(error, time.monotonic() - began, options.wait_quiet) from None
                _log.info("waiting: %s", error.message.partition("\n")[0])
                progress("waiting")
            wait(this_host, reference, until, pause)
            pause = min(2 * pause, LONGEST_PAUSE)  # a failed dump froze the session: not many times a second

    return until_quiet


def settle(this_host: Host, reference: str, seconds: float) -> None:
    """Wait until no passing finding blocks a checkpoint, for `seconds` at most."""
    wait(this_host, reference, time.monotonic() + seconds, 0.0)


def wait(this_host: Host, reference: str, until: float, pause: float) -> None:
    """Check repeatedly until no passing finding blocks a checkpoint, or until the time `until` (CLOCK_MONOTONIC). A
    finding that does not pass ends the wait: the next attempt reports it. The first check is made after `pause`."""
    while time.monotonic() < until:
        time.sleep(min(pause, max(0.0, until - time.monotonic())))
        pause = min(max(2 * pause, SHORTEST_PAUSE), LONGEST_PAUSE)
        record = this_host.find(reference)
        blockers = dump_checks.blockers(this_host.cgroup(record.session), record)
        if not blockers or not all(finding.passing for finding in blockers):
            return


def _waited(error: CmdopError, seconds: float, wait_quiet: float) -> CmdopError:
    """Add to the error's message how long it was waited for."""
    if wait_quiet and error.passing:
        first, line, rest = error.message.partition("\n")
        error.message = f"{first} (waited {units.show_duration(seconds)} for it to pass){line}{rest}"
    return error
