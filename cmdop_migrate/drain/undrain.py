"""Accept sessions again; bring home what the last drain moved or parked.

Where each is now, its lease tells: it may have gone on from where it was moved to, been parked there, or ended. One
that runs elsewhere is moved by the host it runs on, through its own `migrate`; one that is parked is restored here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from cmdop_migrate.errors import CmdopError, HostNotFound, SessionExited, SessionNotFound, from_code
from cmdop_migrate.host import draining, leases
from cmdop_migrate.host.drain_journal import Drain, Drains, Entry, is_free
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import Moves
from cmdop_migrate.migration import peers, plan
from cmdop_migrate.remote.ssh import SshPool
from cmdop_migrate.util.self_exec import Worker
from cmdop_migrate.util.signals import Stop

LOOK_EVERY = 0.1
Say = Callable[[Entry], None]


@dataclass(frozen=True)
class Wanted:
    bring_back: bool = False
    parallel: int = 2
    accept: tuple[str, ...] = ()  # as `migrate` has it: hosts whose kernels differ get nothing back without


def undrain(this_host: Host, wanted: Wanted, flags: Sequence[str], stop: Stop, say: Say) -> dict[str, Any]:
    """What `undrain --json` answers. `away`: what the drain moved or parked and is not back."""
    plan.check_names(wanted.accept)
    drains = Drains(this_host.config.state_dir)
    with drains.alone():
        flag = draining.read(this_host.config.state_dir)
        made = (drains.find(flag.drain) if flag else None) or drains.last()
        with this_host.locked():
            draining.clear(this_host.config.state_dir)
        if flag is not None:
            this_host.events.emit("undrained", drain=flag.drain)
        found: list[Entry] = []
        if wanted.bring_back and made is not None:
            found = _Return(this_host, drains, made, wanted, flags, stop, say).run(wanted.parallel)
            made = drains.find(made.id) or made
        away = made.of("moved", "parked", "going") if made is not None else []
        return {
            "was_draining": flag is not None,
            "restored": [one.to_json() for one in found if one.state == "back"],
            "failed": [one.to_json() for one in found if one.state in ("moved", "parked", "going")],
            "ended": [one.to_json() for one in found if one.state == "ended"],
            "away": [one.to_json() for one in away],
        }


class _Return:
    def __init__(
        self,
        this_host: Host,
        drains: Drains,
        made: Drain,
        wanted: Wanted,
        flags: Sequence[str],
        stop: Stop,
        say: Say,
    ) -> None:
        self.this_host, self.drains, self.made, self.wanted = this_host, drains, made, wanted
        self.flags, self.stop, self.say = flags, stop, say
        self.moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)

    def run(self, parallel: int) -> list[Entry]:
        """Each one that is away, and what became of it: back, ended, or as it was with the reason why."""
        away = self.made.of("moved", "parked", "going")
        found: list[Entry] = []
        with peers.pool(self.this_host.config) as pool, ThreadPoolExecutor(parallel) as threads:
            waiting: set[Future[Entry]] = {threads.submit(self._bring, pool, one) for one in away}
            while waiting:
                done, waiting = wait(waiting, LOOK_EVERY)
                for one in done:
                    found.append(self._note(one.result()))
                if self.stop.times > 1:
                    pool.close()  # what was begun there goes on there
        return found

    def _note(self, entry: Entry) -> Entry:
        kept = replace(entry, why="") if entry.state in ("moved", "parked", "going") else entry
        self.made = self.drains.save(self.made.with_entry(kept))
        self.say(entry)
        return entry

    def _bring(self, pool: SshPool, entry: Entry) -> Entry:
        if self.stop.times:
            return replace(entry, why="interrupted")
        try:
            return self._fetch(pool, entry)
        except (SessionExited, SessionNotFound) as error:
            return replace(entry, state="ended", to=None, why=error.message)
        except CmdopError as error:
            return replace(entry, why=f"{error.message} {error.hint}".strip())

    def _fetch(self, pool: SshPool, entry: Entry) -> Entry:
        store = leases.open_store(self.this_host.config)
        try:
            seen = store.inspect(entry.session)
        finally:
            store.close()
        if seen is None or (seen.record.state == "free" and seen.record.checkpoint is None):
            return replace(entry, state="ended", to=None, why="it has ended")
        if seen.record.state != "held":
            return self._back(entry, self._restore(entry))
        if seen.record.instance == self.this_host.instance():
            if not is_free(self.this_host, self.moves, entry.session):
                return replace(entry, why="it is being moved, parked or ended right now; wait for that")
            return replace(entry, state="back", to=None, why="it was here already", facts={})
        if seen.record.host == self.this_host.config.host:
            return replace(
                entry,
                why="it was here when this host went down; from its last checkpoint: "
                f"cmdop-migrate restore {entry.name} --wait 1m",
            )
        return self._back(entry, self._call(pool, entry, seen.record.host))

    def _back(self, entry: Entry, answer: dict[str, Any]) -> Entry:
        kept = ("token", "frozen_s", "downtime_s", "took_s")
        facts = {key: answer[key] for key in kept if key in answer}
        return replace(entry, state="back", to=None, why="", facts={"from": entry.to, **facts} if entry.to else facts)

    def _restore(self, entry: Entry) -> dict[str, Any]:
        worker = Worker(self.flags, ("restore", entry.session))
        while (ended := worker.ended()) is None:
            time.sleep(LOOK_EVERY)
        if not ended.ok:
            raise from_code(ended.code, ended.message, ended.hint)
        return ended.answer

    def _call(self, pool: SshPool, entry: Entry, holder: str) -> dict[str, Any]:
        """By the host it was moved to; by the one that has its lease, when it is not there any more."""
        own = self.this_host.config.host
        words = ("migrate", entry.session, "--to", own, *(f"--accept={check}" for check in self.wanted.accept))
        names = list(dict.fromkeys(name for name in (entry.to, holder) if name))
        for name in names[:-1]:
            try:
                return peers.partner(self.this_host, pool, name).call(*words)
            except (SessionExited, SessionNotFound, HostNotFound):
                continue
        return peers.partner(self.this_host, pool, names[-1]).call(*words)
