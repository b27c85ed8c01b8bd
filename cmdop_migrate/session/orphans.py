"""End the processes of sessions that nobody keeps and no record knows: of a restore whose processes were all killed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cmdop_migrate import log
from cmdop_migrate.errors import Blocked
from cmdop_migrate.model import is_session_id
from cmdop_migrate.session import cgroup

if TYPE_CHECKING:
    from cmdop_migrate.session.records import Records

_log = log.get("session")
_SWEPT = ("starting", "live", "handing", "restoring")  # with their records


def end(records: Records) -> None:
    """Remove the cgroup of every session that has no record, or is on record as parked or exited, unless somebody holds
    its lock: its holder says goodbye, or it is just being restored. Call it with the host's lock held."""
    try:
        top = os.path.dirname(records.cgroup("any"))
        groups = os.listdir(top)
    except (Blocked, FileNotFoundError, NotADirectoryError):
        return
    for session in filter(is_session_id, groups):
        record = records.load(session)
        if record is not None and record.phase in _SWEPT:
            continue
        lock = None
        if records.directory(session).exists():
            lock = records.take(session)
            if lock is None:
                continue
        try:
            _log.warning("session %s: processes that nobody keeps are ended", session)
            cgroup.remove(os.path.join(top, session))
        finally:
            if lock is not None:
                os.close(lock)
