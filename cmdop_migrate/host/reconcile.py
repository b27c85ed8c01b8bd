"""Reconcile the records of sessions that ended here while they were being parked with their leases.

A holder that ends between commit and park does not know of the commit, and one that is killed records nothing. Only a
lease that is parked under the very token that the session had here says that it is parked; a later restore has a higher
token. Such a lease is not changed here.

A session that a person killed in that moment must not be restored: its lease is ended as well, whether or not it was
parked.
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
END_TRIES = 4


def is_doubtful(record: Record) -> bool:
    """Tell whether a session ended neither by itself nor on request, and is not known to be on another host."""
    died = record.exit is None or record.exit.code is None
    return record.phase == "exited" and died and not move_journal.has_moved(record)


def is_unsure(record: Record) -> bool:
    """Tell whether the holder was ended between commit and park, and recorded that much."""
    return record.exit is not None and record.exit.kind == "parking_unknown"


def is_unwanted(record: Record) -> bool:
    """Tell whether a person killed the session while it was being parked."""
    return record.exit is not None and record.exit.kind == "kill_pending"


def ask(this_host: Host, leases: LeaseStore, record: Record) -> Record | None:
    """Correct the record of a doubtful or unwanted session by its lease. Return the record; None if its state is not
    known yet, or its holder has not exited yet."""
    if is_unwanted(record):
        return _end(this_host, leases, record)
    seen = leases.inspect(record.session)
    lease = seen.record if seen is not None and seen.record.token == record.token else None
    if lease is not None and lease.state == "parked":
        parked = replace(record, phase="parked", checkpoint=lease.checkpoint, exit=None, pid=None)
        return this_host.put_right(record, parked)
    if lease is not None and lease.state == "held" and lease.instance == this_host.instance():
        return None  # the command that was to park it may still do so, or the agent releases the lease
    if is_unsure(record) and record.exit is not None:
        end = replace(record.exit, kind="not_parked", reason=exit_reason("not_parked"))
        return this_host.put_right(record, replace(record, exit=end))
    return record


def _end(this_host: Host, leases: LeaseStore, record: Record) -> Record | None:
    """End the lease of an unwanted session, so that no host restores it. If another host has it already, record
    that."""
    lock = this_host.take(record.session)
    if lock is None:
        return None  # its holder has not exited yet
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
    """End the lease; call it with the session's lock held. If this host holds the lease, an interrupted command left
    it."""
    for number in range(END_TRIES):
        seen = leases.inspect(record.session)
        lease = seen.record if seen is not None else None
        is_ours = lease is not None and lease.state == "held" and lease.instance == this_host.instance()
        if lease is None or not (is_ours or lease.token == record.token):
            return lease
        try:
            return host_leases.end(leases, this_host, record.session, record.name, record.token)[1]
        except Fenced:  # the lease has changed since it was read, for example because the session was parked
            if number == END_TRIES - 1:
                raise
    return None


def _open(this_host: Host) -> list[Record]:
    """Return the records that have to be reconciled."""
    return [record for record in this_host.all() if is_doubtful(record) or is_unwanted(record)]


def settle(this_host: Host) -> None:
    """Reconcile all records, for a command that needs to know all parked sessions. Raise LeaseUnreachable if that
    cannot be known."""
    doubtful = _open(this_host)
    if doubtful:
        leases = host_leases.open_store(this_host.config)
        for record in doubtful:
            ask(this_host, leases, record)


class Reconciler:
    """Reconcile records in the agent: ask for each of them until it is known."""

    def __init__(self, this_host: Host, leases: LeaseStore) -> None:
        self._this_host, self._leases = this_host, leases
        self._known: set[tuple[str, int]] = set()

    def step(self) -> None:
        """Ask once for each record that is not known yet. Failures are logged."""
        doubtful = _open(self._this_host)
        self._known &= {(record.session, record.token) for record in doubtful}
        for record in doubtful:
            if (record.session, record.token) in self._known:
                continue
            try:
                if ask(self._this_host, self._leases, record) is not None:
                    self._known.add((record.session, record.token))
            except (CmdopError, OSError) as error:  # OSError: it is known, but the disk is full
                _log.warning("session %s: its record does not say yet whether it is parked: %s", record.name, error)
                return
