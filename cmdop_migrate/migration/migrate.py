"""Migrate a running session to another host.

    plan      gather the findings; a blocker stops the migration             the session runs
    stand-by  the target prepares, and waits for the session's lease (standby.py)
    pre-ship  (optional) pre-copy rounds while the session runs; the target prefetches them
    ship      freeze, dump, upload, hand over: the lease is parked, the copy here stays frozen
    restore   the target takes the lease with a higher token and starts the session   ── the point of no return
    forget    kill the copy here, and record where the session went

Before each step the journal names it (host/move_journal.py). If any step fails or
any process is killed, the lease alone decides which host has the session
(ownership.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cmdop_migrate import clock
from cmdop_migrate.errors import Blocked, CmdopError, PeerLost, Unreachable, Usage
from cmdop_migrate.host import leases, resources, talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import End, Moves
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.migration import ownership, plan, steps
from cmdop_migrate.migration.migrate_options import Downtime, MigrateOptions, MigrationResult
from cmdop_migrate.migration.ownership import MoveOutcome, settle
from cmdop_migrate.migration.target import TargetStandby
from cmdop_migrate.model import Record
from cmdop_migrate.remote.peer import Peer
from cmdop_migrate.snapshot import checkpoint
from cmdop_migrate.snapshot.capture import wait_quiet as capture_wait_quiet
from cmdop_migrate.snapshot.capture.incremental import PreCopyRounds, tracks_writes
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions, CheckpointResult
from cmdop_migrate.snapshot.restore_options import RestoreResult
from cmdop_migrate.util.progress import Meter, Report

PRE_SHIP_MAX = 10
READY_TIMEOUT = 120.0
RESTORE_TIMEOUT = 300.0
SLOWEST_FETCH = 8 << 20  # bytes a second: the slowest target that is waited for
PRINTING_SECONDS = 1.0  # a session that printed within this time before the freeze counts as one that prints
# Expected seconds of each step by default; the plan estimates better from earlier checkpoints.
EXPECTED = {"plan": 1.0, "stand-by": 1.0, "pre-ship": 0.0, "ship": 0.5, "restore": 0.5, "forget": 0.05}
Progress = Callable[[str], None]
Show = Callable[[Report], None]


def check(this_host: Host, reference: str, options: MigrateOptions) -> None:
    """Raise an error if the session is unknown or the options are invalid."""
    this_host.find(reference)
    plan.check_names(options.accept)
    if not 0 <= options.pre_ship <= PRE_SHIP_MAX:
        raise Usage(f"--pre-ship {options.pre_ship} is out of range", f"Between 0 and {PRE_SHIP_MAX} rounds.")


def migrate(
    this_host: Host, reference: str, target: Peer, options: MigrateOptions, show: Show = lambda _: None
) -> MigrationResult:
    """Migrate a session. When this returns the session runs on the target and no copy is left here. The hint of an
    error says where the session is."""
    check(this_host, reference, options)
    moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)
    record = this_host.find(reference)
    with moves.alone(record.session, record.name):
        for move in moves.open():
            if move.session == record.session:  # the command of that move was killed: we hold its lock
                moves.end(move, settle(this_host, move).end, told=False)
        record, channel = talk.open_channel(this_host, reference)
        channel.close()
        moves.forget_old()
        return _Migration(this_host, moves, record, target, options, show).run()


def _restore_timeout(manifest: Manifest) -> float:
    return RESTORE_TIMEOUT + manifest.sizes["stored"] / SLOWEST_FETCH


class _Migration:
    """Run one migration as a sequence of steps, and journal them."""

    def __init__(
        self, this_host: Host, moves: Moves, record: Record, target: Peer, options: MigrateOptions, show: Show
    ) -> None:
        self.this_host, self.moves, self.record, self.target = this_host, moves, record, target
        self.options = options
        self.meter = Meter({name: max(0.01, seconds) for name, seconds in EXPECTED.items()}, show)
        self.progress = self.meter.say
        self.phases = resources.Phases("migrate")
        self.move = moves.begin(record.session, record.name, record.host, target.name, record.token)
        self.shipped: CheckpointResult | None = None
        self.restored: RestoreResult | None = None
        flags = [*(["--lazy"] if options.lazy else []), *(["--accept-files"] if "files" in options.accept else [])]
        words = ("restore", record.session, "--standby", self.move.id, *flags)
        self.standby = TargetStandby(target, words, self.progress, this_host.config.lease_ttl)
        self.outcome: MoveOutcome | None = None
        self.rounds: PreCopyRounds | None = None
        self.warnings: list[dict[str, Any]] = []
        self.began = clock.boottime()

    def run(self) -> MigrationResult:
        """Run the steps; on an error undo them, and raise the error with a hint that says where the session is."""
        sequence = [
            steps.Step("plan", self._plan, self._end),
            steps.Step("stand-by", self._stand_by, self.standby.cancel),
            *([steps.Step("pre-ship", self._pre_ship)] if self.options.pre_ship else []),
            steps.Step("ship", self._ship, self._undo_ship),
            steps.Step("restore", self._restore),
            steps.Step("forget", self._forget, is_final=True),
        ]
        try:
            steps.run(sequence, self, self.phases, self.meter.stage)
        except CmdopError as error:
            raise self._with_location(error) from error
        finally:
            if self.rounds is not None:
                self.rounds.close()
        token, frozen_s, phases = self._token(), self._frozen_seconds(), self._all_phases()
        figures = {"token": token, "frozen_s": frozen_s, "phases": phases}
        # On record before the downtime is asked for, which may take a call to the target.
        self.move = self.moves.end(replace(self.move, figures=figures | {"downtime_s": None}), End.ON_TARGET, told=True)
        result = self._result(token, frozen_s, phases)
        self.move = self.moves.save(replace(self.move, figures=figures | {"downtime_s": result.downtime_s}))
        self.this_host.note(
            "migrated", self.record.session, name=self.record.name, to=self.target.name, token=token,
            frozen_s=frozen_s, downtime_s=result.downtime_s, phases=phases,
        )  # fmt: skip
        return result

    def begin(self, step: str) -> None:
        """Journal that a step begins (`steps.Journal`)."""
        self.move = self.moves.save(replace(self.move, step=step))

    def fail(self, step: str, error: BaseException) -> None:
        """Journal that a step failed (`steps.Journal`)."""
        words = error.message if isinstance(error, CmdopError) else type(error).__name__
        self.move = self.moves.save(replace(self.move, step=f"undo {step}", error=words))

    def _plan(self) -> None:
        with self.phases.phase("plan"):
            self.progress("planning")
            if self.options.wait_quiet:
                capture_wait_quiet.settle(self.this_host, self.record.session, self.options.wait_quiet)
            result = plan.plan(
                self.this_host, self.record.session, plan.RemoteFacts(self.target), accept=self.options.accept
            )
        if result.blockers:
            words = "; ".join(f"{finding.check}: {finding.message}" for finding in result.blockers)
            details = f"Details: cmdop-migrate plan {self.record.name} --to {self.target.name}"
            raise Blocked(words, f"{result.blockers[0].fix} {details}")
        self.warnings = [finding.to_json() for finding in result.findings if finding.level == "warn"]
        if result.expected is not None:
            cost = result.expected.frozen_s + result.expected.upload_s
            pre_copy_cost = self.options.pre_ship * 2 * cost
            self.meter.expect(**{"pre-ship": pre_copy_cost, "ship": cost, "restore": cost})

    def _stand_by(self) -> None:
        with self.phases.phase("stand_by"):
            self.progress(f"{self.target.name} prepares")
            self.standby.start(READY_TIMEOUT)

    @property
    def _checkpoint_options(self) -> CheckpointOptions:
        # Prefetching from a file store gains nothing: it is as fast to read as a prefetched copy.
        is_file_store = self.this_host.config.store.startswith("file:")
        return CheckpointOptions(
            reason="migrate", to=self.target.name, migration=self.move.id,
            on_pack=None if is_file_store else self.standby.name_pack, rounds=self.rounds,
            wait_quiet=self.options.wait_quiet,
        )  # fmt: skip

    def _pre_ship(self) -> None:
        config = self.this_host.config
        if config.dirty_tracking != "off" and tracks_writes(resources.find_criu(config)):
            self.rounds = PreCopyRounds(self.this_host.directory(self.record.session))
        for number in range(1, self.options.pre_ship + 1):
            self.phases.reach(f"pre-ship-{number}")
            with self.phases.phase(f"pre_ship_{number}"):
                self.progress(f"pre-copy round {number} of {self.options.pre_ship}")
                options = replace(self._checkpoint_options, leave_running=True, tag="pre-ship", reason="pre-ship")
                sent = checkpoint.checkpoint(self.this_host, self.record.session, options).manifest
                self.move = self.moves.save(replace(self.move, ahead=(*self.move.ahead, sent.checkpoint)))
                self.standby.wait_prefetched(sent.checkpoint, _restore_timeout(sent))

    def _ship(self) -> None:
        options = replace(self._checkpoint_options, hand_over=self._on_hand_over)
        self.shipped = checkpoint.checkpoint(self.this_host, self.record.session, options, self.progress)
        self.phases.seconds |= self.shipped.phases

    def _on_hand_over(self, manifest: Manifest) -> None:
        """Journal the checkpoint before it is handed over: if the holder has died, it is the last state of the session,
        even if the target fails. Raises the target's error if it no longer stands by."""
        named = replace(self.move, checkpoint=manifest.checkpoint, parent=manifest.parent)
        self.move = self.moves.save(replace(named, step="hand over"))
        self.standby.check()
        self.phases.reach("hand-over")

    def _undo_ship(self) -> None:
        """Settle by the lease which host has the session, and journal that."""
        self._settle()
        assert self.outcome is not None
        if self.outcome.end is End.PARKED and self.standby.is_alive:
            self.outcome = self._leave_to_target()
        self.move = self.moves.end(self.move, self.outcome.end, told=True)

    def _end(self) -> None:
        """Settle and journal the end of the move, as the last undo, if that was not done yet."""
        if self.move.end is None:
            self._settle()
            assert self.outcome is not None
            self.move = self.moves.end(self.move, self.outcome.end, told=True)

    def _settle(self) -> None:
        if self.outcome is not None:
            return
        self.progress("reading its lease")
        try:
            self.outcome = settle(self.this_host, self.move)
        except Unreachable as error:
            raise type(error)(
                f"session {self.record.name!r}: it is not known which host has it: {error.message}",
                "Its copy here stays frozen until its lease can be read; then, or now: cmdop-migrate resume",
            ) from error

    def _leave_to_target(self) -> MoveOutcome:
        """Wait for the target to restore the session. No copy is left here, and the lease is parked at the checkpoint
        that the target waits for."""
        try:
            token = self.standby.result(RESTORE_TIMEOUT).token
        except CmdopError:
            return settle(self.this_host, self.move)
        ownership.note_moved(self.this_host, self.record.session, self.target.name, token)
        return MoveOutcome(End.ON_TARGET, token, self.target.name)

    def _restore(self) -> None:
        assert self.shipped is not None
        try:
            with self.phases.phase("there"):
                self.restored = self.standby.result(_restore_timeout(self.shipped.manifest), self._is_lease_taken)
        except PeerLost:
            self._settle()
            assert self.outcome is not None
            if self.outcome.end is not End.ON_TARGET:
                raise

    def _is_lease_taken(self) -> bool:
        """Return whether another host holds the lease. True if that is unknown: then nothing can be done about it."""
        try:
            seen = leases.open_store(self.this_host.config).inspect(self.record.session)
        except Unreachable:
            return True
        return seen is None or seen.record.state == "held"

    def _forget(self) -> None:
        if self.outcome is None:  # otherwise settling removed the copy
            assert self.restored is not None
            with self.phases.phase("forget"):
                ownership.remove_copy(self.this_host, self.record.session, self.target.name, self.restored.token)

    def _with_location(self, error: CmdopError) -> CmdopError:
        """Return the error with a hint that says where the session is now."""
        if self.outcome is None:
            return error
        where = {
            End.ON_SOURCE: f"The session keeps running here (token {self.outcome.token}).",
            End.ON_TARGET: f"The session runs on {self.outcome.host} (token {self.outcome.token}).",
            End.PARKED: f"The session is parked: cmdop-migrate restore {self.record.name}",
            End.EXITED: "The session has ended.",
        }[self.outcome.end]
        return type(error)(error.message, f"{where} {error.hint}".strip())

    def _token(self) -> int:
        """Return the fencing token under which the session runs on the target."""
        if self.restored is not None:
            return self.restored.token
        return self.outcome.token if self.outcome else 0

    def _frozen_seconds(self) -> float | None:
        """Return how long the session was frozen; None if the connection broke, although the session runs on the
        target. The target's clock is known with a small error (target.py): the value may be a little too long, never
        too short."""
        assert self.shipped is not None
        if self.restored is None:
            return None
        return round(self.standby.here(self.restored.ran_at) - self.shipped.stopped_at, 6)

    def _all_phases(self) -> dict[str, float]:
        there = self.restored.phases if self.restored is not None else {}
        return self.phases.seconds | {f"there.{name}": seconds for name, seconds in there.items()}

    def _result(self, token: int, frozen_s: float | None, phases: dict[str, float]) -> MigrationResult:
        assert self.shipped is not None
        return MigrationResult(
            migration=self.move.id,
            session=self.record.session,
            name=self.record.name,
            source=self.record.host,
            target=self.target.name,
            token=token,
            shipped=self.shipped,
            frozen_s=frozen_s,
            downtime=self._downtime(self.shipped, self.restored) if self.restored is not None else None,
            phases=phases,
            hooks=[*self.shipped.hooks, *(self.restored.hooks if self.restored is not None else [])],
            warnings=self.warnings,
            took_s=round(clock.boottime() - self.began, 6),
        )

    def _downtime(self, shipped: CheckpointResult, restored: RestoreResult) -> Downtime:
        ran = self.standby.here(restored.ran_at)
        prints = shipped.stopped_at - shipped.printed_at < PRINTING_SECONDS
        printed = self._first_output(restored) if prints else None
        begin, basis = (shipped.printed_at, "last output") if prints else (shipped.stopped_at, "freeze")
        end, until = (printed, "first output") if printed is not None else (ran, "running")
        return Downtime(round(end - begin, 6), basis, until)

    def _first_output(self, restored: RestoreResult) -> float | None:
        """Return when the session printed on the target for the first time, by this host's clock; None if it has not,
        or if that is unknown."""
        first = restored.printed_at
        if first is None:
            try:
                first = self.target.call("show", self.record.session, timeout=30.0)["output"].get("first_at")
            except (CmdopError, KeyError):
                return None  # the session runs there: an unknown time of its first output is no failure
        return self.standby.here(float(first)) if first is not None else None
