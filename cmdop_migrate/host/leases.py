"""A host's leases: taken before a session runs, proven before every irreversible act."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cmdop_migrate import clock, log
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Fenced, Unreachable
from cmdop_migrate.host.host import Host
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.register import Register
from cmdop_migrate.lease.registry import open_lease, open_register, sibling
from cmdop_migrate.lease.rules import Lost, Observation, Why
from cmdop_migrate.lease.store import Ended, Held, LeaseStore, Waiting
from cmdop_migrate.model import Record
from cmdop_migrate.util import threads
from cmdop_migrate.util.timings import Phases

if TYPE_CHECKING:  # `run` needs none of it, and people wait for it
    from cmdop_migrate.images.format.manifest import Manifest
    from cmdop_migrate.storage.base import Store

PROOF = "lease.proven"  # in the run directory, which a reboot empties
ASKING = 16  # requests at a time
_log = log.get("lease")


def open_store(config: Config, fresh: bool = False) -> LeaseStore:
    """The lease store of this host. One whose word must be tried is tried once since the machine booted and, with
    `fresh`, by every agent that is there to stay: it takes seconds, and a checkpoint would spend them with its
    session frozen."""
    proof = config.run_dir / PROOF
    return open_lease(config.lease, not fresh and _read(proof) == config.lease, lambda: _note(proof, config.lease))


def open_beside(config: Config, name: str) -> Register:
    """A register of its own beside the leases; whether the server can be believed is known from them."""
    proof = config.run_dir / PROOF
    return open_register(sibling(config.lease, name), _read(proof) == config.lease)


def must_be_tried(config: Config) -> bool:
    """Whether the next to write to the lease store tries its word first."""
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
        new.unlink(missing_ok=True)  # no room: the next command tries it again


def last_checkpoint(leases: LeaseStore, session: str) -> str | None:
    """What the session's lease says is its last committed checkpoint."""
    seen = leases.inspect(session)
    return seen.record.checkpoint if seen else None


def take_new(leases: LeaseStore, this_host: Host, session: str) -> Held:
    """The lease of a session that never was: nobody else can have it."""
    config = this_host.config
    answer = leases.acquire(session, config.host, this_host.instance(), config.lease_ttl)
    if not isinstance(answer, Held):
        raise Fenced(f"the lease of a new session is held by someone else: {answer}", "Try again.")
    return answer


def resume(leases: LeaseStore, this_host: Host, record: Record) -> Held | Lost:
    """The lease of a session that runs here under its record's token, renewed; or who has it now."""
    config = this_host.config
    answer = leases.acquire(
        record.session, config.host, this_host.instance(), config.lease_ttl, resume_token=record.token
    )
    assert not isinstance(answer, Waiting)  # nobody waits for what is its own
    return answer


def prove(leases: LeaseStore, this_host: Host, record: Record) -> Held:
    """That this host still holds `record`'s session under its token. Fenced when it does not."""
    answer = resume(leases, this_host, record)
    if isinstance(answer, Held):
        return answer
    raise fenced(record.name, answer)


def let_go(leases: LeaseStore, lease: Held) -> None:
    """Of a session that could not be started; if the store is away, nobody else can want what never was."""
    try:
        leases.release(lease)
    except Unreachable as error:
        _log.warning("the lease of %s is not let go of: %s", lease.session, error.message)


@dataclass(frozen=True)
class Standing:
    """What a session's lease says of it."""

    host: str
    instance: str
    state: str
    checkpoint: str | None
    token: int
    renewals: int

    @property
    def is_over(self) -> bool:
        """It ended: there is nothing it may be brought back from."""
        return self.state == "free" and self.checkpoint is None


def survey(leases: LeaseStore) -> dict[str, Standing]:
    """Every session's lease. Raises when one cannot be read: then it is not known what is needed."""
    found = {}
    sessions = list(leases.sessions())
    for session, read in zip(sessions, threads.each(leases.inspect, sessions, ASKING, "leases"), strict=True):
        seen = read.result()
        if seen is not None:
            one = seen.record
            found[session] = Standing(one.host, one.instance, one.state, one.checkpoint, one.token, one.renewals)
    return found


def may_drop(this_host: Host, standings: Mapping[str, Standing], checkpoint: str) -> None:
    """Fenced when a session that another host runs would have to be brought back from it."""
    for session, one in standings.items():
        if one.checkpoint == checkpoint and one.state == "held" and one.instance != this_host.instance():
            raise Fenced(
                f"checkpoint {checkpoint[:12]} is the last of session {session[:12]}, which {one.host} holds",
                "End it there first, or let it make another: cmdop-migrate checkpoint --leave-running",
            )


def write_anew(leases: LeaseStore, this_host: Host, session: str, manifests: Sequence[Manifest]) -> LeaseRecord:
    """A lease in place of what cannot be read: parked at the newest of its checkpoints, or free. A person has said that
    nobody runs it. The token is above every one that was seen."""
    own = this_host.load(session)
    newest = max(manifests, key=lambda one: (one.token, one.created), default=None)
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


