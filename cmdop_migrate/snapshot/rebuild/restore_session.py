"""Restore one session from a verified image: its files, its process tree, its holder, then its memory."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from cmdop_migrate import clock, log
from cmdop_migrate.criu.image import eventfds
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.criu.lazy import userfaultfd
from cmdop_migrate.criu.lazy.pager import Filler, Pager
from cmdop_migrate.errors import CmdopError, Unexpected
from cmdop_migrate.holder import cgroup, start
from cmdop_migrate.host import hooks, leases, talk
from cmdop_migrate.host.hooks import HookOutcome
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.read.reader import Image
from cmdop_migrate.lease.rules import Lost
from cmdop_migrate.lease.store import Held, LeaseStore
from cmdop_migrate.model import Record
from cmdop_migrate.session import cpu_affinity, network, tcp_connections, thread_settings
from cmdop_migrate.session.spawn_holder import Starter
from cmdop_migrate.snapshot import image_checks, session_memory
from cmdop_migrate.snapshot.rebuild import adoption, decode_workers
from cmdop_migrate.snapshot.rebuild.process_tree import ProcessTreeRestore, StartingHolder
from cmdop_migrate.snapshot.restore_options import RestoreOptions, RestoreResult
from cmdop_migrate.util import limits
from cmdop_migrate.util.timings import Phases

HOLDER_TIMEOUT = 5.0
OPEN_FILES = 1 << 16
PREFETCH_FILES_ABOVE = 16 << 20  # bytes: more files than this are fetched together before they are unpacked one by one
EAGER_MEMORY_BELOW = 32 << 20  # bytes: less memory than this is written as fast as a pager would serve it
_log = log.get("restore")


class RestoreContext(Protocol):
    """Describe the command that restores: its options, and where it takes progress and result."""

    this_host: Host
    options: RestoreOptions
    phases: Phases
    began: float
    session: str
    stall_note: Path | None
    say: Callable[[str], None]
    answer: Callable[[RestoreResult], None]


class SessionRestore(ProcessTreeRestore):
    """Restore a session from a verified image until it runs and has all its memory."""

    def __init__(
        self,
        context: RestoreContext,
        criu: Criu,
        image: Image,
        record: Record,
        directory: Path,
        lock: int,
        host_leases: LeaseStore,
        lease: Held,
    ) -> None:
        super().__init__(context.this_host, context.phases, criu, image, record, directory, lock)
        self.context, self.leases, self.lease = context, host_leases, lease
        self.runs_from = 0.0
        self.deadline = adoption.AdoptionDeadline(record.name, self.group)
        self.closed_connections = [connection.to_json() for connection in image_checks.outside_connections(image)]
        self.starter: Starter | None = None  # set once the session runs: the holder must be told if memory is lost
        self.lost: BaseException | None = None
        self.hook_outcomes: list[HookOutcome] = []

    def run(self) -> None:
        """Restore the session. The result is passed to the context as soon as the session runs and, unless the restore
        is lazy, has all its memory; a lazy restore returns only when all memory has arrived."""
        lazy = self._is_lazy()
        if self.context.options.lazy and (not lazy or self.image.manifest.facts["files_bytes"] > PREFETCH_FILES_ABOVE):
            # Otherwise this starts once the session runs: until then the processors are CRIU's.
            self.image.bring_rest()
        with self.phases.phase("files"):
            self.context.say("files")
            self._unpack_files(self.context.options.allow_devices, self.context.options.accept_files)
            (self.directory / "output.ring").write_bytes(image_checks.blob(self.image, "output"))
            image_checks.write_input_journal(self.image, self.directory)
        source = session_memory.MemorySource(self.image)
        with self._holder(self.lease.fresh_until) as holder:  # it starts, and starts CRIU, while we write the images
            with self.phases.phase("images"):
                self._write_images(source, lazy)
            if lazy:
                self._run_lazily(source, holder)
            else:
                self._run(holder, None, set())
                self._run_hooks()
                self._report_restored()

    def _extra_order(self) -> dict[str, Any]:
        return {"carried": self.terminal["carried"] | ({"turn": None} if self.context.options.fork else {})}

    def _remove_images(self) -> None:
        """Delete the unpacked images, which contain plaintext memory, once the session runs."""
        start.remove_files(str(self.directory), ("image", "images"))

    def _is_lazy(self) -> bool:
        is_small = self.image.manifest.sizes["memory"] <= EAGER_MEMORY_BELOW
        return (self.context.options.lazy or not is_small) and userfaultfd.is_possible()

    def _run_lazily(self, source: session_memory.MemorySource, holder: StartingHolder) -> None:
        limits.more_files(OPEN_FILES)  # the pager has one for each process, and for each that they fork meanwhile
        with (
            self._decoders(source) as fillers,
            Pager(self.images, source.later, self._on_memory_lost, fillers) as pager,
        ):
            starter = self.starter = self._run(holder, pager, source.waiting())
            adoption.leave_caller_cgroup(self.group)
            if self.context.options.lazy:
                self.context.session, self.context.stall_note = self.record.session, self.directory / "image" / "stall"
                self.image.bring_rest()
            with ThreadPoolExecutor(1, "hooks") as pool:  # memory does not wait for the hooks
                hooks_run = pool.submit(self._run_hooks, report=self.context.options.lazy)
                with self.phases.phase("memory"):
                    # The holder exits with its session.
                    is_complete = pager.wait(lambda: starter.process.poll() is not None)
                if is_complete:
                    self._remove_images()  # before "complete": after it the next checkpoint may use the same directory
                    with contextlib.suppress(OSError):  # the session may have exited by itself meanwhile
                        starter.control.send(b"complete")
                starter.close()
            hooks_run.result()
        if self.lost is not None and not self._exited_by_itself():
            self.this_host.note("memory_lost", self.record.session, reason=str(self.lost))
            raise self.lost
        if is_complete:
            self.this_host.note("memory_complete", self.record.session, seconds=self.phases.seconds["memory"])
        if not self.context.options.lazy:
            self._report_restored()

    def _decoders(self, source: session_memory.MemorySource) -> contextlib.AbstractContextManager[Sequence[Filler]]:
        """Start the decode workers. A lazy restore has none: one process fetches from the store, because it knows
        which requests are under way."""
        return contextlib.nullcontext(()) if self.context.options.lazy else decode_workers.started(source)

    def _on_memory_lost(self, error: BaseException) -> None:
        if isinstance(error, CmdopError):
            self.lost = error
        else:
            _log.error("serving memory failed", exc_info=error)
            self.lost = Unexpected(f"its memory could not be restored: {error}", "It is parked: restore it again.")
        self._end(str(error))

    def _end(self, why: str) -> None:
        """End all processes of the session. The holder does it, so that it records the session as parked, not as
        ended; if there is no holder yet, or it does not within HOLDER_TIMEOUT, this process does it."""
        if self.starter is not None and cgroup.is_populated(self.group):
            _log.error("memory is lost: %s; the session is ended, its checkpoint is intact", why)
            with contextlib.suppress(OSError):
                cgroup.freeze(self.group, 0)
            self.starter.close()
            until = time.monotonic() + HOLDER_TIMEOUT
            while cgroup.is_populated(self.group) and time.monotonic() < until:
                time.sleep(0.002)
        cgroup.kill(self.group)

    def _exited_by_itself(self) -> bool:
        """Return whether the session exited before all its memory had arrived: then nothing is lost."""
        after = self.this_host.load(self.record.session)
        return after is not None and after.phase == "exited"

    def _abandon(self, starter: Starter) -> None:
        """End the tree and its holder, even if the holder's lease watchdog has frozen the tree."""
        self.deadline.abandon(starter)

    def _run(self, holder: StartingHolder, pager: Pager | None, waiting: set[int]) -> Starter:
        """Have CRIU restore the tree and the holder adopt it. `waiting` lists the processes whose memory comes from
        the pager."""
        self.context.say("restoring")
        starter = holder.starter
        try:
            criu = starter.expect()["pid"]
            with self.phases.phase("restore"):
                self._converse(holder.worker, starter, criu, pager, waiting)
            self.phases.reach("resumed")
            if pager is None:  # otherwise the pager still reads them
                self._remove_images()  # before "resumed": if this process is killed later, none of it is left
            self.deadline.resume()
            starter.control.send(b"resumed")
            starter.expect()
            self.deadline.end()
        except (BrokenPipeError, ConnectionResetError) as error:
            self._abandon(starter)
            words = "the session's holder was killed while it was being restored"
            raise Unexpected(words, "It is parked as before: restore it again.") from error
        except BaseException:
            self._abandon(starter)  # before the pager releases its memory
            self.deadline.check()  # if that is the cause, it is the error to raise
            raise
        finally:
            holder.worker.close()
        self.adopted = True
        self.phases.reach("adopted")
        self.context.say("running")
        if pager is None:
            starter.close()
        return starter

    def _before_first_instruction(
        self, starter: Starter, masters: list[int], pager: Pager | None, waiting: set[int]
    ) -> None:
        """Connect the network, reset old connections, and hand the suspended tree to the holder. An error raised here
        ends the tree."""
        self.phases.reach("pre-resume")
        if not masters or not self.pid:
            raise Unexpected("CRIU did not hand over the session's terminal", "See its log.")
        if pager is not None:
            pager.secure(waiting)
        if self.record.link is not None and self.before is not None:
            network.reconnect(self.pid, self.before, self.record.link)
        if self.image.manifest.facts.get("live"):
            tcp_connections.reset(self.pid, image_checks.outside_connections(self.image))
        if self._is_locked():
            network.unlock(self.pid)
        if "affinity" in self.image.manifest.blobs:
            cpu_affinity.apply(cgroup.pids(self.group), json.loads(self.image.blob("affinity")))
        if "threads" in self.image.manifest.blobs:
            thread_settings.apply(cgroup.pids(self.group), json.loads(self.image.blob("threads")))
        eventfds.complete(self.images, cgroup.pids(self.group))
        renewed = self.leases.renew(self.lease)  # the last check of the fencing token: after this the session runs
        if isinstance(renewed, Lost):
            raise leases.fenced(self.record.name, renewed)
        message = {
            "pid": self.pid,
            "fresh_until": renewed.fresh_until,
            "token": renewed.token,
            "unread": self.terminal["unread"],
            "unwritten": self.terminal["unwritten"],
            "staged": self.terminal["staged"],
            "streams": self.terminal["streams"],
        }
        self.deadline.begin(renewed.fresh_until, starter)
        self.runs_from = clock.boottime()
        fds = [masters[0]] if pager is None else [masters[0], pager.keep.fileno()]
        socket.send_fds(starter.control, [json.dumps(message).encode()], fds)
        starter.expect()
        self.deadline.check()

    def _run_hooks(self, report: bool = False) -> None:
        """Run the hooks for the new token and the restore. A failed hook is reported and changes nothing else. With
        `report`, pass the result to the context afterwards."""
        record = replace(self.record, pid=self.pid)
        reason = "fork" if self.context.options.fork else "restore"
        hosts = {"from": self.image.manifest.facts.get("host"), "to": self.config.host}
        with self.phases.phase("hooks"):
            for event in (hooks.TOKEN, hooks.POST_RESTORE):
                facts = {"reason": reason, "closed_connections": self.closed_connections, **hosts}
                self.hook_outcomes += hooks.run(self.this_host, event, record, **facts)
        if report:
            self._report_restored()

    def _report_restored(self) -> None:
        """Write the event, and pass the result to the context."""
        manifest, files = self.image.manifest, self.installed_files
        self.this_host.note(
            "restored", self.record.session, checkpoint=manifest.checkpoint, token=self.record.token,
            name=self.record.name, parent=self.record.parent, phases=self.phases.seconds,
            carried=len(files.carried), grown=len(files.grown), boottime=round(self.runs_from, 6),
        )  # fmt: skip
        self.context.answer(
            RestoreResult(
                session=self.record.session,
                name=self.record.name,
                host=self.record.host,
                token=self.record.token,
                checkpoint=manifest.checkpoint,
                phases=self.phases.seconds,
                pid=self.pid,
                parent=self.record.parent,
                carried=files.carried,
                grown=files.grown,
                accepted=files.accepted,
                hooks=[outcome.to_json() for outcome in self.hook_outcomes],
                took_s=round(clock.boottime() - self.context.began, 6),
                ran_at=round(self.runs_from, 6),
                printed_at=talk.printed_at(self.this_host, self.record.session),
            )
        )
