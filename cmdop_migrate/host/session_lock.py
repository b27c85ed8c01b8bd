"""Take the lock of a session that is parked here, after the holder of its last incarnation has released it."""

from __future__ import annotations

import time
from collections.abc import Callable

from cmdop_migrate import log
from cmdop_migrate.errors import Fenced
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record

# Seconds. A holder that has recorded the end needs milliseconds to exit, on a busy machine a second or two.
RESTORE_WITHIN, DISCARD_WITHIN = 10.0, 3.0
RETRY_EVERY = 0.02  # seconds between two attempts
_OVER = ("parked", "exited")
_log = log.get("claims")


def to_restore(this_host: Host, record: Record, say: Callable[[str], None]) -> int:
    """Return the holder lock of a session that is to be restored here. Raise Fenced if it runs, or another command
    restores it; Blocked as `Host.claim_parked` does."""
    return _patiently(this_host, record.session, lambda: this_host.claim_parked(record), RESTORE_WITHIN, say)


def to_discard(this_host: Host, session: str, name: str) -> int:
    """Return the holder lock of a session that is to be discarded. Raise Fenced if it runs, or is being restored."""
    return _patiently(this_host, session, lambda: this_host.claim_dead(session, name), DISCARD_WITHIN, lambda _: None)


def _patiently(
    this_host: Host, session: str, claim: Callable[[], int], within: float, say: Callable[[str], None]
) -> int:
    """Call `claim` again, for `within` seconds, as long as the record says that the session does not run: then its last
    holder is still exiting, or a restore has begun, which fails or puts the session on record."""
    until = time.monotonic() + within
    reported = False
    while True:
        try:
            return claim()
        except Fenced:
            now = this_host.load(session)
            if now is None or now.phase not in _OVER or time.monotonic() > until:
                raise
        if not reported:
            say("waiting until the last holder of the session has exited")
            _log.info("session %s: waiting until another process releases its lock", session)
            reported = True
        time.sleep(RETRY_EVERY)
