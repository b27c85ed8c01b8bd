"""Restore a session's process tree from an image, up to its first instruction.

This is shared by a restore (restore_session.py), which then lets the tree run
under a lease, and by the trial restore of a checkpoint (snapshot/proof.py), which ends
the tree there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cmdop_migrate.criu import request, runner
from cmdop_migrate.criu.failures import diagnosis
from cmdop_migrate.criu.image import files_image, reservations
from cmdop_migrate.criu.image.timerfds import correct_timers
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.criu.lazy.pager import Pager
from cmdop_migrate.criu.terminal import controlling_tty
from cmdop_migrate.errors import CriuFailed
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import resources
from cmdop_migrate.host.holder_order import holder_order
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.files import file_table, stat_cache, unpack
from cmdop_migrate.images.read.reader import Image
from cmdop_migrate.model import Link, Record
from cmdop_migrate.session import network
from cmdop_migrate.session.spawn_holder import Starter, make_stores, overlays
from cmdop_migrate.snapshot import host_files, image_checks, session_memory
from cmdop_migrate.snapshot.mounts import shared_mounts
from cmdop_migrate.util.timings import Phases

CRIU_TIMEOUT = 600.0


class StartingHolder(NamedTuple):
    """Hold a holder process that is being started, and our end of the socket of its CRIU."""

    starter: Starter
    worker: socket.socket


class ProcessTreeRestore:
    """Restore one process tree from one image, in the directory and cgroup of `record`."""

    timeout = CRIU_TIMEOUT  # seconds CRIU may take
    # Let CRIU inherit our end of its socket too, so that it never sees end of file: it would let the tree run then.
    never_hangs_up = False

    def __init__(
        self, this_host: Host, phases: Phases, criu: Criu, image: Image, record: Record, directory: Path, lock: int
    ) -> None:
        self.this_host, self.config, self.phases = this_host, this_host.config, phases
        self.criu, self.image, self.record = criu, image, record
        self.directory, self.lock = directory, lock
        self.images = directory / "images"
        self.group = this_host.cgroup(record.session)
        self.terminal = image_checks.terminal(image)
        self.before: Link | None = image_checks.record(image.manifest).link
        self.installed_files = host_files.InstalledFiles()
        self.adopted = False
        self.pid = 0

    def _before_first_instruction(
        self, starter: Starter, masters: list[int], pager: Pager | None, waiting: set[int]
    ) -> None:
        """Act on the complete tree, which has not run yet. An error raised here ends the tree."""
        raise NotImplementedError

    def _extra_order(self) -> dict[str, Any]:
        """Return the fields of the holder's order beyond those of `holder_order`."""
        return {"carried": self.terminal["carried"]}

    def _mounts(self) -> tuple[request.SharedMount, ...]:
        """Return the mounts that CRIU must take over instead of creating them."""
        return shared_mounts(self.record, str(self.directory / "root"))

    def _unpack_files(self, allow_devices: bool = False, accept_files: bool = False) -> None:
        """Unpack the session's own files into empty layers, and install the host files that this host lacks."""
        points = list(self.record.layers)
        layers = overlays(points)
        make_stores(self.directory, layers)
        uppers = [self.directory / layer["store"] / "upper" for layer in layers]
        captured = image_checks.record(self.image.manifest).layers
        for number, upper in enumerate(uppers[: len(captured)]):
            data = image_checks.blob(self.image, f"files/{number}")
            table = file_table.parse(data)
            stats = unpack.restore(table, self.image, upper, allow_devices=allow_devices)
            (self.directory / f"files-{number}.table").write_bytes(data)
            (self.directory / f"files-{number}.stats").write_bytes(stat_cache.serialise(table, stats))
        self.installed_files = host_files.install(self.image, self.config.state_dir, points, uppers, accept_files)

    def _write_images(self, source: session_memory.MemorySource, lazy: bool) -> None:
        """Write CRIU's images and all memory; with `lazy` only the memory that cannot be served while the tree runs."""
        shutil.rmtree(self.images, ignore_errors=True)
        self.images.mkdir(mode=0o700)
        for name in self.image.manifest.blobs:
            if name.startswith("criu/"):
                (self.images / os.path.basename(name)).write_bytes(self.image.blob(name))
        correct_timers(self.images)
        if self._is_locked():
            (namespace,) = self.images.glob("netns-*.img")
            with open(self.images / namespace.name.replace("netns", "nftables"), "ab") as rules:
                rules.write(network.LOCK.encode())
        if self.installed_files.accepted_files:
            files_image.skip_comparison(self.images, self.installed_files.accepted_files)
        reservations.unreserve(self.images)
        source.write_pages(self.images, lazy)

    def _is_locked(self) -> bool:
        """Return whether the session's network must drop all packets until the tree is complete.

        Connections inside the session are restored one end at a time; a packet that arrives before the other end
        exists would reset the connection."""
        has_streams = any(name.startswith("criu/tcp-stream-") for name in self.image.manifest.blobs)
        return self.record.link is not None and has_streams and len(list(self.images.glob("netns-*.img"))) == 1

    @contextlib.contextmanager
    def _holder(self, fresh_until: float) -> Iterator[StartingHolder]:
        """Start a holder and, as its child, CRIU, after the files are unpacked. Unless the holder has adopted the
        session by the end of the block, both are ended and no process of the tree is left."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = holder_order(self.config, self.this_host, self.record) | {
            "mode": "restore",
            "fresh_until": fresh_until,
            "worker": list(self.criu.argv),
            "worker_fd": theirs.fileno(),
            **self._extra_order(),
        }
        with ours:
            with theirs, self.phases.phase("holder"):
                log_file = self.config.log_file.with_name("holder.log")
                kept = (theirs.fileno(), ours.fileno()) if self.never_hangs_up else (theirs.fileno(),)
                starter = Starter(order, self.lock, log_file, *kept)
            try:
                yield StartingHolder(starter, ours)
            finally:
                if not self.adopted:
                    self._abandon(starter)

    def _abandon(self, starter: Starter) -> None:
        """End the tree and its holder. No process of the tree is left when this returns, even if the holder died."""
        starter.abandon()
        cgroup.remove(self.group)

    def _converse(
        self, sock: socket.socket, starter: Starter, criu: int, pager: Pager | None, waiting: set[int]
    ) -> None:
        """Have CRIU restore the tree. `waiting` lists the processes whose memory comes from the pager."""
        masters: list[int] = []
        terminals = controlling_tty.Restoration(self.images)

        def on_notify(notification: runner.Notification) -> bool:
            masters.extend(notification.fds)
            if notification.pid:
                self.pid = notification.pid
            terminals.on_notify(notification.script, self.pid)
            if notification.script == "pre-resume":
                self._before_first_instruction(starter, masters, pager, waiting)
            return True

        directory = os.open(self.images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            spec = request.RestoreSpec(
                images_dir_fd=directory,
                work_dir_fd=directory,
                root=str(self.directory / "root"),
                veths=((network.INSIDE, self.record.link.veth),) if self.record.link else (),
                shared=self._mounts(),
                lazy_pages=pager is not None,
                sibling=not terminals.is_possible,
            )
            response = runner.converse(sock, request.restore(spec), on_notify, self.timeout, criu)
        except (runner.HungUp, FileNotFoundError, ProcessLookupError):  # the latter two: of the tree that died with it
            raise self._failure("the restore failed: CRIU died") from None
        finally:
            os.close(directory)
        if not response.success:
            raise self._failure("the restore failed", response.errmsg)
        for fd in response.fds:
            os.close(fd)
        terminals.finish(self.pid)

    def _failure(self, what: str, message: str = "") -> CriuFailed:
        error = diagnosis.failure(what, self.images / "restore.log", message)
        return resources.keep_log(error, self.images, self.config, "restore", self.record.session)
