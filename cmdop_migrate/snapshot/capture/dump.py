"""Run a CRIU dump of a frozen session: its memory goes to the image's writer, the rest to a directory."""

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
from cmdop_migrate.snapshot.capture.incremental import FrozenMemory, PreCopyRounds
from cmdop_migrate.snapshot.mounts import shared_mounts

CRIU_TIMEOUT = 600.0
READY = "pre-dump"  # CRIU's notification before it looks at the session
DUMPED = "post-dump"  # all images are written, CRIU's temporary links still exist


class Dump:
    """Dump one session. CRIU probes the kernel before it looks at the session, so the session is frozen only after
    that.

    CRIU thaws the cgroup once it has seized all its processes, to run injected code in them, and freezes it again when
    it ends, also after a failure. Therefore CRIU inherits `channel`, the connection with which the session was frozen:
    the holder thaws the session only when both this process and CRIU are gone."""

    def __init__(self, criu: Criu, config: Config, record: Record, group: str, images: Path, channel: Channel) -> None:
        self._criu, self._config, self._record = criu, config, record
        self._group, self._images, self._channel = group, images, channel
        self._stops = stop_signals.StopSignalExchange(images.parent, group)

    def run(
        self,
        writer: Callable[[], ImageWriter],
        rounds: PreCopyRounds | None,
        freeze_session: Callable[[], Touched],
        on_link_remaps: Callable[[], None],
    ) -> None:
        """Dump the session. `freeze_session` freezes it and returns what it has open; an error it raises is raised
        here, and nothing was dumped. `writer` is not called before that. `on_link_remaps` is called while CRIU keeps
        temporary links in the session's files, and only if it made any (files_image.has_link_remaps)."""
        try:
            self._dump(writer, rounds, freeze_session, on_link_remaps)
            owner.write(self._images, cgroup.pids(self._group))
            dev_tty.resolve(self._images, cgroup.pids(self._group))
            self._stops.write(self._images)
        finally:
            self._stops.undo()  # also when the dump failed

    def _dump(
        self,
        writer: Callable[[], ImageWriter],
        rounds: PreCopyRounds | None,
        freeze_session: Callable[[], Touched],
        on_link_remaps: Callable[[], None],
    ) -> None:
        ours, theirs = page_server.channel()
        failures: list[BaseException] = []
        earlier = rounds.earlier if rounds is not None else None

        def receive(frozen_memory: FrozenMemory | None) -> None:
            try:
                sink = session_memory.MemorySink(writer(), earlier, frozen_memory, injected)
                page_server.receive(ours, sink, self._criu.version)
            except BaseException as error:  # noqa: BLE001 - raised below, after the closed socket has ended CRIU
                failures.append(error)

        def on_notify(notification: runner.Notification) -> None:
            if notification.script == DUMPED:
                correct_directories(self._images, cgroup.pids(self._group))
            if notification.script == DUMPED and files_image.has_link_remaps(self._images):
                on_link_remaps()
            if notification.script != READY:
                return
            watched_paths.write(self._images, freeze_session().watched.paths)
            self._stops.make()
            injected.update(injected_code.note(cgroup.pids(self._group)))
            guard.snapshot()
            if earlier is not None:
                frozen_memory.append(stack.enter_context(contextlib.closing(FrozenMemory(cgroup.pids(self._group)))))
            receiver.start()
            stack.callback(receiver.join)

        injected: dict[int, injected_code.Code] = {}
        frozen_memory: list[FrozenMemory] = []
        receiver = threading.Thread(target=lambda: receive(frozen_memory[0] if frozen_memory else None), name="pages")
        directory = os.open(self._images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, directory)
            guard = stack.enter_context(DumpGuard(self._group, self._channel))
            spec = request.DumpSpec(
                pid=self._record.pid or 0,
                images_dir_fd=directory,
                root="/",
                freeze_cgroup=self._group,
                leave_running=True,  # its cgroup stays frozen until the checkpoint is safe in the store
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
                cause = next((failure for failure in failures if isinstance(failure, CmdopError)), None)
                if isinstance(error, CriuFailed):
                    error = resources.keep_log(error, self._images, self._config, "dump", self._record.session)
                raise cause or error from error
            finally:
                theirs.close()
                watched_paths.remove(self._images)
            guard.mend_images(self._images)
        if failures:
            raise failures[0]
        if receiver.ident is None:
            raise CriuFailed("the dump failed: CRIU sent no pre-dump notification", "See: cmdop-migrate doctor")
