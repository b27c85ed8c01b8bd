"""Bring a session back from the store.

    choose    which checkpoint; not one whose session runs
    fetch     all of it, sealed, every byte verified; with --lazy only what is needed to begin
    files     the session's own files, and those of its old host that this one lacks
    restore   CRIU makes the tree anew, as the holder's child; it stands still before its first instruction
    adopt     the holder has terminal, inputs and cgroup: only now may it run          ── running
    memory    pages come behind it, on demand first

A failure before `adopt` leaves the checkpoint as it was and this machine clean.
One after it, while memory is still coming, ends the incarnation: it never runs
on with a page missing.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cmdop_migrate import clock, log
from cmdop_migrate.criu import logs, pages, provide, request, runner
from cmdop_migrate.criu.lazy import LazyPages, State
from cmdop_migrate.criu.provide import Criu
from cmdop_migrate.errors import Blocked, CriuFailed, ImageRefused, Unexpected, Unreachable
from cmdop_migrate.flows import background, carry, choose, memory, tools
from cmdop_migrate.flows.checkpoint import shared_mounts
from cmdop_migrate.flows.run import holder_order
from cmdop_migrate.images import filerestore, filestats, filetable, reader
from cmdop_migrate.images.reader import Image
from cmdop_migrate.model import Link, Record, new_session_id, session_name
from cmdop_migrate.session import cgroup, connections, network
from cmdop_migrate.session.records import Records
from cmdop_migrate.session.start import Starter, make_stores, overlays

CRIU_TIMEOUT = 600.0
EAGER_BELOW = 32 << 20  # so little memory is laid out as fast as it is served
_log = log.get("restore")


@dataclass(frozen=True)
class Wanted:
    fork: str | None = None
    lazy: bool = False
    allow_devices: bool = False


def restore(
    records: Records, reference: str | None, wanted: Wanted, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """What `restore --json` answers, once the session runs and, unless lazy, has all its memory."""
    return background.run(lambda say, answer: _Restore(records, reference, wanted, say, answer).run(), progress)


class _Restore:
    """Runs in a process of its own, so that nobody's Ctrl-C ends it between two pages."""

    def __init__(
        self,
        records: Records,
        reference: str | None,
        wanted: Wanted,
        say: background.Progress,
        answer: background.Answer,
    ) -> None:
        self.records, self.config = records, records.config
        self.reference, self.wanted = reference, wanted
        self.say, self.answer = say, answer
        self.phases = tools.Phases()
        self.began = clock.boottime()

    def run(self) -> None:
        criu = tools.find_criu(self.config)
        store, ring = tools.open_store(self.config), tools.open_keys(self.config)
        with self.phases.phase("choose"):
            chosen = choose.choose(self.records, store, ring, self.reference)
            if self.wanted.fork is None:
                choose.not_running(chosen)
        record = self._record(chosen)
        if record.link is not None:
            # It loads while we fetch; else the restored tree would stand and wait for it.
            threading.Thread(target=network.prepare, name="network", daemon=True).start()
        directory = self.records.directory(record.session)
        lock = self.records.claim_parked(record)
        try:
            image_dir = directory / "image"
            shutil.rmtree(image_dir, ignore_errors=True)
            with self.phases.phase("fetch"):
                self.say("fetching")
                checkpoint = chosen.manifest.checkpoint
                if self.wanted.lazy:
                    image = reader.fetch_lazy(store, ring, checkpoint, image_dir, self._stalled)
                else:
                    image = reader.fetch(store, ring, checkpoint, image_dir)
            try:
                _Incarnation(self, criu, image, record, directory, lock).run()
            finally:
                image.close()
        finally:
            os.close(lock)
            self.records.sweep()

    def _record(self, chosen: choose.Chosen) -> Record:
        """The record the restored session will have."""
        manifest = chosen.manifest
        token = max(manifest.token, chosen.record.token if chosen.record else 0) + 1
        try:
            before = Record.from_json(manifest.facts["record"])
        except (KeyError, TypeError, ValueError) as error:
            raise ImageRefused(
                f"the image does not say what session it is of: {error}", "Was it made by a newer version?"
            ) from error
        link = before.link
        if link is not None and network.exists(link):
            link = network.choose(self.config.subnet)
        kept = replace(
            before,
            host=self.config.host,
            phase="live",
            checkpoint=manifest.checkpoint,
            token=token,
            link=link,
            exit=None,
            pid=None,
        )
        if self.wanted.fork is None:
            return kept
        return replace(
            kept,
            session=new_session_id(),
            name=session_name(self.wanted.fork),
            token=1,
            parent=manifest.session,
            created=clock.walltime(),
        )

    def _stalled(self, seconds: float, error: Unreachable) -> None:
        self.say(f"waiting for the store since {seconds:.0f} s: {error.message}")
        _log.warning("the store is away since %.0f s: %s", seconds, error.message)


