"""Move a running session to another host.

    plan      the findings about it; a blocker stops here                    the session runs
    stand-by  the target gets ready for it, and waits for its lease (standby.py)
    pre-ship  (optional) copies go ahead while it runs, and the target fetches them
    ship      freeze, dump, upload; handed over: parked in its lease, its copy here stands still
    restore   the target takes the lease, a higher token, and lets it run    ── the point of no return is its lease
    forget    the copy here is killed; the record says where it went

Before each step the journal says so (moves.py). Whatever fails, and whoever is
killed: the lease alone tells who has the session (handover.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cmdop_migrate import clock
from cmdop_migrate.errors import Blocked, CmdopError, PeerLost, Unreachable, Usage
from cmdop_migrate.host import leases, resources, talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import End, Moves
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.migration import ownership, plan, steps
from cmdop_migrate.migration.ownership import Settled, settle
from cmdop_migrate.migration.target import Receiver
from cmdop_migrate.model import Record
from cmdop_migrate.remote.peer import Peer
from cmdop_migrate.snapshot import checkpoint
from cmdop_migrate.snapshot.capture import wait_quiet as capture_wait_quiet
from cmdop_migrate.snapshot.capture.incremental import Rounds, are_told
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions, CheckpointResult
from cmdop_migrate.util.progress import Meter, Report

PRE_SHIP_MAX = 10
READY_TIMEOUT = 120.0
RESTORE_TIMEOUT = 300.0
SLOWEST = 8 << 20  # bytes a second: what a target is given time for
PRINTS = 1.0  # seconds: who printed within them before it was frozen is one that prints
# Seconds of each step where nothing better is known; the plan knows better, from earlier checkpoints.
EXPECTED = {"plan": 1.0, "stand-by": 1.0, "pre-ship": 0.0, "ship": 0.5, "restore": 0.5, "forget": 0.05}
Progress = Callable[[str], None]
Show = Callable[[Report], None]


@dataclass(frozen=True)
class Wanted:
    pre_ship: int = 0
    lazy: bool = False
    accept: tuple[str, ...] = ()  # checks of the plan whose blockers are only to be warned of
    wait_quiet: float = 0.0  # seconds to wait for blockers that pass by themselves


def check(this_host: Host, reference: str, wanted: Wanted) -> None:
    """What is wrong with the wish itself."""
    this_host.find(reference)
    plan.check_names(wanted.accept)
    if not 0 <= wanted.pre_ship <= PRE_SHIP_MAX:
        raise Usage(f"--pre-ship {wanted.pre_ship} is out of range", f"Between 0 and {PRE_SHIP_MAX} rounds.")


def migrate(
    this_host: Host, reference: str, target: Peer, wanted: Wanted, show: Show = lambda _: None
) -> dict[str, Any]:
    """What `migrate --json` answers, once it runs there and nothing of it is here. On an error its hint says where the
    session is."""
    check(this_host, reference, wanted)
    moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)
    record = this_host.find(reference)
    with moves.alone(record.session, record.name):
        for one in moves.open():
            if one.session == record.session:  # its command was killed; we have the lock
                moves.end(one, settle(this_host, one).end, told=False)
        record, channel = talk.open_channel(this_host, reference)
        channel.close()
        moves.forget_old()
        return _Migration(this_host, moves, record, target, wanted, show).run()


def _patience(manifest: Manifest) -> float:
    return RESTORE_TIMEOUT + manifest.sizes["stored"] / SLOWEST


class _Migration:
    def __init__(self, this_host: Host, moves: Moves, record: Record, target: Peer, wanted: Wanted, show: Show) -> None:
        self.this_host, self.moves, self.record, self.target = this_host, moves, record, target
        self.wanted = wanted
        self.meter = Meter({name: max(0.01, seconds) for name, seconds in EXPECTED.items()}, show)
        self.progress = self.meter.say
        self.phases = resources.Phases("migrate")
        self.move = moves.begin(record.session, record.name, record.host, target.name, record.token)
        self.shipped: CheckpointResult | None = None
        self.answer: dict[str, Any] = {}
        flags = [*(["--lazy"] if wanted.lazy else []), *(["--accept-files"] if "files" in wanted.accept else [])]
        words = ("restore", record.session, "--standby", self.move.id, *flags)
        self.receiver = Receiver(target, words, self.progress, this_host.config.lease_ttl)
        self.settled: Settled | None = None
        self.rounds: Rounds | None = None
        self.warnings: list[dict[str, Any]] = []
        self.began = clock.boottime()

    def run(self) -> dict[str, Any]:
        sequence = [
            steps.Step("plan", self._plan, self._end),
            steps.Step("stand-by", self._stand_by, self.receiver.cancel),
            *([steps.Step("pre-ship", self._pre_ship)] if self.wanted.pre_ship else []),
            steps.Step("ship", self._ship, self._undo_ship),
            steps.Step("restore", self._restore),
            steps.Step("forget", self._forget, is_final=True),
        ]
        try:
            steps.run(sequence, self, self.phases, self.meter.stage)
        except CmdopError as error:
            raise self._told(error) from error
        finally:
            if self.rounds is not None:
                self.rounds.close()
        figures = self._figures()
        self.move = self.moves.end(replace(self.move, figures=figures | {"downtime_s": None}), End.ON_TARGET, told=True)
        facts = self._facts(figures)
        self.move = self.moves.save(replace(self.move, figures=figures | {"downtime_s": facts["downtime_s"]}))
        self.this_host.note(
            "migrated", self.record.session, name=self.record.name, to=self.target.name, token=facts["token"],
            frozen_s=facts["frozen_s"], downtime_s=facts["downtime_s"], phases=facts["phases"],
        )  # fmt: skip
        return facts

    def begin(self, step: str) -> None:
        self.move = self.moves.save(replace(self.move, step=step))

    def fail(self, step: str, error: BaseException) -> None:
        words = error.message if isinstance(error, CmdopError) else type(error).__name__
        self.move = self.moves.save(replace(self.move, step=f"undo {step}", error=words))

    def _plan(self) -> None:
        with self.phases.phase("plan"):
            self.progress("planning")
            if self.wanted.wait_quiet:
                capture_wait_quiet.settle(self.this_host, self.record.session, self.wanted.wait_quiet)
            found = plan.plan(
                self.this_host, self.record.session, plan.OtherHost(self.target), accept=self.wanted.accept
            )
        if found.blockers:
            words = "; ".join(f"{one.check}: {one.message}" for one in found.blockers)
            raise Blocked(
                words, f"{found.blockers[0].fix} Details: cmdop-migrate plan {self.record.name} --to {self.target.name}"
            )
        self.warnings = [one.to_json() for one in found.findings if one.level == "warn"]
        if found.expected is not None:
            cost = found.expected.frozen_s + found.expected.upload_s
            ahead = self.wanted.pre_ship * 2 * cost
            self.meter.expect(**{"pre-ship": ahead, "ship": cost, "restore": cost})

    def _stand_by(self) -> None:
        with self.phases.phase("stand_by"):
            self.progress(f"{self.target.name} gets ready")
            self.receiver.start(READY_TIMEOUT)

    @property
    def _wanted(self) -> CheckpointOptions:
        # A store of files is as near to the target as a copy of it would be.
        is_near = self.this_host.config.store.startswith("file:")
        return CheckpointOptions(
            reason="migrate", to=self.target.name, migration=self.move.id,
            on_pack=None if is_near else self.receiver.name_pack, rounds=self.rounds,
            wait_quiet=self.wanted.wait_quiet,
        )  # fmt: skip

    def _pre_ship(self) -> None:
        config = self.this_host.config
        if config.dirty_tracking != "off" and are_told(resources.find_criu(config)):
            self.rounds = Rounds(self.this_host.directory(self.record.session))
        for number in range(1, self.wanted.pre_ship + 1):
            self.phases.reach(f"pre-ship-{number}")
            with self.phases.phase(f"pre_ship_{number}"):
                self.progress(f"sending ahead, {number} of {self.wanted.pre_ship}")
                wanted = replace(self._wanted, leave_running=True, tag="pre-ship", reason="pre-ship")
                sent = checkpoint.checkpoint(self.this_host, self.record.session, wanted).manifest
                self.move = self.moves.save(replace(self.move, ahead=(*self.move.ahead, sent.checkpoint)))
                self.receiver.wait_ahead(sent.checkpoint, _patience(sent))

    def _ship(self) -> None:
        wanted = replace(self._wanted, hand_over=self._on_hand_over)
        self.shipped = checkpoint.checkpoint(self.this_host, self.record.session, wanted, self.progress)
        self.phases.seconds |= self.shipped.phases

    def _on_hand_over(self, manifest: Manifest) -> None:
        """On record first: should its holder have died, this is the last of it, whatever becomes of the target."""
        named = replace(self.move, checkpoint=manifest.checkpoint, parent=manifest.parent)
        self.move = self.moves.save(replace(named, step="hand over"))
        self.receiver.check()
        self.phases.reach("hand-over")

    def _undo_ship(self) -> None:
        """Wherever it got to: the lease tells who has it."""
        self._settle()
        assert self.settled is not None
        if self.settled.end is End.PARKED and self.receiver.is_alive:
            self.settled = self._left_to_target()
        self.move = self.moves.end(self.move, self.settled.end, told=True)

    def _end(self) -> None:
        """The last thing to be undone."""
        if self.move.end is None:
            self._settle()
            assert self.settled is not None
            self.move = self.moves.end(self.move, self.settled.end, told=True)

    def _settle(self) -> None:
        if self.settled is not None:
            return
        self.progress("asking its lease where it is")
        try:
            self.settled = settle(self.this_host, self.move)
        except Unreachable as error:
            raise type(error)(
                f"session {self.record.name!r}: nobody knows who has it: {error.message}",
                "Its copy here stands still until its lease can be read; then, or now: cmdop-migrate resume",
            ) from error

    def _left_to_target(self) -> Settled:
        """No copy is left here, and what is parked is what the target waits for: it takes it by itself."""
        try:
            token = int(self.receiver.result(RESTORE_TIMEOUT)["token"])
        except CmdopError:
            return settle(self.this_host, self.move)
        ownership.note_moved(self.this_host, self.record.session, self.target.name, token)
        return Settled(End.ON_TARGET, token, self.target.name)

    def _restore(self) -> None:
        assert self.shipped is not None
        try:
            with self.phases.phase("there"):
                self.answer = self.receiver.result(_patience(self.shipped.manifest), self._is_taken)
        except PeerLost:
            self._settle()
            assert self.settled is not None
            if self.settled.end is not End.ON_TARGET:
                raise

    def _is_taken(self) -> bool:
        """Whether another host has it. Not known: then there is nothing to be done about it either."""
        try:
            seen = leases.open_store(self.this_host.config).inspect(self.record.session)
        except Unreachable:
            return True
        return seen is None or seen.record.state == "held"

    def _forget(self) -> None:
        if self.settled is None:  # else it is done
            token = int(self.answer["token"])
            with self.phases.phase("forget"):
                ownership.forget(self.this_host, self.record.session, self.target.name, token)

    def _told(self, error: CmdopError) -> CmdopError:
        """The same error, and where the session is now."""
        if self.settled is None:
            return error
        where = {
            End.ON_SOURCE: f"The session goes on here (token {self.settled.token}).",
            End.ON_TARGET: f"The session runs on {self.settled.host} (token {self.settled.token}).",
            End.PARKED: f"The session is parked: cmdop-migrate restore {self.record.name}",
            End.EXITED: "The session has ended.",
        }[self.settled.end]
        return type(error)(error.message, f"{where} {error.hint}".strip())

    def _figures(self) -> dict[str, Any]:
        """What is known as soon as it is over. The target's times are known here only so well (receiver.py): how long
        it stood still may be a little too long, never too short."""
        assert self.shipped is not None
        token = int(self.answer["token"]) if self.answer else self.settled.token if self.settled else 0
        there = {f"there.{name}": seconds for name, seconds in self.answer.get("phases", {}).items()}
        frozen = None  # the connection broke, though it runs there: nobody measured
        if self.answer:
            frozen = round(self.receiver.here(float(self.answer["ran_at"])) - self.shipped.stopped_at, 6)
        return {"token": token, "frozen_s": frozen, "phases": self.phases.seconds | there}

    def _facts(self, figures: dict[str, Any]) -> dict[str, Any]:
        assert self.shipped is not None
        return {
            "migration": self.move.id,
            "session": self.record.session,
            "name": self.record.name,
            "from": self.record.host,
            "to": self.target.name,
            "token": figures["token"],
            "checkpoint": self.shipped.manifest.checkpoint,
            "frozen_s": figures["frozen_s"],
            **self._downtime(),
            "phases": figures["phases"],
            "bytes": self.shipped.to_json()["bytes"],
            "closed_connections": self.shipped.closed,
            "hooks": [*self.shipped.hooks, *self.answer.get("hooks", [])],
            "warnings": self.warnings,
            "took_s": round(clock.boottime() - self.began, 6),
        }

    def _downtime(self) -> dict[str, Any]:
        """How long nothing came out of it."""
        assert self.shipped is not None
        if not self.answer:
            return {"downtime_s": None, "downtime": None}
        stopped = self.shipped.stopped_at
        ran = self.receiver.here(float(self.answer["ran_at"]))
        prints = stopped - self.shipped.printed_at < PRINTS
        printed = self._first_output() if prints else None
        begin, basis = (self.shipped.printed_at, "last output") if prints else (stopped, "freeze")
        end, until = (printed, "first output") if printed is not None else (ran, "running")
        return {"downtime_s": round(end - begin, 6), "downtime": {"from": basis, "until": until}}

    def _first_output(self) -> float | None:
        """When it printed there for the first time; None when it has not."""
        first = self.answer.get("printed_at")
        if first is None:
            try:
                first = self.target.call("show", self.record.session, timeout=30.0)["output"].get("first_at")
            except (CmdopError, KeyError):
                return None  # it runs there: that nobody knows when it printed first is no failure
        return self.receiver.here(float(first)) if first is not None else None
