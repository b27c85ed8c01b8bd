"""A branch until it runs: its lease, and the checkpoint it is born with (images/store/fork_manifest.py).

    lease     of a session that never was; it stands at nothing
    birth     its parent's checkpoint, under its own name
    commit    the lease stands at that: the first renewal      ── any host may bring it back from here on
    …         its files, CRIU
    renewal   the second one, then its first instruction

So a lease that was never renewed a second time tells of a branch that never ran. Nobody may be left who would end
it: prune does, by the lease, and whoever comes late to that second renewal is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cmdop_migrate import log
from cmdop_migrate.errors import Unreachable
from cmdop_migrate.host import leases as host_leases
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.leases import Standing
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

BEFORE_IT_RUNS = 1  # renewals: by the commit
AS_IT_RUNS = 2  # its agent, who sees it at once, makes it three
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
    """The lease of the branch `record` of `source`, and its birth. CheckpointNotFound: `source` has been pruned."""
    facts = _facts(record, source)
    lease = host_leases.take_new(leases, this_host, record.session)
    made = fork_manifest.of(source, record.session, lease.token, facts)
    try:
        fork_manifest.publish(store, ring, source, made)
        reach("born")
        begun = leases.commit_checkpoint(lease, made.checkpoint)
        if isinstance(begun, Lost):
            raise host_leases.fenced(record.name, begun)
    except BaseException:
        undo(leases, store, lease, made)
        raise
    return begun, made


def _facts(record: Record, source: Manifest) -> dict[str, object]:
    """As captured, network and all; only who it is has changed."""
    was = image_checks.record(source)
    own = replace(was, session=record.session, name=record.name, parent=record.parent, created=record.created)
    mine = {"name": record.name, "host": record.host, "tag": None, "migration": None}
    return {**source.facts, **mine, "record": replace(own, host=record.host, checkpoint=source.checkpoint).to_json()}


def undo(leases: LeaseStore, store: Store, lease: Held, made: Manifest) -> None:
    """It never ran. First the lease: what it stands at is there as long as it does. Taken over by another host, which
    thought us dead, both are that one's."""
    try:
        if isinstance(leases.release(lease), Ended):
            store.delete([made.name])
    except Unreachable as error:
        _log.warning("the branch %s is left to the next prune: %s", made.session, error.message)


def is_spent(standing: Standing | None, entry: ListedCheckpoint) -> bool:
    """Whether a birth is of no more use: its branch has ended, or made a checkpoint of its own. One that is not known
    has just begun."""
    if not entry.is_fork or standing is None:
        return False
    return standing.is_over or standing.checkpoint not in (None, entry.checkpoint)


def bury(
    this_host: Host, leases: LeaseStore, store: Store, standings: Mapping[str, Standing], dry_run: bool
) -> dict[str, Standing]:
    """`standings`, with the branches that never ran, and that nobody is about to run, at their end."""
    found = dict(standings)
    young = {session for session, one in found.items() if one.state == "held" and one.renewals <= AS_IT_RUNS}
    entries = list(catalog.listed(store)) if young else []
    now = max((entry.modified for entry in entries), default=0.0)  # by the store's clock, and rather too early
    for entry in entries:
        if not entry.is_fork or entry.session not in young:
            continue
        one = found[entry.session]
        most = _most(this_host, entry, one, now)
        if most is None or one.renewals > most or one.checkpoint not in (None, entry.checkpoint):
            continue
        if dry_run or leases.expire_fork(entry.session, entry.checkpoint, most):
            found[entry.session] = replace(one, state="free", checkpoint=None)
    return found


def _most(this_host: Host, entry: ListedCheckpoint, one: Standing, now: float) -> int | None:
    """How often the lease of one that never ran may have been renewed; None: somebody may be about to run it. On this
    host that is known, by its lock; of another all that is known is how long ago it began."""
    if one.instance != this_host.instance():
        return BEFORE_IT_RUNS if now - entry.modified > STALE_AFTER else None
    return AS_IT_RUNS if not this_host.directory(entry.session).exists() else None
