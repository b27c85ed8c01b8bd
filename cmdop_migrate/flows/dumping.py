"""CRIU reads a session that stands still: its memory goes to the image's writer, the rest to a directory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from cmdop_migrate.config import Config
from cmdop_migrate.criu import pages, request, runner
from cmdop_migrate.criu.provide import Criu
from cmdop_migrate.errors import CmdopError, CriuFailed
from cmdop_migrate.flows import memory, tools
from cmdop_migrate.flows.mounts import shared_mounts
from cmdop_migrate.flows.rounds import Rounds, StillMemory
from cmdop_migrate.images.writer import ImageWriter
from cmdop_migrate.model import Record
from cmdop_migrate.session import cgroup
from cmdop_migrate.session.channel import Channel
from cmdop_migrate.session.touched import Touched

CRIU_TIMEOUT = 600.0


class Dump:
    """CRIU thaws the group as soon as it has all of it in its hands, to run code of its own in there, and freezes it
    again as it leaves, however that comes about. So `channel`, with which it was frozen, is CRIU's too: only when both
    of us are gone the holder thaws it."""

    def __init__(self, criu: Criu, config: Config, record: Record, group: str, images: Path, channel: Channel) -> None:
        self._criu, self._config, self._record = criu, config, record
        self._group, self._images, self._channel = group, images, channel

    def run(self, writer: ImageWriter, pid: int, found: Touched, rounds: Rounds | None) -> None:
        ours, theirs = pages.channel()
        failed: list[BaseException] = []
        earlier = rounds.earlier if rounds is not None else None
        still = StillMemory(cgroup.pids(self._group)) if earlier is not None else None

        def receive() -> None:
            try:
                pages.receive(ours, memory.Sink(writer, earlier, still), self._criu.version)
            except BaseException as error:  # noqa: BLE001 - told below, after CRIU has heard it by the closed socket
                failed.append(error)

        receiver = threading.Thread(target=receive, name="pages")
        directory = os.open(self._images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            spec = request.DumpSpec(
                pid=pid,
                images_dir_fd=directory,
                root="/",
                freeze_cgroup=self._group,
                leave_running=True,  # it stays frozen by its cgroup, until the checkpoint is safe in the store
                pages_fd=theirs.fileno(),
                track=rounds is not None,
                parent=rounds.parent if rounds is not None else None,
                shared=shared_mounts(self._record, ""),
                irmap_scan_paths=tuple(sorted(found.watches, key=len, reverse=True)),  # inner ones first
            )
            receiver.start()
            runner.run(
                self._criu.argv,
                request.dump(spec),
                self._images / "dump.log",
                what="the dump failed",
                pass_fds=(theirs.fileno(), self._channel.fileno()),
                on_cancel=theirs.close,
                timeout=CRIU_TIMEOUT,
            )
        except CmdopError as error:
            theirs.close()
            receiver.join()
            own = next((one for one in failed if isinstance(one, CmdopError)), None)
            if isinstance(error, CriuFailed):
                error = tools.keep_log(error, self._images, self._config, "dump")
            raise own or error from error
        finally:
            theirs.close()
            os.close(directory)
            receiver.join()
            if still is not None:
                still.close()
        if failed:
            raise failed[0]
