"""Prove a checkpoint by a trial restore before the session it was made of is ended.

The trial is a real restore of what the store holds, on this host, up to the
moment before the first instruction, and ends there. The session itself stays
frozen meanwhile, and is thawed if the trial fails. The trial differs from a
restore in what keeps the two copies apart:

- It has no lease, no client can reach it, and it never runs an instruction. CRIU
  cannot be made to let it run: it never sees our end of its socket closed, and
  the tree's cgroup is frozen, then killed, before CRIU is answered.
- It has a directory, a cgroup and a holder of its own, under an identity that no
  record names. If this command is killed the holder removes them; if both are
  killed, the next command's sweep does, as with any interrupted start.
- Its network is its own and has no connection, also for a session on the host's
  network.
- Directories shared with the host are mounted through an overlay: CRIU creates
  and removes files (sockets, deleted files) there as it restores.
- Memory is served on demand, so hardly any of it is read. Files are unpacked as
  in a restore, and need room for a second copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cmdop_migrate import clock, log, units
from cmdop_migrate.criu import request
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.criu.lazy import userfaultfd
from cmdop_migrate.criu.lazy.pager import Pager
from cmdop_migrate.criu.page_server import LAZY, PAGE
from cmdop_migrate.errors import Blocked, CmdopError, CriuFailed, TimedOut, Unreachable
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.read import reader
from cmdop_migrate.model import Record, new_session_id
from cmdop_migrate.session import host_mounts
from cmdop_migrate.session.spawn_holder import Starter
from cmdop_migrate.snapshot import session_memory
from cmdop_migrate.snapshot.rebuild.process_tree import ProcessTreeRestore
from cmdop_migrate.util import limits
from cmdop_migrate.util.timings import Phases

TRIAL_TIMEOUT = 120.0  # seconds for CRIU, beyond which the trial has failed
SPARE = 64 << 20  # bytes of disk and memory that are left free
_PREFIX = "cmdt"  # of the trial's network interface; those of sessions have another prefix, to which NAT applies
_SECONDS, _PER_FILE, _PER_BYTE = 1.5, 0.7e-3, 1 / 80e6  # duration of a trial on a slow machine
_log = log.get("proof")


@dataclass(frozen=True)
class Proof:
    """Say whether a park was proven, and if not, why the trial was skipped."""

    proved: bool = False
    skipped: str | None = None


class ProofSkipped(Exception):
    """Report that the trial cannot be made here; the message is the reason to show."""


def expected_seconds(files: int, file_bytes: int) -> float:
    """Estimate how long a trial takes: most of it is unpacking files."""
    return _SECONDS + files * _PER_FILE + file_bytes * _PER_BYTE


def skip_reason(record: Record, files: int, file_bytes: int, deadline: float | None, free: int) -> str | None:
    """Return why the trial must be skipped, None if it is to be made. `deadline` (CLOCK_BOOTTIME) is when the park must
    be done, `free` the bytes that the state directory has left."""
    if deadline is not None and (left := deadline - clock.boottime()) < expected_seconds(files, file_bytes):
        needed = expected_seconds(files, file_bytes)
        return f"it takes about {needed:.0f} s, and {max(0.0, left):.0f} s are left until the deadline"
    if file_bytes + SPARE > free:
        return f"no room for a second copy of its files ({units.show_size(file_bytes)})"
    for share in record.binds:
        if (kind := host_mounts.mount_of(share).kind) in host_mounts.NOT_LOWER:
            return f"{share} is shared from {kind}, which cannot be under an overlay"
    return None


def prove(this_host: Host, criu: Criu, manifest: Manifest, record: Record) -> None:
    """Restore the checkpoint on trial. Raises CriuFailed if it cannot be restored, ProofSkipped if the trial cannot be
    made here, Unreachable if the store does not return the image."""
    session = new_session_id()
    lock = this_host.claim_dead(session, record.name)
    directory = this_host.directory(session)
    try:
        store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
        with contextlib.closing(reader.read_back(store, ring, manifest, directory / "image")) as image:
            _TrialRestore(this_host, criu, image, _trial_record(record, session), directory, lock).run()
    except (ProofSkipped, Unreachable, CriuFailed):
        raise
    except (CmdopError, OSError) as error:
        raise _failed(error) from error
    finally:
        cgroup.remove(this_host.cgroup(session))
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _failed(error: CmdopError | OSError) -> CriuFailed | ProofSkipped:
    if isinstance(error, Blocked):
        return ProofSkipped(error.message)
    if isinstance(error, TimedOut):
        return CriuFailed(f"CRIU did not finish within {TRIAL_TIMEOUT:.0f} s", "See its log.")
    return CriuFailed(str(error), "See the log.")


def _trial_record(record: Record, session: str) -> Record:
    """Return the record of the trial: another identity, another network interface, shares as copy-on-write layers."""
    link = replace(record.link, veth=f"{_PREFIX}{os.urandom(5).hex()}") if record.link is not None else None
    return replace(record, session=session, link=link, layers=(*record.layers, *record.binds))


class _Complete(Exception):
    """Refuse CRIU's last notification once the tree is complete, so that the tree never runs."""


