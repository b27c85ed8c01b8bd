"""Tell a checkpoint that failed from a session that ended under it."""

from __future__ import annotations

import time

from cmdop_migrate.errors import Blocked, CmdopError
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record

EXIT_SECONDS = 0.3  # until the processes of a session that is ending are gone
RECORD_SECONDS = 2.0  # until the holder of a session without processes has recorded its end


def error_if_ended(this_host: Host, record: Record) -> CmdopError | None:
    """Return the error that says how the session ended, which is the true cause of many failed checkpoints. None if the
    session lives."""
    began = time.monotonic()
    while True:
        this_host.sweep()
        after = this_host.load(record.session)
        if after is None or after.phase != "live":
            return talk.over(after or record)
        seems_alive = cgroup.is_populated(this_host.cgroup(record.session))
        if time.monotonic() > began + (EXIT_SECONDS if seems_alive else RECORD_SECONDS):
            return None
        time.sleep(0.02)


def ended_by_other_command(record: Record) -> Blocked:
    """Return the error for a session that another command ended during its checkpoint."""
    return Blocked(f"session {record.name!r} was ended while it was being checkpointed", "See: cmdop-migrate ls")
