"""Sessions that ended here while they were being parked, before anybody could note it: their leases tell.

A holder that is ended between commit and park does not know of the commit, and one that is killed notes nothing. Only a
lease that is parked under the very token the session had here says that it is parked; whoever restores it from there
on has a higher one. Nothing is done to such a lease here.

One that a person ended in that moment is not to come back: its lease is ended as well, whether or not it was parked.
"""

from __future__ import annotations

import os
from dataclasses import replace

from cmdop_migrate import log
from cmdop_migrate.errors import CmdopError, Fenced
from cmdop_migrate.holder.protocol import exit_reason
from cmdop_migrate.host import leases as host_leases
from cmdop_migrate.host import move_journal
from cmdop_migrate.host.host import Host
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.model import Record

_log = log.get("agent")
TRIES = 4


def is_doubtful(record: Record) -> bool:
    """Neither by itself nor by anybody's wish has it ended, nor is it known to be elsewhere."""
    died = record.exit is None or record.exit.code is None
    return record.phase == "exited" and died and not move_journal.has_moved(record)


def is_unsure(record: Record) -> bool:
    """Its holder was ended in that very moment, and knew that much."""
    return record.exit is not None and record.exit.kind == "parking_unknown"


def is_unwanted(record: Record) -> bool:
    """A person has ended it in that very moment."""
    return record.exit is not None and record.exit.kind == "kill_pending"


def ask(this_host: Host, leases: LeaseStore, record: Record) -> Record | None:
    """The record of one that is doubtful or unwanted, put right; None: not known yet, or its holder is not gone yet."""
    if is_unwanted(record):
        return _end(this_host, leases, record)
    seen = leases.inspect(record.session)
    lease = seen.record if seen is not None and seen.record.token == record.token else None
    if lease is not None and lease.state == "parked":
        parked = replace(record, phase="parked", checkpoint=lease.checkpoint, exit=None, pid=None)
        return this_host.put_right(record, parked)
    if lease is not None and lease.state == "held" and lease.instance == this_host.instance():
        return None  # whoever was to park it may do so yet, or the agent lets go of it
    if is_unsure(record) and record.exit is not None:
        end = replace(record.exit, kind="not_parked", reason=exit_reason("not_parked"))
        return this_host.put_right(record, replace(record, exit=end))
    return record


def _end(this_host: Host, leases: LeaseStore, record: Record) -> Record | None:
    """Nobody brings it back from now on; or, where another host has it already, the record says so."""
    lock = this_host.take(record.session)
    if lock is None:
        return None  # its holder is not gone yet
    try:
        lease = _end_lease(this_host, leases, record)
    finally:
        os.close(lock)
    assert record.exit is not None
    end = replace(record.exit, kind="killed", reason=exit_reason("killed"))
    if lease is not None and lease.state != "free":
        to, token = lease.host, lease.token
        end = replace(end, kind="superseded", to=to, token=token, reason=exit_reason("superseded", to=to, token=token))
    return this_host.put_right(record, replace(record, exit=end))


def _end_lease(this_host: Host, leases: LeaseStore, record: Record) -> LeaseRecord | None:
    """With the session's lock held: what this host holds of it is what a command that was cut off has left."""
    for number in range(TRIES):
        seen = leases.inspect(record.session)
        lease = seen.record if seen is not None else None
        is_ours = lease is not None and lease.state == "held" and lease.instance == this_host.instance()
        if lease is None or not (is_ours or lease.token == record.token):
            return lease
        try:
            return host_leases.end(leases, this_host, record.session, record.name, record.token)[1]
        except Fenced:  # it has changed since we looked: whoever was to park it has, say
            if number == TRIES - 1:
                raise
    return None


def _open(this_host: Host) -> list[Record]:
    return [one for one in this_host.all() if is_doubtful(one) or is_unwanted(one)]


def settle(this_host: Host) -> None:
    """For who wants to know all that are parked. LeaseUnreachable: that cannot be known."""
    doubtful = _open(this_host)
    if doubtful:
        leases = host_leases.open_store(this_host.config)
        for one in doubtful:
            ask(this_host, leases, one)


class Parkings:
    """The agent's part: each of them is asked for until it is known."""

    def __init__(self, this_host: Host, leases: LeaseStore) -> None:
        self._this_host, self._leases = this_host, leases
        self._known: set[tuple[str, int]] = set()

    def step(self) -> None:
        doubtful = _open(self._this_host)
        self._known &= {(one.session, one.token) for one in doubtful}
        for one in doubtful:
            if (one.session, one.token) in self._known:
                continue
            try:
                if ask(self._this_host, self._leases, one) is not None:
                    self._known.add((one.session, one.token))
            except (CmdopError, OSError) as error:  # OSError: it is known, but the disk is full
                _log.warning("session %s: it is not on record whether it is parked: %s", one.name, error)
                return