class TakeOver:
    """The lease of `session`, which is to be restored here from a checkpoint.

    `look` refuses early what cannot work, and begins to watch a lease that is held; `take` takes it, waiting up to
    `patience` for a dead holder's to run out; `give_back` undoes that when the restore fails.
    """

    def __init__(
        self, leases: LeaseStore, images: Store, this_host: Host, record: Record, manifest: Manifest, patience: float
    ) -> None:
        self._leases, self._images, self._this_host = leases, images, this_host
        self._session, self._name, self._manifest = record.session, record.name, manifest
        self._until = clock.boottime() + patience
        self._observation: Observation | None = None
        self._marker: str | None = None

    def look(self) -> None:
        seen = self._leases.inspect(self._session)
        if seen is None:
            return
        self._observation = seen.observation
        if seen.record.checkpoint != self._manifest.checkpoint:
            raise fenced(self._name, Lost(self._session, Why.CHECKPOINT, seen.record))
        if seen.record.state == "held" and not self._is_own(seen.record) and self._until <= clock.boottime():
            raise fenced(self._name, Lost(self._session, Why.HELD, seen.record))

    def _is_own(self, record: LeaseRecord) -> bool:
        """Held by this very host, which does not run it: a restore here was cut off. We have its lock: nobody lives."""
        return record.instance == self._this_host.instance()

    def take(self, say: Callable[[str], None]) -> Held:
        config, session = self._this_host.config, self._session
        who = (session, config.host, self._this_host.instance(), config.lease_ttl)
        while True:
            seen = self._leases.inspect(session, self._observation)
            if seen is None:
                return self._take_unknown(who)
            expected = self._manifest.checkpoint
            if seen.record.state == "held" and self._is_own(seen.record):
                self._end_own(who, seen.record.token)
                continue  # parked again, or ended: which `acquire` tells apart
            observed = seen.observation
            answer = self._leases.acquire(
                *who, expect_checkpoint=expected, observation=observed, above=self._manifest.token
            )
            if isinstance(answer, Held):
                return answer
            if isinstance(answer, Lost) or clock.boottime() + answer.seconds > self._until:
                raise fenced(self._name, answer)
            self._observation = answer.observation
            say(f"{answer.holder.host} holds it; waiting {answer.seconds:.0f} s for its lease to run out")
            time.sleep(min(1.0, answer.seconds + 0.005))

    def _end_own(self, who: tuple[str, str, str, float], token: int) -> None:
        """What a restore here that was cut off has left. It may have run: it is ended, and the next one has a token of
        its own. One that came to its own end here, of which the agent has not told yet, is not brought back."""
        answer: Held | Ended | Lost | Waiting = self._leases.acquire(
            *who, expect_checkpoint=self._manifest.checkpoint, resume_token=token
        )
        if isinstance(answer, Held):
            over = self._came_to_its_end(token)
            answer = self._leases.release(answer) if over else self._leases.park(answer, self._manifest.checkpoint)
        if not isinstance(answer, Ended):
            raise fenced(self._name, answer)

    def _came_to_its_end(self, token: int) -> bool:
        own = self._this_host.load(self._session)
        over = own is not None and own.phase == "exited" and own.exit is not None and own.exit.code is not None
        return over and own is not None and own.token == token

    def _take_unknown(self, who: tuple[str, str, str, float]) -> Held:
        """No lease store knows it: this one is new, or not the one its old host used. The images' store decides then,
        once and for all, and only for a session that was parked."""
        if self._manifest.facts.get("live") or self._manifest.is_fork:
            raise Fenced(
                f"session {self._name!r} ran on when this checkpoint was made, and the lease store does not know it",
                "Use the lease store of the host it ran on, or restore a copy: --fork NAME",
            )
        own = self._this_host.host_id().encode()
        marker = f"restored/{self._manifest.checkpoint}"
        if not self._images.put_new(marker, own) and self._images.get(marker) != own:
            raise Fenced(
                f"checkpoint {self._manifest.checkpoint[:12]} was restored already, by a host with another lease store",
                "Hosts that share a store must share a lease store too. A copy: --fork NAME",
            )
        self._marker = marker
        answer = self._leases.acquire(*who, above=self._manifest.token)
        if not isinstance(answer, Held):
            raise fenced(self._name, answer)
        return answer

    def give_back(self, lease: Held) -> None:
        """Parked again, at the same checkpoint; the token has grown, which harms nobody."""
        try:
            if self._marker is not None:
                self._images.delete([self._marker])
            self._leases.park(lease, self._manifest.checkpoint)
        except Unreachable as error:
            # It stays ours: the next restore here goes on with it; another host waits for it to run out.
            _log.warning("the lease of %s is not given back: %s", self._name, error.message)


def end(store: LeaseStore, this_host: Host, session: str, name: str, above: int) -> tuple[str | None, LeaseRecord]:
    """Of a session that does not run here, and is not to be brought back by anybody. -> what it stood at, and the lease
    as it is now: free, with nothing to restore from. Fenced when another host has it, or it has just changed."""
    config, instance = this_host.config, this_host.instance()
    seen = store.inspect(session)
    was = seen.record if seen else None
    if was is not None and was.state == "free" and was.checkpoint is None:
        return None, was
    if was is not None and was.state == "held" and was.instance != instance:
        raise _runs(name, was)
    before = was.checkpoint if was else None
    # Held by this very host, which does not run it (we have its lock): a restore or a kill here was cut off.
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
    """In words, with the next step."""
    holder = answer.holder
    if holder is None:
        return Fenced(
            f"the lease store knows nothing of session {name!r}",
            "Hosts that share a store must share a lease store too; see the `lease` setting.",
        )
    if holder.state == "free" and holder.checkpoint is None:
        return Fenced(
            f"session {name!r} has ended (token {holder.token}): nobody restores it any more",
            "A copy of what is left of it: restore CHECKPOINT --fork NAME. See: cmdop-migrate checkpoints ls",
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
