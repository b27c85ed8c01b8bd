"""Use the lease store for the sessions of this host: a lease is taken before a session runs, and proven before every
irreversible act."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cmdop_migrate import log
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Fenced, Unreachable
from cmdop_migrate.host.host import Host
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.register import Register
from cmdop_migrate.lease.registry import open_lease, open_register, sibling
from cmdop_migrate.lease.rules import Lost, Why
from cmdop_migrate.lease.store import Ended, Held, LeaseStore, Waiting
from cmdop_migrate.model import Record
from cmdop_migrate.util import threads
from cmdop_migrate.util.timings import Phases

if TYPE_CHECKING:  # `run` needs none of it, and loading it takes time
    from cmdop_migrate.images.format.manifest import Manifest

PROOF = "lease.proven"  # names the lease store that was probed; in the run directory, which a reboot empties
READERS = 16  # simultaneous requests to the lease store
_log = log.get("lease")


def open_store(config: Config, fresh: bool = False) -> LeaseStore:
    """Open the lease store of this host.

    A store whose conditional writes must be probed is probed once after the machine booted and, with `fresh`, by every
    agent that was not started on demand: the probe takes seconds, and a checkpoint would spend them with its session
    frozen.
    """
    proof = config.run_dir / PROOF
    return open_lease(config.lease, not fresh and _read(proof) == config.lease, lambda: _note(proof, config.lease))


def open_beside(config: Config, name: str) -> Register:
    """Open a register of its own beside the leases. Whether the server can be trusted is known from the leases."""
    proof = config.run_dir / PROOF
    return open_register(sibling(config.lease, name), _read(proof) == config.lease)


def must_be_tried(config: Config) -> bool:
    """Tell whether the next command that writes to the lease store probes it first."""
    return config.lease.startswith("s3:") and _read(config.run_dir / PROOF) != config.lease


def _read(proof: Path) -> str | None:
    try:
        return proof.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _note(proof: Path, url: str) -> None:
    new = proof.with_name(f"{PROOF}.{os.getpid()}.new")
    try:
        new.write_text(url, encoding="utf-8")
        new.replace(proof)
    except OSError:
        new.unlink(missing_ok=True)  # the disk is full: the next command probes the store again


def last_checkpoint(leases: LeaseStore, session: str) -> str | None:
    """Return the last committed checkpoint of a session as its lease names it."""
    seen = leases.inspect(session)
    return seen.record.checkpoint if seen else None


def take_new(leases: LeaseStore, this_host: Host, session: str) -> Held:
    """Acquire the lease of a new session, which no other host can have."""
    config = this_host.config
    answer = leases.acquire(session, config.host, this_host.instance(), config.lease_ttl)
    if not isinstance(answer, Held):
        raise Fenced(f"the lease of a new session is held by another host: {answer}", "Try again.")
    return answer


def resume(leases: LeaseStore, this_host: Host, record: Record) -> Held | Lost:
    """Renew the lease of a session that runs here under its record's token. Return it, or who has it now."""
    config = this_host.config
    answer = leases.acquire(
        record.session, config.host, this_host.instance(), config.lease_ttl, resume_token=record.token
    )
    assert not isinstance(answer, Waiting)  # a host does not wait for its own lease
    return answer


def prove(leases: LeaseStore, this_host: Host, record: Record) -> Held:
    """Renew the lease to prove that this host still holds the session under its record's token. Raise Fenced if it does
    not."""
    answer = resume(leases, this_host, record)
    if isinstance(answer, Held):
        return answer
    raise fenced(record.name, answer)


def let_go(leases: LeaseStore, lease: Held) -> None:
    """Release the lease of a session that failed to start. Best effort: an unreachable store is logged, and no other
    host has a use for that lease."""
    try:
        leases.release(lease)
    except Unreachable as error:
        _log.warning("the lease of %s is not released: %s", lease.session, error.message)


@dataclass(frozen=True)
class LeaseStatus:
    """Describe a session's lease."""

    host: str
    instance: str
    state: str
    checkpoint: str | None
    token: int
    renewals: int

    @property
    def is_over(self) -> bool:
        """Tell whether the session has ended and has no checkpoint to be restored from."""
        return self.state == "free" and self.checkpoint is None


def survey(leases: LeaseStore) -> dict[str, LeaseStatus]:
    """Return every session's lease. Raise if one cannot be read: then it is unknown which checkpoints are needed."""
    statuses = {}
    sessions = list(leases.sessions())
    for session, read in zip(sessions, threads.each(leases.inspect, sessions, READERS, "leases"), strict=True):
        seen = read.result()
        if seen is not None:
            lease = seen.record
            statuses[session] = LeaseStatus(
                lease.host, lease.instance, lease.state, lease.checkpoint, lease.token, lease.renewals
            )
    return statuses


