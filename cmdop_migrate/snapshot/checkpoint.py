"""Checkpoint a session: freeze, dump, seal and upload it, then park it or let it keep running.

    prepare   run the checks                                            the session runs
    criu      CRIU probes the kernel; in parallel the upload is marked and the host's files are described
    hooks     run the pre-freeze hooks, each of which may refuse
    freeze    the holder freezes the session and writes its output to disk   ── frozen from here
    reset     close the connections to the outside, and list them
    dump      CRIU's pages go straight into the image; the files are captured in parallel
    capture   all of the session is in our memory, most of it sealed         ── captured
    upload    digest and seal the rest, until the store has every pack
    prove     of a park only: restore the image on trial, up to its first instruction (proof.py)
    publish   write the manifest to the store
    commit    the lease names this checkpoint: the point of no return
    park      the holder ends this incarnation. With --leave-running the session was thawed already; handed over
              to another host, it stays frozen until that host has it

A failure anywhere before `commit` thaws the session: the holder does so as
soon as our connection to it ends, even if this process was killed. While it is
unknown whether the commit took effect, the session stays frozen until the agent
has asked the lease store.
"""

from __future__ import annotations

import contextlib
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
from cmdop_migrate.snapshot.capture.open_image import PendingImage
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions, CheckpointResult, chunk_counts
from cmdop_migrate.snapshot.proof import Proof
from cmdop_migrate.util import locks, trash

FREEZE_TIMEOUT = 30.0
CONNECTIONS_IN_EVENT = 64  # the result, the image and the hooks have all of them
_log = log.get("checkpoint")
Progress = Callable[[str], None]


@wait_quiet.retry_until_quiet
def checkpoint(
    this_host: Host, reference: str, options: CheckpointOptions, progress: Progress = lambda _: None
) -> CheckpointResult:
    """Checkpoint a session. When this returns the session is parked in the store, or, with `leave_running`, keeps
    running with a copy in the store. When this raises before the commit, the session keeps running here."""
    record, channel = talk.open_channel(this_host, reference)
    attempt = _Checkpoint(this_host, record, channel, options, progress)
    with hooks.after_thaw(this_host, record, attempt.hook_outcomes, lambda: not attempt.commit.handed_over), channel:
        try:
            return attempt.run()
        except HolderGone as error:
            raise ended.error_if_ended(this_host, record) or ended.ended_by_other_command(record) from error
        except CriuFailed as error:
            raise ended.error_if_ended(this_host, record) or error from None


