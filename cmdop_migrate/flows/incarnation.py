"""One session brought back from a verified image: its files, its tree, its holder, then its memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cmdop_migrate import clock, log
from cmdop_migrate.criu import ctty, logs, openfiles, request, runner, userfault
from cmdop_migrate.criu.pager import Filler, Pager
from cmdop_migrate.criu.provide import Criu
from cmdop_migrate.errors import CmdopError, CriuFailed, Unexpected
from cmdop_migrate.flows import carry, contents, decoders, descriptors, hooks, leases, memory, talk, tools
from cmdop_migrate.flows.hookrun import Outcome
from cmdop_migrate.flows.mounts import shared_mounts
from cmdop_migrate.flows.phases import Phases
from cmdop_migrate.flows.run import holder_order
from cmdop_migrate.images import filerestore, filestats, filetable
from cmdop_migrate.images.reader import Image
from cmdop_migrate.lease.rules import Lost
from cmdop_migrate.lease.store import Held, LeaseStore
from cmdop_migrate.model import Link, Record
from cmdop_migrate.session import affinity, cgroup, connections, launch, network
from cmdop_migrate.session.records import Records
from cmdop_migrate.session.start import Starter, make_stores, overlays

CRIU_TIMEOUT = 600.0
HOLDER_TIMEOUT = 5.0
FILES = 1 << 16
MANY = 16 << 20  # bytes of files that are better brought before they are asked for, one after the other
RESTORERS = "restorers"  # a cgroup beside that of the holders
EAGER_BELOW = 32 << 20  # so little memory is laid out as fast as it is served
_log = log.get("restore")


@dataclass(frozen=True)
class Wanted:
    fork: str | None = None
    lazy: bool = False
    allow_devices: bool = False
    wait: float = 0.0
    accept_files: bool = False


class Restorer(Protocol):
    """Who brings it back: what was asked, and who hears how it goes."""

    records: Records
    wanted: Wanted
    phases: Phases
    began: float
    session: str
    stall: Path | None
    say: Callable[[str], None]
    answer: Callable[[dict[str, Any]], None]


class _Holder(NamedTuple):
    """One being started, and the other end of its CRIU's socket."""

    starter: Starter
    worker: socket.socket