class _Incarnation:
    """From a verified image to a running session."""

    def __init__(self, parent: _Restore, criu: Criu, image: Image, record: Record, directory: Path, lock: int) -> None:
        self.parent, self.criu, self.image, self.record = parent, criu, image, record
        self.directory, self.lock = directory, lock
        self.records, self.config, self.phases = parent.records, parent.config, parent.phases
        self.images = directory / "images"
        self.group = self.records.cgroup(record.session)
        self.terminal: dict[str, Any] = json.loads(image.blob("terminal"))
        self.before: Link | None = Record.from_json(image.manifest.facts["record"]).link
        self.carried: list[str] = []
        self.pid = 0
        self.lost: CriuFailed | None = None

    def run(self) -> None:
        with self.phases.phase("files"):
            self.parent.say("files")
            self._lay_files()
        source = memory.Source(self.image)
        lazy = self._is_lazy()
        with self.phases.phase("images"):
            self._lay_images(source, lazy)
        if lazy:
            self._run_lazily(source)
        else:
            self._run(None, None)
            self._say_done()

    def _is_lazy(self) -> bool:
        if self.image.manifest.sizes["memory"] <= EAGER_BELOW and not self.parent.wanted.lazy:
            return False
        return "uffd-noncoop" in provide.features(self.criu, ("uffd-noncoop",))

    def _lay_files(self) -> None:
        points = list(self.record.layers)
        layers = overlays(points)
        make_stores(self.directory, layers)
        uppers = [self.directory / layer["store"] / "upper" for layer in layers]
        for number, upper in enumerate(uppers):
            data = self.image.blob(f"files/{number}")
            table = filetable.parse(data)
            stats = filerestore.restore(table, self.image, upper, allow_devices=self.parent.wanted.allow_devices)
            (self.directory / f"files-{number}.table").write_bytes(data)
            (self.directory / f"files-{number}.stats").write_bytes(filestats.serialise(table, stats))
        self.carried = carry.bring(self.image, self.config.state_dir, points, uppers)
        for name, blob in (("output.ring", "output"), ("inputs.jsonl", "inputs")):
            (self.directory / name).write_bytes(self.image.blob(blob))

    def _lay_images(self, source: memory.Source, lazy: bool) -> None:
        shutil.rmtree(self.images, ignore_errors=True)
        self.images.mkdir(mode=0o700)
        for name in self.image.manifest.blobs:
            if name.startswith("criu/"):
                (self.images / name.removeprefix("criu/")).write_bytes(self.image.blob(name))
        source.lay_out(self.images, lazy)

    def _run_lazily(self, source: memory.Source) -> None:
        ours, theirs = socket.socketpair()
        copy = os.dup(ours.fileno())
        with LazyPages.start(self.criu.argv, self.images, theirs) as daemon:
            server = threading.Thread(target=self._serve, args=(ours, source), name="pages", daemon=True)
            server.start()
            try:
                starter = self._run(daemon, copy)
            finally:
                os.close(copy)
            if self.parent.wanted.lazy:
                self._say_done()
            with self.phases.phase("memory"):
                state = daemon.guard(self._on_lost)
            if state is State.FINISHED:
                self._remove_copies()  # before "complete": after it the next checkpoint may use the same directory
                starter.control.send(b"complete")
            starter.close()
        if self.lost is not None:
            raise self.lost
        self.records.events.emit("memory_complete", self.record.session, seconds=self.phases.seconds["memory"])
        if not self.parent.wanted.lazy:
            self._say_done()

    def _remove_copies(self) -> None:
        """All memory is in place: nothing of the image is needed on this disk any more."""
        shutil.rmtree(self.images, ignore_errors=True)
        shutil.rmtree(self.directory / "image", ignore_errors=True)

    def _serve(self, sock: socket.socket, source: memory.Source) -> None:
        try:
            pages.serve(sock, source, self.criu.version, self._on_source_failed)
        except Exception:  # noqa: BLE001 - a supervising thread: the session was stopped before this was raised
            _log.error("serving memory failed", exc_info=True)

    def _on_source_failed(self, error: BaseException) -> None:
        _log.error("memory cannot be served: %s; the session is ended", error)
        cgroup.kill(self.group)

    def _on_lost(self, error: CriuFailed) -> None:
        cgroup.kill(self.group)
        self.lost = error

    def _run(self, daemon: LazyPages | None, page_socket: int | None) -> Starter:
        self.parent.say("restoring")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = holder_order(self.config, self.records, self.record) | {
            "mode": "restore",
            "worker": list(self.criu.argv),
            "worker_fd": theirs.fileno(),
        }
        with ours:
            with theirs, self.phases.phase("holder"):
                starter = Starter(order, self.lock, self.config.log_file.with_name("holder.log"), theirs.fileno())
            try:
                starter.expect()
                with self.phases.phase("restore"):
                    self._converse(ours, starter, daemon, page_socket)
                if daemon is None:
                    self._remove_copies()
                starter.control.send(b"resumed")
                starter.expect()
            except BaseException:
                starter.abandon()
                raise
        if page_socket is None:
            starter.close()
        return starter

    def _converse(
        self, sock: socket.socket, starter: Starter, daemon: LazyPages | None, page_socket: int | None
    ) -> None:
        masters: list[int] = []

        def on_notify(notification: runner.Notification) -> bool:
            masters.extend(notification.fds)
            if notification.pid:
                self.pid = notification.pid
            if notification.script == "pre-resume":
                self._before_first_instruction(starter, masters, daemon, page_socket)
            return True

        directory = os.open(self.images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            spec = request.RestoreSpec(
                images_dir_fd=directory,
                work_dir_fd=directory,
                root=str(self.directory / "root"),
                veths=((network.INSIDE, self.record.link.veth),) if self.record.link else (),
                shared=shared_mounts(self.record, str(self.directory / "root")),
                lazy_pages=daemon is not None,
            )
            response = runner.converse(sock, request.restore(spec), on_notify, CRIU_TIMEOUT)
        except runner.HungUp:
            raise logs.failure("the restore failed: CRIU died", self.images / "restore.log") from None
        finally:
            os.close(directory)
        if not response.success:
            raise logs.failure("the restore failed", self.images / "restore.log", response.errmsg)
        for fd in response.fds:
            os.close(fd)

    def _before_first_instruction(
        self, starter: Starter, masters: list[int], daemon: LazyPages | None, page_socket: int | None
    ) -> None:
        """The tree is there and stands still: network, old connections, the holder. Raising here ends it."""
        if not masters or not self.pid:
            raise Unexpected("CRIU did not hand over the session's terminal", "See its log.")
        if self.record.link is not None and self.before is not None:
            network.reconnect(self.pid, self.before, self.record.link, self.config.subnet)
        if self.image.manifest.facts.get("live"):
            rows = json.loads(self.image.blob("connections"))
            connections.reset(self.pid, [connections.Connection(**row) for row in rows])
        if daemon is not None and not daemon.secure():
            raise Blocked("memory cannot be served", "See the log.")
        message = {"pid": self.pid, "unread": self.terminal["unread"], "unwritten": self.terminal["unwritten"]}
        fds = [masters[0]] if page_socket is None else [masters[0], page_socket]
        socket.send_fds(starter.control, [json.dumps(message).encode()], fds)
        starter.expect()

    def _say_done(self) -> None:
        manifest = self.image.manifest
        self.records.events.emit(
            "restored", self.record.session, checkpoint=manifest.checkpoint, token=self.record.token,
            name=self.record.name, parent=self.record.parent, phases=self.phases.seconds, carried=len(self.carried),
        )  # fmt: skip
        self.parent.answer(
            {
                "session": self.record.session,
                "name": self.record.name,
                "host": self.record.host,
                "token": self.record.token,
                "checkpoint": manifest.checkpoint,
                "phases": self.phases.seconds,
                "pid": self.pid,
                "parent": self.record.parent,
                "carried": self.carried,
                "took_s": round(clock.boottime() - self.parent.began, 6),
            }
        )
