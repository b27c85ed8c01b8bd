"""Tell a checkpoint that failed from a session that ended under it."""

from __future__ import annotations

import time

from cmdop_migrate.errors import Blocked, CmdopError
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record

DYING, DEAD = 0.3, 2.0  # seconds until a session that is ending has ended, and until its holder has noted that


def reason(this_host: Host, record: Record) -> CmdopError | None:
    """Find out why a session is no longer there, which is the true reason of many a failed checkpoint. None when it
    lives."""
    began = time.monotonic()
    while True:
        this_host.sweep()
        after = this_host.load(record.session)
        if after is None or after.phase != "live":
            return talk.over(after or record)
        seems_alive = cgroup.is_populated(this_host.cgroup(record.session))
        if time.monotonic() > began + (DYING if seems_alive else DEAD):
            return None
        time.sleep(0.02)


def taken(record: Record) -> Blocked:
    """The error for a session that another command ended during its checkpoint."""
    return Blocked(f"session {record.name!r} was ended while it was being checkpointed", "See: cmdop-migrate ls")
