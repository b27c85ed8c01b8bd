"""Take the lock of a session that is parked here, after the holder of its last incarnation has let go of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from cmdop_migrate import log
from cmdop_migrate.errors import Fenced
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record

# Seconds. A holder that has put the end on record needs milliseconds, on a busy machine a second or two.
RESTORE_WITHIN, DISCARD_WITHIN = 10.0, 3.0
LOOK_EVERY = 0.02
_OVER = ("parked", "exited")
_log = log.get("claims")


def to_restore(this_host: Host, record: Record, say: Callable[[str], None]) -> int:
    """Return the holder lock of a session that is to be restored here. Fenced when it runs, or another command restores
    it; Blocked as `Records.claim_parked`."""
    return _patiently(this_host, record.session, lambda: this_host.claim_parked(record), RESTORE_WITHIN, say)


def to_discard(this_host: Host, session: str, name: str) -> int:
    """Return the holder lock of a session that is to be discarded. Fenced when it runs, or is being restored."""
    return _patiently(this_host, session, lambda: this_host.claim_dead(session, name), DISCARD_WITHIN, lambda _: None)


def _patiently(
    this_host: Host, session: str, claim: Callable[[], int], within: float, say: Callable[[str], None]
) -> int:
    """Try again, for `within` seconds, as long as the record says that it does not run: then its last holder is still
    ending, or a restore has begun, which fails or puts it on record."""
    until = time.monotonic() + within
    told = False
    while True:
        try:
            return claim()
        except Fenced:
            now = this_host.load(session)
            if now is None or now.phase not in _OVER or time.monotonic() > until:
                raise
        if not told:
            say("waiting until the last process that had it here has ended")
            _log.info("session %s: waiting until another process lets go of it", session)
            told = True
        time.sleep(LOOK_EVERY)