class Incarnation:
    """From a verified image to a running session."""

    def __init__(
        self,
        parent: Restorer,
        criu: Criu,
        image: Image,
        record: Record,
        directory: Path,
        lock: int,
        host_leases: LeaseStore,
        lease: Held,
    ) -> None:
        self.leases, self.lease = host_leases, lease
        self.adopted, self.runs_from = False, 0.0
        self.parent, self.criu, self.image, self.record = parent, criu, image, record
        self.directory, self.lock = directory, lock
        self.records, self.config, self.phases = parent.records, parent.records.config, parent.phases
        self.images = directory / "images"
        self.group = self.records.cgroup(record.session)
        self.terminal = contents.terminal(image)
        self.outside = [one.to_json() for one in contents.outside(image)]
        self.before: Link | None = contents.record(image.manifest).link
        self.brought = carry.Brought()
        self.pid = 0
        self.starter: Starter | None = None  # once it runs: whoever finds its memory lost must tell the holder
        self.lost: BaseException | None = None
        self.told: list[Outcome] = []

    def run(self) -> None:
        lazy = self._is_lazy()
        if self.parent.wanted.lazy and (not lazy or self.image.manifest.facts["files_bytes"] > MANY):
            self.image.bring_rest()  # it is waited for; else once it runs: until then the processors are CRIU's
        with self.phases.phase("files"):
            self.parent.say("files")
            self._lay_files()
        source = memory.Source(self.image)
        with self._holder() as holder:  # it starts, and starts CRIU, while we lay images
            with self.phases.phase("images"):
                self._lay_images(source, lazy)
            if lazy:
                self._run_lazily(source, holder)
            else:
                self._run(holder, None, set())
                self._tell_hooks()
                self._say_done()

    def _clean(self) -> None:
        """It runs: what it was made from, its memory in the clear among it, goes."""
        launch.remove_files(str(self.directory), ("image", "images"))

    def _is_lazy(self) -> bool:
        is_small = self.image.manifest.sizes["memory"] <= EAGER_BELOW
        return (self.parent.wanted.lazy or not is_small) and userfault.is_possible()

    def _lay_files(self) -> None:
        points = list(self.record.layers)
        layers = overlays(points)
        make_stores(self.directory, layers)
        uppers = [self.directory / layer["store"] / "upper" for layer in layers]
        for number, upper in enumerate(uppers):
            data = contents.blob(self.image, f"files/{number}")
            table = filetable.parse(data)
            stats = filerestore.restore(table, self.image, upper, allow_devices=self.parent.wanted.allow_devices)
            (self.directory / f"files-{number}.table").write_bytes(data)
            (self.directory / f"files-{number}.stats").write_bytes(filestats.serialise(table, stats))
        self.brought = carry.bring(self.image, self.config.state_dir, points, uppers, self.parent.wanted.accept_files)
        (self.directory / "output.ring").write_bytes(contents.blob(self.image, "output"))
        contents.lay_journal(self.image, self.directory)

    def _lay_images(self, source: memory.Source, lazy: bool) -> None:
        shutil.rmtree(self.images, ignore_errors=True)
        self.images.mkdir(mode=0o700)
        for name in self.image.manifest.blobs:
            if name.startswith("criu/"):
                (self.images / os.path.basename(name)).write_bytes(self.image.blob(name))
        if self._is_locked():
            (namespace,) = self.images.glob("netns-*.img")
            with open(self.images / namespace.name.replace("netns", "nftables"), "ab") as rules:
                rules.write(network.LOCK.encode())
        if self.brought.as_found:
            openfiles.open_as_found(self.images, self.brought.as_found)
        source.lay_out(self.images, lazy)

    def _is_locked(self) -> bool:
        """Connections inside the session come back one end at a time, and what one end sends before the other is
        there would reset it. So nothing arrives in its network until all are."""
        has_streams = any(name.startswith("criu/tcp-stream-") for name in self.image.manifest.blobs)
        return self.record.link is not None and has_streams and len(list(self.images.glob("netns-*.img"))) == 1

    def _run_lazily(self, source: memory.Source, holder: _Holder) -> None:
        descriptors.more_files(FILES)  # one for each process, and for each that they fork meanwhile
        with self._decoders(source) as fillers, Pager(self.images, source.later, self._on_lost, fillers) as pager:
            starter = self.starter = self._run(holder, pager, source.waiting())
            self._leave_surroundings()
            if self.parent.wanted.lazy:
                self.parent.session, self.parent.stall = self.record.session, self.directory / "image" / "stall"
                self.image.bring_rest()
            with ThreadPoolExecutor(1, "hooks") as pool:  # memory does not wait for them
                told = pool.submit(self._tell_hooks, done=self.parent.wanted.lazy)
                with self.phases.phase("memory"):
                    whole = pager.wait(lambda: starter.process.poll() is not None)  # it goes with its session
                if whole:
                    self._clean()  # before "complete": after it the next checkpoint may use the same directory
                    with contextlib.suppress(OSError):  # it may have ended by itself meanwhile
                        starter.control.send(b"complete")
                starter.close()
            told.result()
        if self.lost is not None and not self._ended_by_itself():
            self.records.note("memory_lost", self.record.session, reason=str(self.lost))
            raise self.lost
        if whole:
            self.records.note("memory_complete", self.record.session, seconds=self.phases.seconds["memory"])
        if not self.parent.wanted.lazy:
            self._say_done()

    def _leave_surroundings(self) -> None:
        """The session ends with us from here on: whoever ends all that a unit has started must not find us there."""
        group = os.path.join(os.path.dirname(self.group), RESTORERS)
        with contextlib.suppress(OSError):
            cgroup.create(group)
            cgroup.join(group)

    def _decoders(self, source: memory.Source) -> contextlib.AbstractContextManager[Sequence[Filler]]:
        """What is still in the store comes through one process, which knows what is on its way."""
        return contextlib.nullcontext(()) if self.parent.wanted.lazy else decoders.started(source)

    def _on_lost(self, error: BaseException) -> None:
        if isinstance(error, CmdopError):
            self.lost = error
        else:
            _log.error("serving memory failed", exc_info=error)
            self.lost = Unexpected(f"its memory could not be brought back: {error}", "It is parked: restore it again.")
        self._end(str(error))

    def _end(self, why: str) -> None:
        """Nothing of it runs when this returns. The holder does it, so that it records the session as parked, not as
        ended; where there is none yet, or it does not, we do."""
        if self.starter is not None and cgroup.is_populated(self.group):
            _log.error("memory is lost: %s; the session is ended, its checkpoint is whole", why)
            with contextlib.suppress(OSError):
                cgroup.freeze(self.group, 0)
            self.starter.close()
            until = time.monotonic() + HOLDER_TIMEOUT
            while cgroup.is_populated(self.group) and time.monotonic() < until:
                time.sleep(0.002)
        cgroup.kill(self.group)

    def _ended_by_itself(self) -> bool:
        """A program that was done before all of its memory was there has lost nothing."""
        after = self.records.load(self.record.session)
        return after is not None and after.phase == "exited"

    @contextlib.contextmanager
    def _holder(self) -> Iterator[_Holder]:
        """Its files are there. Unless it has adopted the session by the end of the block, it goes again."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = holder_order(self.config, self.records, self.record) | {
            "mode": "restore",
            "fresh_until": self.lease.fresh_until,
            "worker": list(self.criu.argv),
            "worker_fd": theirs.fileno(),
            "carried": self.terminal["carried"] | ({"turn": None} if self.parent.wanted.fork else {}),
        }
        with ours:
            with theirs, self.phases.phase("holder"):
                starter = Starter(order, self.lock, self.config.log_file.with_name("holder.log"), theirs.fileno())
            try:
                yield _Holder(starter, ours)
            finally:
                if not self.adopted:
                    self._abandon(starter)

    def _abandon(self, starter: Starter) -> None:
        """Nothing of it runs when this returns: the holder sees to that; should it have been killed, we do."""
        starter.abandon()
        cgroup.remove(self.group)

    def _run(self, holder: _Holder, pager: Pager | None, waiting: set[int]) -> Starter:
        """`waiting`: the processes that have memory to come from the pager."""
        self.parent.say("restoring")
        starter = holder.starter
        try:
            criu = starter.expect()["pid"]
            with self.phases.phase("restore"):
                self._converse(holder.worker, starter, criu, pager, waiting)
            self.phases.reach("resumed")
            if pager is None:  # else it is still read; who is killed after this leaves none of it beside the session
                self._clean()
            starter.control.send(b"resumed")
            starter.expect()
        except (BrokenPipeError, ConnectionResetError) as error:
            self._abandon(starter)
            words = "the session's holder was killed while it was being restored"
            raise Unexpected(words, "It is parked as before: restore it again.") from error
        except BaseException:
            self._abandon(starter)  # before the pager lets go of its memory
            raise
        finally:
            holder.worker.close()
        self.adopted = True
        self.phases.reach("adopted")
        self.parent.say("running")
        if pager is None:
            starter.close()
        return starter

    def _converse(
        self, sock: socket.socket, starter: Starter, criu: int, pager: Pager | None, waiting: set[int]
    ) -> None:
        masters: list[int] = []
        own_terminal = ctty.is_possible()
        terminal: list[ctty.Terminal] = []
        worker: list[int] = []

        def on_notify(notification: runner.Notification) -> bool:
            masters.extend(notification.fds)
            if notification.pid:
                self.pid = notification.pid
            if notification.script == "setup-namespaces" and own_terminal:
                terminal.append(ctty.Terminal.begin(self.pid))
            if notification.script == "post-resume" and own_terminal:
                worker.append(ctty.let_parent_end(self.pid))
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
                shared=shared_mounts(self.record, str(self.directory / "root")),
                lazy_pages=pager is not None,
                sibling=not own_terminal,
            )
            response = runner.converse(sock, request.restore(spec), on_notify, CRIU_TIMEOUT, criu)
        except (runner.HungUp, FileNotFoundError, ProcessLookupError):  # the latter: of what it had made already
            raise self._failure("the restore failed: CRIU died") from None
        finally:
            os.close(directory)
        if not response.success:
            raise self._failure("the restore failed", response.errmsg)
        for fd in response.fds:
            os.close(fd)
        if worker:
            ctty.die_with_parent(self.pid, worker[0])

    def _failure(self, what: str, message: str = "") -> CriuFailed:
        error = logs.failure(what, self.images / "restore.log", message)
        return tools.keep_log(error, self.images, self.config, "restore", self.record.session)

    def _before_first_instruction(
        self, starter: Starter, masters: list[int], pager: Pager | None, waiting: set[int]
    ) -> None:
        """The tree is there and stands still: network, old connections, the holder. Raising here ends it."""
        self.phases.reach("pre-resume")
        if not masters or not self.pid:
            raise Unexpected("CRIU did not hand over the session's terminal", "See its log.")
        if pager is not None:
            pager.secure(waiting)
        if self.record.link is not None and self.before is not None:
            network.reconnect(self.pid, self.before, self.record.link)
        if self.image.manifest.facts.get("live"):
            connections.reset(self.pid, contents.outside(self.image))
        if self._is_locked():
            network.unlock(self.pid)
        if "affinity" in self.image.manifest.blobs:
            affinity.apply(cgroup.pids(self.group), json.loads(self.image.blob("affinity")))
        renewed = self.leases.renew(self.lease)  # the last look at the token: after this it runs
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
        self.runs_from = clock.boottime()
        fds = [masters[0]] if pager is None else [masters[0], pager.keep.fileno()]
        socket.send_fds(starter.control, [json.dumps(message).encode()], fds)
        starter.expect()

    def _tell_hooks(self, done: bool = False) -> None:
        """It runs, under a new token. What hooks fail with is told, and changes nothing. `done`: then answer, too."""
        record = replace(self.record, pid=self.pid)
        reason = "fork" if self.parent.wanted.fork else "restore"
        hosts = {"from": self.image.manifest.facts.get("host"), "to": self.config.host}
        with self.phases.phase("hooks"):
            for event in (hooks.TOKEN, hooks.POST_RESTORE):
                facts = {"reason": reason, "closed_connections": self.outside, **hosts}
                self.told += hooks.run(self.records, event, record, **facts)
        if done:
            self._say_done()

    def _say_done(self) -> None:
        manifest = self.image.manifest
        self.records.note(
            "restored", self.record.session, checkpoint=manifest.checkpoint, token=self.record.token,
            name=self.record.name, parent=self.record.parent, phases=self.phases.seconds,
            carried=len(self.brought.carried), grown=len(self.brought.grown), boottime=round(self.runs_from, 6),
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
                "carried": self.brought.carried,
                "grown": self.brought.grown,
                "accepted": self.brought.accepted,
                "hooks": [one.to_json() for one in self.told],
                "took_s": round(clock.boottime() - self.parent.began, 6),
                "ran_at": round(self.runs_from, 6),
                "printed_at": talk.printed_at(self.records, self.record.session),
            }
        )
