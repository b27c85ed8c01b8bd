"""Remove checkpoints that no session needs, by the leases and the rules of what to keep."""

from __future__ import annotations

from typing import Any

from cmdop_migrate.errors import Fenced
from cmdop_migrate.host import leases, resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.store import catalog
from cmdop_migrate.images.store import prune as store_prune
from cmdop_migrate.images.store.keep_policy import KeepPolicy
from cmdop_migrate.snapshot import fork_lease


def prune(
    this_host: Host, keep_last: int | None, keep_within: float | None, drop: tuple[str, ...], dry_run: bool
) -> dict[str, Any]:
    """The leases tell what is needed, not what this host remembers: a session that ended here may run elsewhere.

    The checkpoint a lease names stays, and so does the newest one of every session that is not known to have ended:
    one that is committed while we look is the newest. What a branch was born with stays only as long as its lease, if
    it is known, may stand there."""
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    host_leases = leases.open_store(this_host.config)
    kept = fork_lease.bury(this_host, host_leases, store, leases.survey(host_leases), dry_run)
    ended, needed = set(), {lease.checkpoint for lease in kept.values()}
    coming = {}
    for record in this_host.all():
        # Parked, or running while its memory is still in the store. A branch needs what its parent's name is on.
        is_coming = (this_host.directory(record.session) / "image").exists()
        if record.phase == "live" and is_coming:
            coming[record.checkpoint] = record.name
        if record.phase not in ("exited", "live") or is_coming:
            needed.add(record.checkpoint)
        elif record.phase == "exited":
            ended.add(record.session)
    also = [catalog.find(store, one).checkpoint for one in drop]
    for one in also:
        leases.may_drop(this_host, kept, one)
        if one in coming:
            raise Fenced(
                f"session {coming[one]!r} runs, and its memory is still coming from checkpoint {one[:12]}",
                "Wait until it is here; see: cmdop-migrate ls",
            )
    done = store_prune.prune(
        store,
        ring,
        KeepPolicy(keep_last, keep_within),
        lambda session: not kept[session].is_over if session in kept else session not in ended,
        also=also,
        dry_run=dry_run,
        needed=needed,
        spent=lambda entry: fork_lease.is_spent(kept.get(entry.session), entry),
    )
    if done.checkpoints and not dry_run:
        this_host.events.emit("pruned", checkpoints=list(done.checkpoints), bytes=done.bytes)
    return {
        "checkpoints": list(done.checkpoints),
        "packs": done.packs,
        "bytes": done.bytes,
        "waiting": done.waiting,
        "unreadable": list(done.unreadable),
    }
