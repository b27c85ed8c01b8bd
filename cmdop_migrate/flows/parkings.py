"""Sessions that ended here while they were being parked, before anybody could note it: their leases tell.

A holder that is ended between commit and park does not know of the commit, and one that is killed notes nothing. Only a
lease that is parked under the very token the session had here says that it is parked; whoever restores it from there
on has a higher one. Nothing is done to a lease here.
"""

from __future__ import annotations

from dataclasses import replace

from cmdop_migrate import log
from cmdop_migrate.errors import CmdopError
from cmdop_migrate.flows import handover
from cmdop_migrate.flows import leases as host_leases
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.model import Record
from cmdop_migrate.session.records import Records
from cmdop_migrate.session.wire import UNSURE

_log = log.get("agent")
NOT_PARKED = "it ended before it was parked"


def is_doubtful(record: Record) -> bool:
    """Neither by itself nor by anybody's wish has it ended, nor is it known to be elsewhere."""
    died = record.exit is None or record.exit.code is None
    return record.phase == "exited" and died and not handover.has_moved(record)


def is_unsure(record: Record) -> bool:
    """Its holder was ended in that very moment, and knew that much."""
    return record.exit is not None and record.exit.reason == UNSURE


def ask(records: Records, leases: LeaseStore, record: Record) -> Record | None:
    """The record of one that is doubtful, put right; None: not known yet, or its holder is not gone yet."""
    seen = leases.inspect(record.session)
    lease = seen.record if seen is not None and seen.record.token == record.token else None
    if lease is not None and lease.state == "parked":
        parked = replace(record, phase="parked", checkpoint=lease.checkpoint, exit=None, pid=None)
        return records.put_right(record, parked)
    if lease is not None and lease.state == "held" and lease.instance == records.instance():
        return None  # whoever was to park it may do so yet, or the agent lets go of it
    if is_unsure(record) and record.exit is not None:
        return records.put_right(record, replace(record, exit=replace(record.exit, reason=NOT_PARKED)))
    return record


def settle(records: Records) -> None:
    """For who wants to know all that are parked. LeaseUnreachable: that cannot be known."""
    doubtful = [one for one in records.all() if is_doubtful(one)]
    if doubtful:
        leases = host_leases.open_store(records.config)
        for one in doubtful:
            ask(records, leases, one)


class Parkings:
    """The agent's part: each of them is asked for until it is known."""

    def __init__(self, records: Records, leases: LeaseStore) -> None:
        self._records, self._leases = records, leases
        self._known: set[tuple[str, int]] = set()

    def step(self) -> None:
        doubtful = [one for one in self._records.all() if is_doubtful(one)]
        self._known &= {(one.session, one.token) for one in doubtful}
        for one in doubtful:
            if (one.session, one.token) in self._known:
                continue
            try:
                if ask(self._records, self._leases, one) is not None:
                    self._known.add((one.session, one.token))
            except CmdopError as error:
                _log.warning("session %s: it is not known whether it is parked: %s", one.name, error.message)
                return