class _Checkpoint:
    def __init__(
        self, this_host: Host, record: Record, channel: Channel, options: CheckpointOptions, progress: Progress
    ) -> None:
        self.this_host, self.record, self.channel = this_host, record, channel
        self.options, self.progress = options, progress
        self.config: Config = this_host.config
        self.group = this_host.cgroup(record.session)
        self.directory = this_host.directory(record.session)
        self.uppers = [self.directory / f"layers/{number}/upper" for number in range(len(record.layers))]
        self.images = self.directory / "dump"  # of CRIU; among holder/start.PASSING, which a sweep removes
        self.phases = resources.Phases("checkpoint")
        self.frozen_at = self.captured_at = self.stopped_at = self.printed_at = 0.0
        self.is_frozen_by_us = False  # then a failure thaws it
        self.files_bytes = self.files_count = 0
        self.no_trial_reason: str | None = None  # why a trial restore cannot be made
        self.hook_outcomes: list[dict[str, Any]] = []
        self.commit = commit.LeaseCommit(
            this_host, record, channel, self.phases, options.leave_running, options.hand_over
        )

    def run(self) -> CheckpointResult:
        """Make the checkpoint, with the session's directory locked, and with the agent restarted if it dies."""
        with self._locked(), agent_process.attended(self.config):
            return self._run()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock on the session's directory, so that no other command checkpoints or restores it. Raises
        Blocked if another command holds it."""
        folder = locks.open_directory(self.directory)
        try:
            if not locks.try_lock(folder):
                raise self._busy()
            yield
        finally:
            os.close(folder)

    def _busy(self) -> Blocked:
        return Blocked(f"session {self.record.name!r} is being checkpointed or restored already", "Wait for that.")

    def _run(self) -> CheckpointResult:
        options = self.options
        with self.phases.phase("prepare"):
            self.progress("preparing")
            criu, in_use = self._prepare()
        pending_image = open_image.start(
            self.config, self.record, self.directory, in_use, options.carry, options.leave_running, options.on_pack
        )
        try:
            closed = self._capture(criu, in_use, pending_image)
            writer, _ = pending_image.result()
            with self.phases.phase("upload"):
                self.progress("uploading")
                manifest = writer.finish(self.record.token, self._facts(criu))
            proof_result = self._prove(criu, manifest)
            with self.phases.phase("publish"):
                self._check_holder()
                writer.publish(manifest)
            if options.rounds is not None:
                options.rounds.keep(self.images, writer.previous_round)
            with self.phases.phase("commit"):
                self.commit.run(manifest)
        except BaseException as error:
            self._thaw()  # immediately; the holder would also do it when our connection ends
            open_image.abort(pending_image, error)
            raise
        finally:
            shutil.rmtree(self.images, ignore_errors=True)
        if options.leave_running:
            self.channel.ask(op="saved", checkpoint=manifest.checkpoint)
        elif self.options.hand_over is None:
            with self.phases.phase("park"):
                self._park(manifest)
        frozen = round(self.captured_at - self.frozen_at, 6)
        self.this_host.note(
            "checkpointed", self.record.session, checkpoint=manifest.checkpoint, token=manifest.token,
            frozen_s=frozen, parked=not options.leave_running, new=manifest.sizes["new"], closed=len(closed),
            memory=manifest.sizes["memory"], files=self.files_bytes, upload_s=self.phases.seconds["upload"],
            phases=self.phases.seconds, chunks=chunk_counts(manifest), connections=closed[:CONNECTIONS_IN_EVENT],
            proved=proof_result.proved, proof_skipped=proof_result.skipped,
        )  # fmt: skip
        return CheckpointResult(
            manifest,
            frozen,
            self.phases.seconds,
            closed,
            self.hook_outcomes,
            self.stopped_at,
            self.printed_at,
            proof_result,
        )

    def _prepare(self) -> tuple[Criu, files_in_use.Touched]:
        """Check what can be checked while the session still runs. Return the CRIU to use and the files in use."""
        criu = resources.find_criu(self.config)
        leases.prove(leases.open_store(self.config), self.this_host, self.record)
        mounts.check_in_place(self.record)  # first: the next check would report a moved share as an unknown mount
        self.no_trial_reason = dump_checks.check(self.group, self.record)
        self._check_room()
        syscalls.few_heaps(2)  # for some ten threads; otherwise the allocator holds another 30 MiB unused
        return criu, dump_checks.check_watches(self._files_in_use())

    def _check_room(self) -> None:
        """Raise Blocked if the disk is too small: in the worst case all of the session is spilled to this disk."""
        sizes = [walk.measure(upper) for upper in self.uppers]
        self.files_bytes = sum(size.data_bytes for size in sizes)
        self.files_count = sum(size.files for size in sizes)
        dump_checks.warn_of_devices(self.record, sizes)
        needed = inspect.rss(self.group) + self.files_bytes + (64 << 20)
        free = trash.make_room(str(self.config.state_dir), needed)
        if free < needed:
            message = f"not enough disk at {self.config.state_dir}: {units.show_size(free)} free"
            raise Blocked(f"{message}, up to {units.show_size(needed)} needed", "Free some, then checkpoint again.")

    def _files_in_use(self, before: files_in_use.Touched | None = None) -> files_in_use.Touched:
        return files_in_use.look(cgroup.pids(self.group), files_in_use.Layers(self.record.layers, self.uppers), before)

    def _capture(
        self, criu: Criu, before: files_in_use.Touched, pending_image: PendingImage
    ) -> list[dict[str, object]]:
        """Freeze the session and capture all of it into the image. Return the outside connections. CRIU calls
        `freeze_session` when it has probed the kernel, and `capture_again` if it made temporary links."""
        leftovers = ("dump",) if self.options.rounds is not None else ("dump", start.KEPT)
        start.remove_files(str(self.directory), leftovers)  # of a killed command: half a dump, or a pre-copy round
        self.images.mkdir(mode=0o700)
        frozen: dict[str, Any] = {}
        closed: list[tcp_connections.Connection] = []
        with ThreadPoolExecutor(1, "files") as pool, contextlib.ExitStack() as dumping:
            files: list[Future[list[bytes]]] = []

            def capture(in_use: files_in_use.Touched) -> None:
                writer, _ = pending_image.result()
                files.append(pool.submit(changed_files.capture, writer, self.directory, self.uppers, in_use))

            def capture_again() -> None:
                """Capture once more, with the links that CRIU removes as soon as we answer: the first walk may have
                missed them."""
                capture(self._files_in_use(before))
                files[-1].result()

            def freeze_session() -> files_in_use.Touched:
                _, collector = pending_image.result()
                starting_criu.close()
                with self.phases.phase("hooks"):
                    goal = hooks.FreezeFacts(self.options.reason, self.options.to, self.options.leave_running)
                    hooks.before_freeze(self.this_host, self.record, goal, self.hook_outcomes)
                with self.phases.phase("freeze"):
                    self.progress("freezing")
                    frozen.update(self._freeze())
                self.is_frozen_by_us = True
                dump_checks.check_frozen(self.group, self.record)
                in_use = dump_checks.check_watches(self._files_in_use(before))
                collector.add(in_use)
                with self.phases.phase("reset"):
                    closed.extend(tcp_connections.external(self.group, self.record.link is not None))
                    if not self.options.leave_running:
                        tcp_connections.reset(frozen["pid"], closed)
                capture(in_use)
                dumping.enter_context(self.phases.phase("dump"))
                self.progress("dumping")
                return in_use

            with contextlib.ExitStack() as starting_criu:
                starting_criu.enter_context(self.phases.phase("criu"))
                dump = Dump(criu, self.config, self.record, self.group, self.images, self.channel)
                dump.run(lambda: pending_image.result()[0], self.options.rounds, freeze_session, capture_again)
            dumping.close()
            frozen |= self._typeahead()
            with self.phases.phase("capture"):
                writer, collector = pending_image.result()
                changed_files.add(writer, files[-1].result())
                self._add_metadata(writer, collector, closed, frozen)
                writer.end_input()
        self.captured_at = time.monotonic()
        if self.options.leave_running:
            self.channel.ask(op="thaw")
        return [connection.to_json() for connection in closed]

    def _typeahead(self) -> dict[str, Any]:
        """Return the input that the session has not read yet, from its terminal and its holder."""
        answer = self.channel.ask(op="typeahead")
        if answer.get("error"):
            raise Blocked(
                f"session {self.record.name!r} cannot be captured: {answer['error']}", "It keeps running. Try again."
            )
        return answer

    def _freeze(self) -> dict[str, Any]:
        """Have the holder freeze the session. Raises NotIdle, Blocked or TimedOut if it refuses or cannot."""
        self.frozen_at, self.stopped_at = time.monotonic(), clock.boottime()
        idle = self.options.only_idle  # hooks may have woken the session: then only attached clients count as use
        idle = 0.0 if idle is not None and self.hook_outcomes else idle
        answer = self.channel.ask(op="freeze", only_idle=idle, timeout=FREEZE_TIMEOUT)
        if answer.get("error") == "active":
            raise NotIdle(f"session {self.record.name!r} is in use again", "It keeps running.")
        if answer.get("error") == "busy":
            raise self._busy()
        if answer.get("error") == "disk":
            message = f"the output of session {self.record.name!r} cannot be written to disk: {answer['why']}"
            raise Blocked(message, "It keeps running. Free some space where state_dir is, then checkpoint again.")
        if answer.get("error"):
            raise TimedOut(
                f"session {self.record.name!r} could not be frozen: a process of it does not stop",
                "It keeps running. A process in uninterruptible sleep (state D in `show`) is the usual cause.",
            )
        self.printed_at = float(answer.get("printed_at", 0.0))
        return answer

    def _add_metadata(
        self,
        writer: ImageWriter,
        collector: host_files.HostFileCollector,
        closed: list[tcp_connections.Connection],
        frozen: dict[str, Any],
    ) -> None:
        for path in sorted(self.images.iterdir()):
            if path.suffix == ".img":
                writer.add_blob(f"criu/{path.name}", path.read_bytes())
        writer.add_blob("output", (self.directory / "output.ring").read_bytes())
        for name, data in image_checks.read_input_journal(self.directory):
            writer.add_blob(name, data)
        typed = ("unread", "unwritten", "staged", "streams", "turn", "queued", "journal")
        terminal = {key: frozen[key] for key in (*typed, "rows", "cols")}
        writer.add_blob("affinity", json.dumps(cpu_affinity.read(cgroup.pids(self.group))).encode())
        writer.add_blob("threads", json.dumps(thread_settings.read(cgroup.pids(self.group))).encode())
        writer.add_blob("terminal", json.dumps(terminal).encode())
        writer.add_blob("connections", json.dumps([asdict(connection) for connection in closed]).encode())
        collector.finish()

    def _facts(self, criu: Criu) -> dict[str, Any]:
        return {
            "name": self.record.name,
            "host": self.record.host,
            "tag": self.options.tag,
            "record": self.record.to_json(),
            "version": __version__,
            "criu": list(criu.version),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "files_bytes": self.files_bytes,
            "live": self.options.leave_running,
            "migration": self.options.migration,
        }

    def _prove(self, criu: Criu, manifest: Manifest) -> Proof:
        """Restore the checkpoint of a park on trial. Raises CriuFailed with the cause, before anything is published."""
        options = self.options
        if options.leave_running or options.hand_over is not None:
            return Proof()  # neither the session nor the source's copy of it is ended
        if not options.prove:
            return Proof(skipped="not asked for")
        free = shutil.disk_usage(self.config.state_dir).free
        skip_reason = proof.skip_reason(self.record, self.files_count, self.files_bytes, options.deadline, free)
        if why := self.no_trial_reason or skip_reason:
            return Proof(skipped=why)
        self.progress("proving")
        try:
            with self.phases.phase("prove"):
                proof.prove(self.this_host, criu, manifest, self.record)
        except proof.ProofSkipped as skipped:
            return Proof(skipped=str(skipped))
        except CriuFailed as error:
            self.this_host.note("proof_failed", self.record.session, reason=error.message.splitlines()[0])
            words = f"session {self.record.name!r} was not parked: a trial restore of its checkpoint failed: "
            raise CriuFailed(f"{words}{error.message}", f"It keeps running. {error.hint}") from error
        return Proof(proved=True)

    def _check_holder(self) -> None:
        """Raise HolderGone if the session was ended by another command meanwhile: then there is nothing to park."""
        if self.options.leave_running:
            return
        try:
            self.channel.ask(op="status")
        except HolderGone:
            if self.options.hand_over is None or not talk.died(self.this_host, self.record):
                raise
            # The session died with its holder, but all of it is captured: what is published now is its last state.

    def _park(self, manifest: Manifest) -> None:
        """Have the holder end this incarnation. Raises Blocked if another command ended the session first."""
        try:
            self.channel.ask(op="park", checkpoint=manifest.checkpoint)
            for _ in self.channel.follow(timeout=30):
                pass
        except HolderGone:
            pass  # as expected: the incarnation has ended
        after = self.this_host.load(self.record.session)
        # With a higher token it was restored again already.
        is_done = after is not None and (after.phase == "parked" or after.token > self.record.token)
        if not is_done and not self._was_parked():
            raise Blocked(
                f"session {self.record.name!r} was ended by someone else while it was being parked",
                f"Its checkpoint is whole: cmdop-migrate restore {manifest.checkpoint[:12]} --fork NAME",
            )

    def _was_parked(self) -> bool:
        """Return whether the session is parked although its holder ended before the park request. The lease decides,
        unless a person ended the session."""
        after = talk.after_loss(self.this_host, self.record)
        if reconcile.is_doubtful(after):
            store = leases.open_store(self.config)
            with contextlib.suppress(OSError):  # on a full disk the outcome cannot be recorded
                talk.until(lambda: reconcile.ask(self.this_host, store, after), bool, ended.RECORD_SECONDS)
            after = self.this_host.load(self.record.session) or after
        return after.phase == "parked"

    def _thaw(self) -> None:
        if not self.is_frozen_by_us or self.commit.in_doubt:
            return  # in doubt the holder keeps it frozen when our connection ends
        try:
            self.channel.ask(op="thaw")
        except (HolderGone, CmdopError, OSError) as error:
            _log.warning("could not tell the holder to thaw the session: %s", error)
