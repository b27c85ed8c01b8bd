"""Remove checkpoints that no session needs, by the leases and the rules of what to keep."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cmdop_migrate.errors import Fenced
from cmdop_migrate.host import leases, resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.store import catalog
from cmdop_migrate.images.store import prune as store_prune
from cmdop_migrate.images.store.keep_policy import KeepPolicy
from cmdop_migrate.snapshot import fork_lease


@dataclass(frozen=True)
class PruneResult:
    """Describe what a prune removed. The fields are those of `checkpoints prune --json`."""

    checkpoints: list[str]
    packs: int
    bytes: int
    waiting: int  # packs that are removed by a later prune
    unreadable: list[str]  # manifests that this host's keys cannot read: what they may need was kept

    def to_json(self) -> dict[str, Any]:
        """Return what `checkpoints prune --json` prints."""
        return asdict(self)


def prune(
    this_host: Host, keep_last: int | None, keep_within: float | None, drop: tuple[str, ...], dry_run: bool
) -> PruneResult:
    """Remove the checkpoints that no rule keeps and no session needs.

    The leases decide what is needed, not the records of this host: a session that ended here may run elsewhere. The
    checkpoint a lease names stays, and so does the newest one of every session that is not known to have ended: one
    that is committed during the prune is the newest. The initial checkpoint of a fork stays only as long as its lease
    is unknown or may name it."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    host_leases = leases.open_store(this_host.config)
    kept = fork_lease.end_unstarted_forks(this_host, host_leases, store, leases.survey(host_leases), dry_run)
    ended, needed = set(), {lease.checkpoint for lease in kept.values()}
    coming = {}
    for record in this_host.all():
        # A session needs its checkpoint if it is parked, or runs while its memory is still in the store. The checkpoint
        # of a fork may be one of its parent.
        is_coming = (this_host.directory(record.session) / "image").exists()
        if record.phase == "live" and is_coming:
            coming[record.checkpoint] = record.name
        if record.phase not in ("exited", "live") or is_coming:
            needed.add(record.checkpoint)
        elif record.phase == "exited":
            ended.add(record.session)
    dropped = [catalog.find(store, reference).checkpoint for reference in drop]
    for checkpoint in dropped:
        leases.may_drop(this_host, kept, checkpoint)
        if checkpoint in coming:
            raise Fenced(
                f"session {coming[checkpoint]!r} runs, and its memory is still being fetched from checkpoint"
                f" {checkpoint[:12]}",
                "Wait until all of it is here; see: cmdop-migrate ls",
            )
    done = store_prune.prune(
        store,
        ring,
        KeepPolicy(keep_last, keep_within),
        lambda session: not kept[session].is_over if session in kept else session not in ended,
        also=dropped,
        dry_run=dry_run,
        needed=needed,
        spent=lambda entry: fork_lease.is_superseded(kept.get(entry.session), entry),
    )
    if done.checkpoints and not dry_run:
        this_host.events.emit("pruned", checkpoints=list(done.checkpoints), bytes=done.bytes)
    return PruneResult(list(done.checkpoints), done.packs, done.bytes, done.waiting, list(done.unreadable))
