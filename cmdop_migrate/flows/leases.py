"""A host's leases: taken before a session runs, proven before every irreversible act."""

from __future__ import annotations

from cmdop_migrate.config import Config
from cmdop_migrate.errors import Fenced
from cmdop_migrate.lease.registry import open_lease
from cmdop_migrate.lease.rules import Lost, Why
from cmdop_migrate.lease.store import Held, LeaseStore, Waiting
from cmdop_migrate.model import Record
from cmdop_migrate.session.records import Records


def open_store(config: Config) -> LeaseStore:
    return open_lease(config.lease)


def take_new(leases: LeaseStore, records: Records, session: str) -> Held:
    """The lease of a session that never was: nobody else can have it."""
    config = records.config
    answer = leases.acquire(session, config.host, records.host_id(), config.lease_ttl)
    if not isinstance(answer, Held):
        raise Fenced(f"the lease of a new session is held by someone else: {answer}", "Try again.")
    return answer


def prove(leases: LeaseStore, records: Records, record: Record) -> Held:
    """That this host still holds `record`'s session under its token. Fenced when it does not."""
    config = records.config
    answer = leases.acquire(record.session, config.host, records.host_id(), config.lease_ttl, resume_token=record.token)
    if isinstance(answer, Held):
        return answer
    raise fenced(record.name, answer)


def fenced(name: str, answer: Lost | Waiting) -> Fenced:
    """In words, with the next step."""
    holder = answer.holder
    if holder is None:
        return Fenced(
            f"the lease store knows nothing of session {name!r}",
            "Hosts that share a store must share a lease store too; see the `lease` setting.",
        )
    if isinstance(answer, Lost) and answer.why is Why.CHECKPOINT:
        last = (holder.checkpoint or "none")[:12]
        return Fenced(
            f"session {name!r} has moved on: it is {holder.state}, token {holder.token}, last checkpoint {last}",
            "Restore that one; an older one only as a copy: --fork NAME",
        )
    where = f"{holder.host} (token {holder.token})"
    if holder.state == "held":
        return Fenced(
            f"session {name!r} is held by {where}",
            "If that host is dead, wait for its lease to run out: restore --wait 60s. A copy: --fork NAME",
        )
    return Fenced(f"session {name!r} was {holder.state} by {where}", "See: cmdop-migrate lease show " + name)
