"""CRIU reads a session that stands still: its memory goes to the image's writer, the rest to a directory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from cmdop_migrate.config import Config
from cmdop_migrate.criu import injected_code, page_server, request, runner
from cmdop_migrate.criu.image import files_image, watched_paths
from cmdop_migrate.criu.image.proc_directories import correct_directories
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.criu.terminal import dev_tty, owner
from cmdop_migrate.errors import CmdopError, CriuFailed
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import resources
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.model import Record
from cmdop_migrate.session.files_in_use import Touched
from cmdop_migrate.session.holder_client import Channel
from cmdop_migrate.snapshot import session_memory
from cmdop_migrate.snapshot.capture import stop_signals
from cmdop_migrate.snapshot.capture.dump_guard import DumpGuard
from cmdop_migrate.snapshot.capture.incremental import Rounds, StillMemory
from cmdop_migrate.snapshot.mounts import shared_mounts

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
        self._stops = stop_signals.Exchange(images.parent, group)

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
            owner.write(self._images, cgroup.pids(self._group))
            dev_tty.resolve(self._images, cgroup.pids(self._group))
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
        ours, theirs = page_server.channel()
        failed: list[BaseException] = []
        earlier = rounds.earlier if rounds is not None else None

        def receive(still: StillMemory | None) -> None:
            try:
                page_server.receive(ours, session_memory.Sink(writer(), earlier, still, noted), self._criu.version)
            except BaseException as error:  # noqa: BLE001 - told below, after CRIU has heard it by the closed socket
                failed.append(error)

        def on_notify(note: runner.Notification) -> None:
            if note.script == DUMPED:
                correct_directories(self._images, cgroup.pids(self._group))
            if note.script == DUMPED and files_image.has_link_remaps(self._images):
                on_link_remaps()
            if note.script != READY:
                return
            watched_paths.write(self._images, stand_still().watched.paths)
            self._stops.make()
            noted.update(injected_code.note(cgroup.pids(self._group)))
            guard.snapshot()
            if earlier is not None:
                still.append(stack.enter_context(contextlib.closing(StillMemory(cgroup.pids(self._group)))))
            receiver.start()
            stack.callback(receiver.join)

        noted: dict[int, injected_code.Code] = {}
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
                external=dev_tty.external(cgroup.pids(self._group)),
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
                    error = resources.keep_log(error, self._images, self._config, "dump", self._record.session)
                raise own or error from error
            finally:
                theirs.close()
                watched_paths.remove(self._images)
            guard.mend_images(self._images)
        if failed:
            raise failed[0]
        if receiver.ident is None:
            raise CriuFailed("the dump failed: CRIU never said that it begins", "See: cmdop-migrate doctor")
