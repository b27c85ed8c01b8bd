"""CRIU reads a session that stands still: its memory goes to the image's writer, the rest to a directory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from cmdop_migrate.config import Config
from cmdop_migrate.criu import devtty, injected, irmap, openfiles, pages, request, runner, ttyowner
from cmdop_migrate.criu.procdirs import correct_directories
from cmdop_migrate.criu.provide import Criu
from cmdop_migrate.errors import CmdopError, CriuFailed
from cmdop_migrate.flows import memory, stopsignals, tools
from cmdop_migrate.flows.guards import DumpGuard
from cmdop_migrate.flows.mounts import shared_mounts
from cmdop_migrate.flows.rounds import Rounds, StillMemory
from cmdop_migrate.images.writer import ImageWriter
from cmdop_migrate.model import Record
from cmdop_migrate.session import cgroup
from cmdop_migrate.session.channel import Channel
from cmdop_migrate.session.touched import Touched

CRIU_TIMEOUT = 600.0
READY = "pre-dump"  # CRIU's word for it: nothing of the session was looked at yet
DUMPED = "post-dump"  # all images are written, the temporary links are still there


class Dump:
    """CRIU needs a while to look at the kernel before it looks at the session: it is stood still when that is over.

    CRIU thaws the group as soon as it has all of it in its hands, to run code of its own in there, and freezes it
    again as it leaves, however that comes about. So `channel`, with which it was frozen, is CRIU's too: only when both
    of us are gone the holder thaws it."""

    def __init__(self, criu: Criu, config: Config, record: Record, group: str, images: Path, channel: Channel) -> None:
        self._criu, self._config, self._record = criu, config, record
        self._group, self._images, self._channel = group, images, channel
        self._stops = stopsignals.Exchange(images.parent, group)

    def run(
        self,
        writer: Callable[[], ImageWriter],
        rounds: Rounds | None,
        stand_still: Callable[[], Touched],
        on_link_remaps: Callable[[], None],
    ) -> None:
        """Dump the session. `stand_still` freezes it and returns what it has open; what it raises is raised here, and
        nothing was dumped. `writer` is not called before that. `on_link_remaps` is called while CRIU keeps temporary
        links in the session's files, and only if it made any (openfiles.has_link_remaps)."""
        try:
            self._dump(writer, rounds, stand_still, on_link_remaps)
            ttyowner.write(self._images, cgroup.pids(self._group))
            devtty.resolve(self._images, cgroup.pids(self._group))
            self._stops.write(self._images)
        finally:
            self._stops.undo()  # also when the dump failed

    def _dump(
        self,
        writer: Callable[[], ImageWriter],
        rounds: Rounds | None,
        stand_still: Callable[[], Touched],
        on_link_remaps: Callable[[], None],
    ) -> None:
        ours, theirs = pages.channel()
        failed: list[BaseException] = []
        earlier = rounds.earlier if rounds is not None else None

        def receive(still: StillMemory | None) -> None:
            try:
                pages.receive(ours, memory.Sink(writer(), earlier, still, noted), self._criu.version)
            except BaseException as error:  # noqa: BLE001 - told below, after CRIU has heard it by the closed socket
                failed.append(error)

        def on_notify(note: runner.Notification) -> None:
            if note.script == DUMPED:
                correct_directories(self._images, cgroup.pids(self._group))
            if note.script == DUMPED and openfiles.has_link_remaps(self._images):
                on_link_remaps()
            if note.script != READY:
                return
            irmap.write(self._images, stand_still().watched.paths)
            self._stops.make()
            noted.update(injected.note(cgroup.pids(self._group)))
            guard.snapshot()
            if earlier is not None:
                still.append(stack.enter_context(contextlib.closing(StillMemory(cgroup.pids(self._group)))))
            receiver.start()
            stack.callback(receiver.join)

        noted: dict[int, injected.Code] = {}
        still: list[StillMemory] = []
        receiver = threading.Thread(target=lambda: receive(still[0] if still else None), name="pages")
        directory = os.open(self._images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, directory)
            guard = stack.enter_context(DumpGuard(self._group, self._channel))
            spec = request.DumpSpec(
                pid=self._record.pid or 0,
                images_dir_fd=directory,
                root="/",
                freeze_cgroup=self._group,
                leave_running=True,  # it stays frozen by its cgroup, until the checkpoint is safe in the store
                pages_fd=theirs.fileno(),
                track=rounds is not None,
                parent=rounds.parent if rounds is not None else None,
                shared=shared_mounts(self._record, ""),
                external=devtty.external(cgroup.pids(self._group)),
            )
            try:
                runner.run(
                    self._criu.argv,
                    request.dump(spec),
                    self._images / "dump.log",
                    what="the dump failed",
                    pass_fds=(theirs.fileno(), self._channel.fileno()),
                    on_notify=on_notify,
                    on_cancel=theirs.close,
                    on_spawn=guard.start,
                    on_stuck=guard.end,
                    timeout=CRIU_TIMEOUT,
                )
            except CmdopError as error:
                theirs.close()
                stack.close()
                own = next((one for one in failed if isinstance(one, CmdopError)), None)
                if isinstance(error, CriuFailed):
                    error = tools.keep_log(error, self._images, self._config, "dump", self._record.session)
                raise own or error from error
            finally:
                theirs.close()
                irmap.remove(self._images)
            guard.mend_images(self._images)
        if failed:
            raise failed[0]
        if receiver.ident is None:
            raise CriuFailed("the dump failed: CRIU never said that it begins", "See: cmdop-migrate doctor")
