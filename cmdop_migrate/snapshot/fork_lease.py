"""Acquire the lease of a fork and publish its initial checkpoint (images/store/fork_manifest.py).

    lease     acquire a lease for the new session id; it names no checkpoint yet
    initial   publish the parent's checkpoint under the fork's own id
    commit    the lease names that checkpoint: the first renewal     ── any host may restore the fork from here on
    …         files, CRIU
    renewal   the second renewal, then the fork's first instruction

So a lease that was never renewed a second time belongs to a fork that never ran. The command that would end it may be
dead: prune ends it, by its lease, and a command that comes late to the second renewal is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cmdop_migrate import log
from cmdop_migrate.errors import Unreachable
from cmdop_migrate.host import leases as host_leases
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.leases import LeaseStatus
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.store import catalog, fork_manifest
from cmdop_migrate.images.store.catalog import ListedCheckpoint
from cmdop_migrate.images.store.upload_marks import STALE_AFTER
from cmdop_migrate.lease.rules import Lost
from cmdop_migrate.lease.store import Ended, Held, LeaseStore
from cmdop_migrate.model import Record
from cmdop_migrate.snapshot import image_checks
from cmdop_migrate.storage.base import Store

RENEWALS_BEFORE_RUN = 1  # by the commit
RENEWALS_AT_START = 2  # the third renewal is that of its agent, soon after the start
_log = log.get("restore")


def begin(
    this_host: Host,
    leases: LeaseStore,
    store: Store,
    ring: KeyRing,
    record: Record,
    source: Manifest,
    reach: Callable[[str], None],
) -> tuple[Held, Manifest]:
    """Acquire the lease of the fork `record` of `source`, publish its initial checkpoint, and commit that to the lease.
    Raises CheckpointNotFound if `source` has been pruned. On any error nothing is left of the fork."""
    facts = _facts(record, source)
    lease = host_leases.take_new(leases, this_host, record.session)
    initial = fork_manifest.of(source, record.session, lease.token, facts)
    try:
        fork_manifest.publish(store, ring, source, initial)
        reach("initial")
        lease_committed = leases.commit_checkpoint(lease, initial.checkpoint)
        if isinstance(lease_committed, Lost):
            raise host_leases.fenced(record.name, lease_committed)
    except BaseException:
        undo(leases, store, lease, initial)
        raise
    return lease_committed, initial


def _facts(record: Record, source: Manifest) -> dict[str, object]:
    """Return the facts of the initial checkpoint: those of `source`, its network included, with the fork's identity."""
    captured = image_checks.record(source)
    own = replace(captured, session=record.session, name=record.name, parent=record.parent, created=record.created)
    changed = {"name": record.name, "host": record.host, "tag": None, "migration": None}
    record_json = replace(own, host=record.host, checkpoint=source.checkpoint).to_json()
    return {**source.facts, **changed, "record": record_json}


def undo(leases: LeaseStore, store: Store, lease: Held, initial: Manifest) -> None:
    """Remove a fork that never ran: first its lease, because the checkpoint a lease names must exist, then its initial
    checkpoint. If another host has taken the lease over, both belong to that host and stay."""
    try:
        if isinstance(leases.release(lease), Ended):
            store.delete([initial.name])
    except Unreachable as error:
        _log.warning("the fork %s is left to the next prune: %s", initial.session, error.message)


def is_superseded(status: LeaseStatus | None, entry: ListedCheckpoint) -> bool:
    """Return whether an initial checkpoint is no longer needed: its fork has ended, or made a checkpoint of its own. A
    fork whose lease is unknown has just begun."""
    if not entry.is_fork or status is None:
        return False
    return status.is_over or status.checkpoint not in (None, entry.checkpoint)


def end_unstarted_forks(
    this_host: Host, leases: LeaseStore, store: Store, statuses: Mapping[str, LeaseStatus], dry_run: bool
) -> dict[str, LeaseStatus]:
    """End the leases of forks that never ran and that no command is about to run. Return `statuses` with these ended;
    with `dry_run` without ending them."""
    after = dict(statuses)
    young = {
        session for session, status in after.items() if status.state == "held" and status.renewals <= RENEWALS_AT_START
    }
    entries = list(catalog.listed(store)) if young else []
    now = max((entry.modified for entry in entries), default=0.0)  # by the store's clock; too early at most
    for entry in entries:
        if not entry.is_fork or entry.session not in young:
            continue
        status = after[entry.session]
        max_renewals = _max_renewals(this_host, entry, status, now)
        if max_renewals is None or status.renewals > max_renewals:
            continue
        if status.checkpoint not in (None, entry.checkpoint):
            continue
        if dry_run or leases.expire_fork(entry.session, entry.checkpoint, max_renewals):
            after[entry.session] = replace(status, state="free", checkpoint=None)
    return after


def _max_renewals(this_host: Host, entry: ListedCheckpoint, status: LeaseStatus, now: float) -> int | None:
    """Return how often the lease of a fork that never ran may have been renewed; None if a command may be about to run
    the fork. On this host its directory tells; of another host only the age of the fork is known."""
    if status.instance != this_host.instance():
        return RENEWALS_BEFORE_RUN if now - entry.modified > STALE_AFTER else None
    return RENEWALS_AT_START if not this_host.directory(entry.session).exists() else None
