"""Freeze, dump, seal, ship.

    prepare   checks                                                    the session runs
    criu      CRIU looks at the kernel; beside it the upload is marked, the host's files described
    hooks     whoever must know beforehand is told, and may refuse
    freeze    the holder stands it still and puts its output on disk    ── frozen from here
    reset     connections to the outside are closed and listed
    dump      CRIU's pages go straight into the image; files beside it
    capture   all of it is in our memory, most of it sealed             ── captured
    upload    the rest is digested and sealed; the store has every pack
    prove     a park only: the image is restored on trial, up to its first instruction (proof.py)
    publish   the store has the manifest
    commit    the lease names this checkpoint: the point of no return
    park      the holder ends this incarnation; or it was thawed already, for --leave-running; or, handed over
              to another host, it stands still until that has it

A failure anywhere before `commit` thaws the session: the holder does so as
soon as our connection to it ends, whatever became of us. When nobody can tell
whether the commit took effect, it stands still until the agent can.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from cmdop_migrate import __version__, clock, log, units
from cmdop_migrate.config import Config
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.errors import Blocked, CmdopError, CriuFailed, NotIdle, TimedOut
from cmdop_migrate.holder import cgroup, start, syscalls
from cmdop_migrate.host import agent_process, hooks, leases, reconcile, resources, talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.files import walk
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.model import Record
from cmdop_migrate.session import cpu_affinity, files_in_use, inspect, tcp_connections, thread_settings
from cmdop_migrate.session.holder_client import Channel, HolderGone
from cmdop_migrate.snapshot import host_files, image_checks, mounts, proof
from cmdop_migrate.snapshot.capture import changed_files, commit, dump_checks, ended, open_image, wait_quiet
from cmdop_migrate.snapshot.capture.dump import Dump
from cmdop_migrate.snapshot.capture.open_image import Opening
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions, CheckpointResult, chunk_counts
from cmdop_migrate.snapshot.proof import Proof
from cmdop_migrate.util import trash

FREEZE_TIMEOUT = 30.0
TOLD_CONNECTIONS = 64  # in the event; the answer, the image and hooks have all of them
_log = log.get("checkpoint")
Progress = Callable[[str], None]


@wait_quiet.retried
def checkpoint(
    this_host: Host, reference: str, wanted: CheckpointOptions, progress: Progress = lambda _: None
) -> CheckpointResult:
    """The session parked in the store (or running on, with a copy there); or running on, and an error."""
    record, channel = talk.open_channel(this_host, reference)
    attempt = _Checkpoint(this_host, record, channel, wanted, progress)
    with hooks.after_thaw(this_host, record, attempt.told, lambda: not attempt.commit.handed), channel:
        try:
            return attempt.run()
        except HolderGone as error:
            raise ended.reason(this_host, record) or ended.taken(record) from error
        except CriuFailed as error:
            raise ended.reason(this_host, record) or error from None


class _Checkpoint:
    def __init__(
        self, this_host: Host, record: Record, channel: Channel, wanted: CheckpointOptions, progress: Progress
    ) -> None:
        self.this_host, self.record, self.channel = this_host, record, channel
        self.wanted, self.progress = wanted, progress
        self.config: Config = this_host.config
        self.group = this_host.cgroup(record.session)
        self.directory = this_host.directory(record.session)
        self.uppers = [self.directory / f"layers/{number}/upper" for number in range(len(record.layers))]
        self.images = self.directory / "dump"  # CRIU's; one of launch.PASSING
        self.phases = resources.Phases("checkpoint")
        self.frozen_at = self.captured_at = self.stopped_at = self.printed_at = 0.0
        self.is_ours = False  # to thaw
        self.files_bytes = self.files_count = 0
        self.untriable: str | None = None  # why a trial restore cannot be made
        self.told: list[dict[str, Any]] = []
        self.commit = commit.Commit(this_host, record, channel, self.phases, wanted.leave_running, wanted.hand_over)

    def run(self) -> CheckpointResult:
        with self._alone(), agent_process.attended(self.config):
            return self._run()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other command makes a checkpoint of it meanwhile: the lock is on its directory."""
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._busy() from None
            yield
        finally:
            os.close(folder)

    def _busy(self) -> Blocked:
        return Blocked(f"session {self.record.name!r} is being checkpointed or restored already", "Wait for that.")

    def _run(self) -> CheckpointResult:
        wanted = self.wanted
        with self.phases.phase("prepare"):
            self.progress("preparing")
            criu, found = self._prepare()
        begun = open_image.start(
            self.config, self.record, self.directory, found, wanted.carry, wanted.leave_running, wanted.on_pack
        )
        try:
            closed = self._capture(criu, found, begun)
            writer, _ = begun.result()
            with self.phases.phase("upload"):
                self.progress("uploading")
                manifest = writer.finish(self.record.token, self._facts(criu))
            proven = self._prove(criu, manifest)
            with self.phases.phase("publish"):
                self._before_publish()
                writer.publish(manifest)
            if wanted.rounds is not None:
                wanted.rounds.keep(self.images, writer.previous_round)
            with self.phases.phase("commit"):
                self.commit.run(manifest)
        except BaseException as error:
            self._thaw()  # at once; the holder would do it too, when it sees us gone
            open_image.give_up(begun, error)
            raise
        finally:
            shutil.rmtree(self.images, ignore_errors=True)
        if wanted.leave_running:
            self.channel.ask(op="saved", checkpoint=manifest.checkpoint)
        elif self.wanted.hand_over is None:
            with self.phases.phase("park"):
                self._park(manifest)
        frozen = round(self.captured_at - self.frozen_at, 6)
        self.this_host.note(
            "checkpointed", self.record.session, checkpoint=manifest.checkpoint, token=manifest.token,
            frozen_s=frozen, parked=not wanted.leave_running, new=manifest.sizes["new"], closed=len(closed),
            memory=manifest.sizes["memory"], files=self.files_bytes, upload_s=self.phases.seconds["upload"],
            phases=self.phases.seconds, chunks=chunk_counts(manifest), connections=closed[:TOLD_CONNECTIONS],
            proved=proven.proved, proof_skipped=proven.skipped,
        )  # fmt: skip
        return CheckpointResult(
            manifest, frozen, self.phases.seconds, closed, self.told, self.stopped_at, self.printed_at, proven
        )

    def _prepare(self) -> tuple[Criu, files_in_use.Touched]:
        """What CRIU must be told, and all that needs nobody's answer, while the session still runs."""
        criu = resources.find_criu(self.config)
        leases.prove(leases.open_store(self.config), self.this_host, self.record)
        mounts.check_in_place(self.record)  # first: the check after it calls a share out of its place a strange mount
        self.untriable = dump_checks.check(self.group, self.record)
        self._check_room()
        syscalls.few_heaps(2)  # for some ten threads; else another 30 MiB are held that nobody uses
        return criu, dump_checks.check_watches(self._look())

    def _check_room(self) -> None:
        """Refuses now what would fail half-way: in the worst case all of it has to wait on this disk."""
        sizes = [walk.measure(upper) for upper in self.uppers]
        self.files_bytes = sum(one.data_bytes for one in sizes)
        self.files_count = sum(one.files for one in sizes)
        dump_checks.warn_of_devices(self.record, sizes)
        needed = inspect.rss(self.group) + self.files_bytes + (64 << 20)
        free = trash.make_room(str(self.config.state_dir), needed)
        if free < needed:
            message = f"not enough disk at {self.config.state_dir}: {units.show_size(free)} free"
            raise Blocked(f"{message}, up to {units.show_size(needed)} needed", "Free some, then checkpoint again.")

    def _look(self, before: files_in_use.Touched | None = None) -> files_in_use.Touched:
        return files_in_use.look(cgroup.pids(self.group), files_in_use.Layers(self.record.layers, self.uppers), before)

    def _capture(self, criu: Criu, before: files_in_use.Touched, begun: Opening) -> list[dict[str, object]]:
        left = ("dump",) if self.wanted.rounds is not None else ("dump", start.KEPT)
        start.remove_files(str(self.directory), left)  # by one who was killed: half a dump, or a round
        self.images.mkdir(mode=0o700)
        frozen: dict[str, Any] = {}
        closed: list[tcp_connections.Connection] = []
        with ThreadPoolExecutor(1, "files") as pool, contextlib.ExitStack() as dumping:
            files: list[Future[list[bytes]]] = []

            def capture(found: files_in_use.Touched) -> None:
                files.append(pool.submit(changed_files.capture, begun.result()[0], self.directory, self.uppers, found))

            def capture_again() -> None:
                """With the links that CRIU removes when it has its answer: the first walk may have missed them."""
                capture(self._look(before))
                files[-1].result()

            def stand_still() -> files_in_use.Touched:
                _, carrier = begun.result()
                booting.close()
                with self.phases.phase("hooks"):
                    goal = hooks.Goal(self.wanted.reason, self.wanted.to, self.wanted.leave_running)
                    hooks.before_freeze(self.this_host, self.record, goal, self.told)
                with self.phases.phase("freeze"):
                    self.progress("freezing")
                    frozen.update(self._freeze())
                self.is_ours = True
                dump_checks.check_frozen(self.group, self.record)
                found = dump_checks.check_watches(self._look(before))
                carrier.add(found)
                with self.phases.phase("reset"):
                    closed.extend(tcp_connections.external(self.group, self.record.link is not None))
                    if not self.wanted.leave_running:
                        tcp_connections.reset(frozen["pid"], closed)
                capture(found)
                dumping.enter_context(self.phases.phase("dump"))
                self.progress("dumping")
                return found

            with contextlib.ExitStack() as booting:
                booting.enter_context(self.phases.phase("criu"))
                dump = Dump(criu, self.config, self.record, self.group, self.images, self.channel)
                dump.run(lambda: begun.result()[0], self.wanted.rounds, stand_still, capture_again)
            dumping.close()
            frozen |= self._typeahead()
            with self.phases.phase("capture"):
                writer, carrier = begun.result()
                changed_files.add(writer, files[-1].result())
                self._small_things(writer, carrier, closed, frozen)
                writer.end_input()
        self.captured_at = time.monotonic()
        if self.wanted.leave_running:
            self.channel.ask(op="thaw")
        return [one.to_json() for one in closed]

    def _typeahead(self) -> dict[str, Any]:
        answer = self.channel.ask(op="typeahead")
        if answer.get("error"):
            raise Blocked(
                f"session {self.record.name!r} cannot be captured: {answer['error']}", "It goes on. Try again."
            )
        return answer

    def _freeze(self) -> dict[str, Any]:
        self.frozen_at, self.stopped_at = time.monotonic(), clock.boottime()
        idle = self.wanted.only_idle  # hooks may have woken it: then only who is attached counts
        idle = 0.0 if idle is not None and self.told else idle
        answer = self.channel.ask(op="freeze", only_idle=idle, timeout=FREEZE_TIMEOUT)
        if answer.get("error") == "active":
            raise NotIdle(f"session {self.record.name!r} is in use again", "It goes on.")
        if answer.get("error") == "busy":
            raise self._busy()
        if answer.get("error") == "disk":
            message = f"what session {self.record.name!r} printed cannot be put on disk: {answer['why']}"
            raise Blocked(message, "It goes on. Free some space where state_dir is, then checkpoint again.")
        if answer.get("error"):
            raise TimedOut(
                f"session {self.record.name!r} could not be frozen: a process of it does not stop",
                "It goes on. A process in uninterruptible sleep (state D in `show`) is the usual cause.",
            )
        self.printed_at = float(answer.get("printed_at", 0.0))
        return answer

    def _small_things(
        self,
        writer: ImageWriter,
        carrier: host_files.Carrier,
        closed: list[tcp_connections.Connection],
        frozen: dict[str, Any],
    ) -> None:
        for path in sorted(self.images.iterdir()):
            if path.suffix == ".img":
                writer.add_blob(f"criu/{path.name}", path.read_bytes())
        writer.add_blob("output", (self.directory / "output.ring").read_bytes())
        for name, data in image_checks.journal(self.directory):
            writer.add_blob(name, data)
        typed = ("unread", "unwritten", "staged", "streams", "turn", "queued", "journal")
        terminal = {key: frozen[key] for key in (*typed, "rows", "cols")}
        writer.add_blob("affinity", json.dumps(cpu_affinity.read(cgroup.pids(self.group))).encode())
        writer.add_blob("threads", json.dumps(thread_settings.read(cgroup.pids(self.group))).encode())
        writer.add_blob("terminal", json.dumps(terminal).encode())
        writer.add_blob("connections", json.dumps([asdict(one) for one in closed]).encode())
        carrier.finish()

    def _facts(self, criu: Criu) -> dict[str, Any]:
        return {
            "name": self.record.name,
            "host": self.record.host,
            "tag": self.wanted.tag,
            "record": self.record.to_json(),
            "version": __version__,
            "criu": list(criu.version),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "files_bytes": self.files_bytes,
            "live": self.wanted.leave_running,
            "migration": self.wanted.migration,
        }

    def _prove(self, criu: Criu, manifest: Manifest) -> Proof:
        """Restore a park on trial. Raises CriuFailed with the cause, before anything is published."""
        wanted = self.wanted
        if wanted.leave_running or wanted.hand_over is not None:
            return Proof()  # the session, or the source's copy of it, is not ended
        if not wanted.prove:
            return Proof(skipped="not asked for")
        free = shutil.disk_usage(self.config.state_dir).free
        room = proof.why_not(self.record, self.files_count, self.files_bytes, wanted.deadline, free)
        if why := self.untriable or room:
            return Proof(skipped=why)
        self.progress("proving")
        try:
            with self.phases.phase("prove"):
                proof.prove(self.this_host, criu, manifest, self.record)
        except proof.Skipped as skipped:
            return Proof(skipped=str(skipped))
        except CriuFailed as error:
            self.this_host.note("proof_failed", self.record.session, reason=error.message.splitlines()[0])
            words = f"session {self.record.name!r} was not parked: a trial restore of its checkpoint failed: "
            raise CriuFailed(f"{words}{error.message}", f"It goes on. {error.hint}") from error
        return Proof(proved=True)

    def _before_publish(self) -> None:
        """The last moment to find out that somebody ended the session meanwhile: then there is nothing to park."""
        if self.wanted.leave_running:
            return
        try:
            self.channel.ask(op="status")
        except HolderGone:
            if self.wanted.hand_over is None or not talk.died(self.this_host, self.record):
                raise
            # With its holder it died, but all of it is captured: what is published now is the last of it.

    def _park(self, manifest: Manifest) -> None:
        try:
            self.channel.ask(op="park", checkpoint=manifest.checkpoint)
            for _ in self.channel.follow(timeout=30):
                pass
        except HolderGone:
            pass  # as it should be: the incarnation has ended
        after = self.this_host.load(self.record.session)
        is_done = after is not None and (after.phase == "parked" or after.token > self.record.token)  # it is back
        if not is_done and not self._was_parked():
            raise Blocked(
                f"session {self.record.name!r} was ended by someone else while it was being parked",
                f"Its checkpoint is whole: cmdop-migrate restore {manifest.checkpoint[:12]} --fork NAME",
            )

    def _was_parked(self) -> bool:
        """The holder was ended before it heard of it: then the lease tells, unless it was a person's wish."""
        after = talk.after_loss(self.this_host, self.record)
        if reconcile.is_doubtful(after):
            store = leases.open_store(self.config)
            with contextlib.suppress(OSError):  # on a full disk it is known to us alone
                talk.until(lambda: reconcile.ask(self.this_host, store, after), bool, ended.DEAD)
            after = self.this_host.load(self.record.session) or after
        return after.phase == "parked"

    def _thaw(self) -> None:
        if not self.is_ours or self.commit.in_doubt:
            return  # in doubt the holder stands it still, as soon as our connection ends
        try:
            self.channel.ask(op="thaw")
        except (HolderGone, CmdopError, OSError) as error:
            _log.warning("could not tell the holder to go on: %s", error)