class _TrialRestore(ProcessTreeRestore):
    timeout = TRIAL_TIMEOUT
    never_hangs_up = True

    def __init__(self, this_host: Host, *more: Any) -> None:
        super().__init__(this_host, Phases("prove"), *more)

    def run(self) -> None:
        """Restore the tree up to its first instruction, and end it. Raises CriuFailed if that fails."""
        lazy = userfaultfd.is_possible()
        source = session_memory.MemorySource(self.image)
        self._check_memory(source, lazy)
        with self.phases.phase("files"):
            self._unpack_files(allow_devices=True, accept_files=True)
        with self._holder(clock.boottime() + TRIAL_TIMEOUT) as holder:
            self._write_images(source, lazy)
            criu = holder.starter.expect()["pid"]
            if not lazy:
                self._restore(lambda: self._converse(holder.worker, holder.starter, criu, None, set()))
                return
            limits.more_files(1 << 16)
            with Pager(self.images, source.later, self._on_memory_lost, prefetch=False) as pager:
                try:
                    self._restore(lambda: self._converse(holder.worker, holder.starter, criu, pager, source.waiting()))
                finally:
                    self._abandon(holder.starter)  # before the pager releases the tree's memory

    def _restore(self, converse: Callable[[], None]) -> None:
        with self.phases.phase("restore"):
            try:
                converse()
            except _Complete:
                return
        raise CriuFailed("CRIU let the trial run without a notification", "Report this as a bug.")

    def _before_first_instruction(
        self,
        starter: Starter,  # noqa: ARG002 - not needed: the trial's holder adopts nothing
        masters: list[int],
        pager: Pager | None,
        waiting: set[int],
    ) -> None:
        if not masters or not self.pid:
            raise CriuFailed("CRIU did not hand over the session's terminal", "See its log.")
        if pager is not None:
            pager.secure(waiting)
        cgroup.order_freeze(self.group)  # a process whose tracer dies would run until it is killed itself
        self.phases.reach("complete")
        cgroup.kill(self.group)
        raise _Complete

    def _extra_order(self) -> dict[str, Any]:
        return {**super()._extra_order(), "own_network": self.record.spec.net == "host"}

    def _mounts(self) -> tuple[request.SharedMount, ...]:
        root, shares = str(self.directory / "root"), self.record.binds
        layers = self.record.layers[: len(self.record.layers) - len(shares)]
        named = [*((f"layer{number}", point) for number, point in enumerate(layers) if point != "/")]
        named += [(f"share{number}", path) for number, path in enumerate(shares)]
        return tuple(request.SharedMount(key, inside, f"{root}{inside}") for key, inside in named)

    def _check_memory(self, source: session_memory.MemorySource, lazy: bool) -> None:
        """Raise ProofSkipped if this machine lacks the memory for the pages that cannot be served on demand."""
        needed = 0
        for name in self.image.targets:
            target = session_memory.target_of(name)
            for segment in source.reader(target).segments:
                if not (lazy and target.kind == "process" and segment.flags & LAZY):
                    needed += segment.pages * PAGE
        if needed > SPARE and needed + SPARE > (free := _available_memory()):
            raise ProofSkipped(f"{units.show_size(free)} of memory are free, {units.show_size(needed)} needed")

    def _on_memory_lost(self, error: BaseException) -> None:
        _log.warning("serving memory to the trial failed: %s", error)
        cgroup.kill(self.group)


def _available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as info:
        return next(int(line.split()[1]) << 10 for line in info if line.startswith("MemAvailable:"))
