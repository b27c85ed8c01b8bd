"""One session brought back from a verified image: its files, its tree, its holder, then its memory."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from cmdop_migrate.snapshot.rebuild.process_tree import Holder, Remake
from cmdop_migrate.util import limits
from cmdop_migrate.util.timings import Phases

HOLDER_TIMEOUT = 5.0
FILES = 1 << 16
MANY = 16 << 20  # bytes of files that are better brought before they are asked for, one after the other
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

    this_host: Host
    wanted: Wanted
    phases: Phases
    began: float
    session: str
    stall: Path | None
    say: Callable[[str], None]
    answer: Callable[[dict[str, Any]], None]


class Incarnation(Remake):
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
        super().__init__(parent.this_host, parent.phases, criu, image, record, directory, lock)
        self.parent, self.leases, self.lease = parent, host_leases, lease
        self.runs_from = 0.0
        self.deadline = adoption.Deadline(record.name, self.group)
        self.outside = [one.to_json() for one in image_checks.outside(image)]
        self.starter: Starter | None = None  # once it runs: whoever finds its memory lost must tell the holder
        self.lost: BaseException | None = None
        self.told: list[HookOutcome] = []

    def run(self) -> None:
        lazy = self._is_lazy()
        if self.parent.wanted.lazy and (not lazy or self.image.manifest.facts["files_bytes"] > MANY):
            self.image.bring_rest()  # it is waited for; else once it runs: until then the processors are CRIU's
        with self.phases.phase("files"):
            self.parent.say("files")
            self._lay_files(self.parent.wanted.allow_devices, self.parent.wanted.accept_files)
            (self.directory / "output.ring").write_bytes(image_checks.blob(self.image, "output"))
            image_checks.lay_journal(self.image, self.directory)
        source = session_memory.Source(self.image)
        with self._holder(self.lease.fresh_until) as holder:  # it starts, and starts CRIU, while we lay images
            with self.phases.phase("images"):
                self._lay_images(source, lazy)
            if lazy:
                self._run_lazily(source, holder)
            else:
                self._run(holder, None, set())
                self._tell_hooks()
                self._say_done()

    def _order(self) -> dict[str, Any]:
        return {"carried": self.terminal["carried"] | ({"turn": None} if self.parent.wanted.fork else {})}

    def _clean(self) -> None:
        """It runs: what it was made from, its memory in the clear among it, goes."""
        start.remove_files(str(self.directory), ("image", "images"))

    def _is_lazy(self) -> bool:
        is_small = self.image.manifest.sizes["memory"] <= EAGER_BELOW
        return (self.parent.wanted.lazy or not is_small) and userfaultfd.is_possible()

    def _run_lazily(self, source: session_memory.Source, holder: Holder) -> None:
        limits.more_files(FILES)  # one for each process, and for each that they fork meanwhile
        with self._decoders(source) as fillers, Pager(self.images, source.later, self._on_lost, fillers) as pager:
            starter = self.starter = self._run(holder, pager, source.waiting())
            adoption.leave_surroundings(self.group)
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
            self.this_host.note("memory_lost", self.record.session, reason=str(self.lost))
            raise self.lost
        if whole:
            self.this_host.note("memory_complete", self.record.session, seconds=self.phases.seconds["memory"])
        if not self.parent.wanted.lazy:
            self._say_done()

    def _decoders(self, source: session_memory.Source) -> contextlib.AbstractContextManager[Sequence[Filler]]:
        """What is still in the store comes through one process, which knows what is on its way."""
        return contextlib.nullcontext(()) if self.parent.wanted.lazy else decode_workers.started(source)

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
        after = self.this_host.load(self.record.session)
        return after is not None and after.phase == "exited"

    def _abandon(self, starter: Starter) -> None:
        """End the tree and its holder, as Remake does, also when the holder's lease deadline froze the tree."""
        self.deadline.abandon(starter)

    def _run(self, holder: Holder, pager: Pager | None, waiting: set[int]) -> Starter:
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
            self.deadline.resume()
            starter.control.send(b"resumed")
            starter.expect()
            self.deadline.end()
        except (BrokenPipeError, ConnectionResetError) as error:
            self._abandon(starter)
            words = "the session's holder was killed while it was being restored"
            raise Unexpected(words, "It is parked as before: restore it again.") from error
        except BaseException:
            self._abandon(starter)  # before the pager lets go of its memory
            self.deadline.check()  # if that is why, it is what is told
            raise
        finally:
            holder.worker.close()
        self.adopted = True
        self.phases.reach("adopted")
        self.parent.say("running")
        if pager is None:
            starter.close()
        return starter

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
            tcp_connections.reset(self.pid, image_checks.outside(self.image))
        if self._is_locked():
            network.unlock(self.pid)
        if "affinity" in self.image.manifest.blobs:
            cpu_affinity.apply(cgroup.pids(self.group), json.loads(self.image.blob("affinity")))
        if "threads" in self.image.manifest.blobs:
            thread_settings.apply(cgroup.pids(self.group), json.loads(self.image.blob("threads")))
        eventfds.complete(self.images, cgroup.pids(self.group))
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
        self.deadline.begin(renewed.fresh_until, starter)
        self.runs_from = clock.boottime()
        fds = [masters[0]] if pager is None else [masters[0], pager.keep.fileno()]
        socket.send_fds(starter.control, [json.dumps(message).encode()], fds)
        starter.expect()
        self.deadline.check()

    def _tell_hooks(self, done: bool = False) -> None:
        """It runs, under a new token. What hooks fail with is told, and changes nothing. `done`: then answer, too."""
        record = replace(self.record, pid=self.pid)
        reason = "fork" if self.parent.wanted.fork else "restore"
        hosts = {"from": self.image.manifest.facts.get("host"), "to": self.config.host}
        with self.phases.phase("hooks"):
            for event in (hooks.TOKEN, hooks.POST_RESTORE):
                facts = {"reason": reason, "closed_connections": self.outside, **hosts}
                self.told += hooks.run(self.this_host, event, record, **facts)
        if done:
            self._say_done()

    def _say_done(self) -> None:
        manifest = self.image.manifest
        self.this_host.note(
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
                "printed_at": talk.printed_at(self.this_host, self.record.session),
            }
        )