def may_drop(this_host: Host, statuses: Mapping[str, LeaseStatus], checkpoint: str) -> None:
    """Raise Fenced if a checkpoint is the one that a session of another host would be restored from."""
    for session, status in statuses.items():
        if status.checkpoint == checkpoint and status.state == "held" and status.instance != this_host.instance():
            raise Fenced(
                f"checkpoint {checkpoint[:12]} is the last of session {session[:12]}, which {status.host} holds",
                "End it there first, or let it make another: cmdop-migrate checkpoint --leave-running",
            )


def write_anew(leases: LeaseStore, this_host: Host, session: str, manifests: Sequence[Manifest]) -> LeaseRecord:
    """Write a new lease in place of one that cannot be read: parked at the newest of its checkpoints, or free.

    A person has confirmed that no host runs the session. Its fencing token is above all that were seen.
    """
    own = this_host.load(session)
    newest = max(manifests, key=lambda manifest: (manifest.token, manifest.created), default=None)
    above = max(own.token if own else 1, newest.token if newest else 1)
    config, instance = this_host.config, this_host.instance()
    broken = leases.force_break(session, config.host, instance, above=above)
    if isinstance(broken, Lost):
        raise fenced(session, broken)
    if newest is None or broken.record.checkpoint is not None:
        return broken.record
    held = leases.acquire(session, config.host, instance, config.lease_ttl)
    answer = leases.park(held, newest.checkpoint) if isinstance(held, Held) else held
    if not isinstance(answer, Ended):
        raise fenced(session, answer)
    return answer.record


def end(store: LeaseStore, this_host: Host, session: str, name: str, above: int) -> tuple[str | None, LeaseRecord]:
    """End the lease of a session that does not run here, so that no host restores it.

    Return the checkpoint that it named, and the lease as it is now: free, without a checkpoint. Raise Fenced if another
    host has the lease, or it has just changed.
    """
    config, instance = this_host.config, this_host.instance()
    seen = store.inspect(session)
    was = seen.record if seen else None
    if was is not None and was.state == "free" and was.checkpoint is None:
        return None, was
    if was is not None and was.state == "held" and was.instance != instance:
        raise _runs(name, was)
    before = was.checkpoint if was else None
    # If this very host holds it, without running it (we have its lock), a restore or a kill here was interrupted.
    resumed = was.token if was is not None and was.state == "held" else None
    held = store.acquire(
        session, config.host, instance, config.lease_ttl, expect_checkpoint=before, resume_token=resumed, above=above
    )
    Phases("kill").reach("taken")
    answer = store.release(held) if isinstance(held, Held) else held
    if not isinstance(answer, Ended):
        raise _runs(name, answer.holder)
    return before, answer.record


def _runs(name: str, holder: LeaseRecord | None) -> Fenced:
    where = f"{holder.host} (token {holder.token})" if holder else "another host"
    return Fenced(
        f"session {name!r} is held by {where}", "Kill it there. If that host is dead: cmdop-migrate lease break " + name
    )


def fenced(name: str, answer: Lost | Waiting) -> Fenced:
    """Return the error for a lease that this host cannot have, with the next command."""
    holder = answer.holder
    if holder is None:
        return Fenced(
            f"the lease store does not know session {name!r}",
            "Hosts that share a store must share a lease store too; see the `lease` setting.",
        )
    if holder.state == "free" and holder.checkpoint is None:
        return Fenced(
            f"session {name!r} has ended (token {holder.token}): it cannot be restored",
            "Restore a copy from a checkpoint: restore CHECKPOINT --fork NAME. See: cmdop-migrate checkpoints ls",
        )
    if isinstance(answer, Lost) and answer.why is Why.CHECKPOINT:
        last = (holder.checkpoint or "none")[:12]
        return Fenced(
            f"session {name!r} has a newer checkpoint, {last}: it is {holder.state}, token {holder.token}",
            "Restore that checkpoint; an older one only as a copy: --fork NAME",
        )
    where = f"{holder.host} (token {holder.token})"
    if holder.state == "held":
        return Fenced(
            f"session {name!r} is held by {where}",
            "If that host is dead, wait for its lease to run out: restore --wait 60s. A copy: --fork NAME",
        )
    return Fenced(f"session {name!r} was {holder.state} by {where}", "See: cmdop-migrate lease show " + name)
