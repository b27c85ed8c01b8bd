"""Undrain this host: accept sessions again, and bring back what the last drain moved or parked.

The lease of each session tells where it is now: it may have been moved further, been parked there, or ended. A session
that runs on another host is moved by that host, through its own `migrate`; a parked one is restored here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from cmdop_migrate.drain.runner import is_free
from cmdop_migrate.errors import CmdopError, HostNotFound, SessionExited, SessionNotFound, from_code
from cmdop_migrate.host import drain_journal, leases
from cmdop_migrate.host.drain_journal import Drain, Drains, DrainState, Entry
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import Moves
from cmdop_migrate.migration import peers, plan
from cmdop_migrate.remote.ssh import SshPool
from cmdop_migrate.util.self_exec import Worker
from cmdop_migrate.util.signals import Stop

POLL_EVERY = 0.1  # seconds between two checks of the restores and migrations under way
AWAY: tuple[DrainState, ...] = ("moved", "parked", "going")  # states of a session that is not back
Report = Callable[[Entry], None]


@dataclass(frozen=True)
class UndrainOptions:
    """Hold what `undrain` was asked for. `accept`: checks of the plan to accept, as `migrate` has them; between hosts
    whose kernels differ, nothing comes back without it."""

    bring_back: bool = False
    parallel: int = 2
    accept: tuple[str, ...] = ()


@dataclass(frozen=True)
class UndrainResult:
    """Describe what `undrain` did. `tried`: the sessions that it tried to bring back, with their new state; `away`:
    those that the drain moved or parked and that are not back."""

    was_draining: bool
    tried: tuple[Entry, ...]
    away: tuple[Entry, ...]

    def of(self, *states: DrainState) -> list[Entry]:
        """Return the sessions that were tried and are now in one of these states."""
        return [entry for entry in self.tried if entry.state in states]


def undrain(
    this_host: Host, options: UndrainOptions, flags: Sequence[str], stop: Stop, report: Report
) -> UndrainResult:
    """Remove the drain flag and, with `bring_back`, bring back the sessions of the last drain. `flags`: the global
    command-line flags, for the commands that it starts. `report` receives each session when it is done. Raise Blocked
    if another command drains or undrains this host."""
    plan.check_names(options.accept)
    drains = Drains(this_host.config.state_dir)
    with drains.alone():
        flag = drain_journal.read_flag(this_host.config.state_dir)
        journal = (drains.find(flag.drain) if flag else None) or drains.last()
        with this_host.locked():
            drain_journal.clear_flag(this_host.config.state_dir)
        if flag is not None:
            this_host.events.emit("undrained", drain=flag.drain)
        tried: list[Entry] = []
        if options.bring_back and journal is not None:
            tried = _BringBack(this_host, drains, journal, options, flags, stop, report).run(options.parallel)
            journal = drains.find(journal.id) or journal
        away = journal.of(*AWAY) if journal is not None else []
        return UndrainResult(flag is not None, tuple(tried), tuple(away))


class _BringBack:
    """Bring the sessions of one drain back, several at a time."""

    def __init__(
        self,
        this_host: Host,
        drains: Drains,
        journal: Drain,
        options: UndrainOptions,
        flags: Sequence[str],
        stop: Stop,
        report: Report,
    ) -> None:
        self.this_host, self.drains, self.journal, self.options = this_host, drains, journal, options
        self.flags, self.stop, self.report = flags, stop, report
        self.moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)

    def run(self, parallel: int) -> list[Entry]:
        """Return each session that was away with its new state: back, ended, or as it was with the reason."""
        tried: list[Entry] = []
        with peers.pool(self.this_host.config) as pool, ThreadPoolExecutor(parallel) as threads:
            waiting: set[Future[Entry]] = {threads.submit(self._bring, pool, entry) for entry in self.journal.of(*AWAY)}
            while waiting:
                done, waiting = wait(waiting, POLL_EVERY)
                for future in done:
                    tried.append(self._note(future.result()))
                if self.stop.times > 1:
                    pool.close()  # migrations that were begun on other hosts continue there
        return tried

    def _note(self, entry: Entry) -> Entry:
        """Write the entry of one session to the journal and report it."""
        kept = replace(entry, why="") if entry.state in AWAY else entry
        self.journal = self.drains.save(self.journal.with_entry(kept))
        self.report(entry)
        return entry

    def _bring(self, pool: SshPool, entry: Entry) -> Entry:
        """Bring one session back. Return its entry, with the reason if that failed."""
        if self.stop.times:
            return replace(entry, why="interrupted")
        try:
            return self._fetch(pool, entry)
        except (SessionExited, SessionNotFound) as error:
            return replace(entry, state="ended", to=None, why=error.message)
        except CmdopError as error:
            return replace(entry, why=f"{error.message} {error.hint}".strip())

    def _fetch(self, pool: SshPool, entry: Entry) -> Entry:
        """Bring one session back from the place that its lease names. Raise CmdopError."""
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
            time.sleep(POLL_EVERY)
        if not ended.ok:
            raise from_code(ended.code, ended.message, ended.hint)
        return ended.answer

    def _call(self, pool: SshPool, entry: Entry, holder: str) -> dict[str, Any]:
        """Let another host move the session back: the host that it was moved to or, if it is not there any more, the
        one that holds its lease."""
        own = self.this_host.config.host
        words = ("migrate", entry.session, "--to", own, *(f"--accept={check}" for check in self.options.accept))
        names = list(dict.fromkeys(name for name in (entry.to, holder) if name))
        for name in names[:-1]:
            try:
                return peers.checked_peer(self.this_host, pool, name).call(*words)
            except (SessionExited, SessionNotFound, HostNotFound):
                continue
        return peers.checked_peer(self.this_host, pool, names[-1]).call(*words)
