"""Fills a restored session's memory while it runs.

We stand where CRIU expects its own daemon: it connects to a socket in its work
dir and sends, for each process, its pid (inside) and its userfaultfd. From then
on the kernel tells us of every page that is touched and missing, and of all that
moves, drops or inherits such pages. Several threads decode and place pages,
those that are waited for first, a whole window of the image at a time.

What is missing may only change together with what the kernel was told about it,
or a page that was given up comes back with its old content. So, per process,
one lock is held while an event is read and applied, and while a page is placed.

What must never happen is that a userfaultfd closes early: the kernel then
hands out zeros for all that is missing, and the session runs on with holes in
its memory. So they also lie, unread, in a socket (`keep`) of which the holder has
an end before the session runs. Should we die, it ends the session first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from cmdop_migrate import log
from cmdop_migrate.criu.lazy import userfaultfd
from cmdop_migrate.criu.lazy.address_space import BLOCK, PAUSE, Memory, Space
from cmdop_migrate.criu.lazy.missing import Missing
from cmdop_migrate.criu.page_server import SNDBUFFORCE
from cmdop_migrate.errors import Unexpected

SOCKET = "lazy-pages.socket"
_FINISHED = 0x52535446  # where a pid is expected: all processes are there
_ROOM = 64 << 20  # for messages that nobody reads; each takes about 1 KiB
_FAULT_THREADS = 4
_BURY_AFTER = 64
_LOOK_EVERY = 0.2
NICE = 5
_log = log.get("pager")


class Filler(Protocol):
    """Decodes for one thread."""

    @property
    def buffer(self) -> memoryview:
        """BLOCK bytes, always the same."""

    def fill(self, memory: Memory, start: int, size: int) -> bool:
        """As `memory.fill` into the first `size` bytes of the buffer."""


class _Here:
    """In the thread itself."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BLOCK))

    def fill(self, memory: Memory, start: int, size: int) -> bool:
        return memory.fill(start, self.buffer[:size])


class Pager:
    """One restore. Also a context manager."""

    def __init__(
        self,
        work_dir: Path,
        memory: Callable[[int], Memory],
        on_lost: Callable[[BaseException], None],
        fillers: Sequence[Filler] = (),
        prefetch: bool = True,
    ) -> None:
        """`memory` gives the pages of a process by its pid inside. `on_lost`: no more can be given; when it returns,
        nothing of the session may run. `fillers`: who decodes what nobody waits for; else we do. Without `prefetch`
        only pages that are touched are placed."""
        self._prefetch = prefetch
        self._fillers = fillers or [_Here() for _ in range(max(2, min(4, os.cpu_count() or 2)))]
        self._memory, self._on_lost = memory, on_lost
        self._spaces: list[Space] = []
        self._by_fd: dict[int, Space] = {}
        self._pids: set[int] = set()
        self._forks = 0  # since ended ones were looked for
        self._lock = threading.Lock()
        self._faults: queue.SimpleQueue[tuple[Space, int] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._done = threading.Event()
        self.lost: BaseException | None = None
        self._vault, self.keep = socket.socketpair()
        with contextlib.suppress(PermissionError):
            self._vault.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, _ROOM)
        self._vault.setblocking(False)
        self._listener = socket.socket(socket.AF_UNIX)
        directory = os.open(work_dir, os.O_PATH | os.O_CLOEXEC)
        try:
            self._listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")  # its own path may be too long
        finally:
            os.close(directory)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._criu: socket.socket | None = None
        self._pid: int | None = None  # its userfaultfd is next
        self._wake_up = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        for fd in (self._listener.fileno(), self._wake_up):
            self._epoll.register(fd, select.EPOLLIN)
        self._threads: list[threading.Thread] = []
        self._start(self._listen, *[self._serve] * _FAULT_THREADS)

    def secure(self, expected: Iterable[int]) -> None:
        """For `pre-resume`: everything is in the vault. Raises: the session must not run."""
        with self._lock:
            self._accept()
            self._hear()
            absent = set(expected) - self._pids
        if self.lost is not None:
            raise self.lost
        if absent:
            raise Unexpected(f"CRIU gave no access to the memory of {sorted(absent)}", "See its log.")

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Until all memory is in place (True), lost, or, as `is_over` tells, of no more use to anybody."""
        while not self._done.wait(_LOOK_EVERY):
            if is_over():
                return False
        return self.lost is None

    def close(self) -> None:
        """What was not placed reads as zeros once nobody else has `keep`: the session must be gone by then."""
        self._ended.set()
        os.eventfd_write(self._wake_up, 1)
        for _ in range(_FAULT_THREADS):
            self._faults.put(None)
        until = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._vault.close()
        self.keep.close()
        self._listener.close()
        if any(thread.is_alive() for thread in self._threads):
            return  # it waits for the store, and has them in use: they go when we do
        self._epoll.close()
        os.close(self._wake_up)
        if self._criu is not None:
            self._criu.close()
        for fd in self._by_fd:
            os.close(fd)

    def __enter__(self) -> Pager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _supervised(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the session must not run on
            with self._lock:
                first = self.lost is None and not self._done.is_set() and not self._ended.is_set()
                if first:
                    self.lost = error
            if first:
                try:
                    self._on_lost(error)
                finally:
                    self._done.set()

    def _listen(self) -> None:
        while not self._ended.is_set():
            for fd, _ in self._epoll.poll():
                if fd == self._listener.fileno():
                    with self._lock:
                        self._accept()
                elif fd in self._by_fd:
                    self._look(self._by_fd[fd])
                elif self._criu is not None and fd == self._criu.fileno():
                    with self._lock:
                        self._hear()

    def _accept(self) -> None:
        """With the lock held, as below."""
        with contextlib.suppress(BlockingIOError):
            self._criu, _ = self._listener.accept()
            self._epoll.register(self._criu.fileno(), select.EPOLLIN)

    def _hear(self) -> None:
        """All CRIU has said."""
        while self._criu is not None:
            size = 4 if self._pid is None else 1
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC  # which `recv_fds` forgets
            try:
                data, extra, _, _ = self._criu.recvmsg(size, socket.CMSG_LEN(4), flags)
            except BlockingIOError:
                return
            if len(data) != size:
                self._epoll.unregister(self._criu.fileno())  # it has ended; what that means others see
                self._criu.close()
                self._criu = None
            elif self._pid is not None:
                pid, self._pid = self._pid, None
                memory = self._memory(pid)
                if not extra:
                    raise Unexpected("no room for the userfaultfds of so many processes", "Raise the limit: ulimit -n.")
                (fd,) = struct.unpack("<i", extra[0][2])
                self._add(Space(fd, memory, Missing((start, end, 0) for start, end in memory.later())))
                self._pids.add(pid)
            else:
                (said,) = struct.unpack("<i", data)
                if said == _FINISHED:
                    self._begin()
                elif said > 0:  # below: a process that has ended, and waits to be buried
                    self._pid = said

    def _add(self, space: Space) -> None:
        try:
            socket.send_fds(self._vault, [b"\0"], [space.fd])
        except BlockingIOError:
            _log.warning("no room to keep another userfaultfd")
        self._by_fd[space.fd] = space
        self._spaces.append(space)
        self._epoll.register(space.fd, select.EPOLLIN)

    def _begin(self) -> None:
        """All processes are there."""
        if self._prefetch:
            self._start(*(functools.partial(self._fill, filler) for filler in self._fillers))

    def _start(self, *work: Callable[[], None]) -> None:
        for one in work:
            thread = threading.Thread(target=self._supervised, args=(one,), name="pager", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _look(self, space: Space) -> None:
        forks = 0
        with space.lock:
            for event in userfaultfd.read(space.fd):
                if isinstance(event, userfaultfd.Fault):
                    self._faults.put((space, event.address))
                elif not isinstance(event, userfaultfd.Fork):
                    space.apply(event)
                elif space.missing:
                    forks += 1
                    with self._lock:
                        self._add(Space(event.fd, space.memory, space.missing.copy(), inherited=True))
                else:
                    os.close(event.fd)  # it has all that its parent has: what is not there is zeros
        self._forks += forks
        if self._forks >= _BURY_AFTER:
            self._forks = 0
            self._bury()

    def _bury(self) -> None:
        """Forgets children that have ended: a script may have more of them than we may have files open."""
        for space in list(self._spaces):
            if space.inherited and userfaultfd.has_ended(space.fd):
                self._epoll.unregister(space.fd)  # closing does not: it lies in the vault, too
                with self._lock:
                    del self._by_fd[space.fd]
                    self._spaces.remove(space)
                space.close()

    def _serve(self) -> None:
        """Pages that are waited for."""
        while (job := self._faults.get()) is not None:
            space, address = job
            while not self._ended.is_set():
                claim = space.wanted(address)
                if claim is not None:
                    data = space.memory.read(claim.source)
                    if data is not None and len(data) != claim.size:
                        raise ValueError(f"{len(data)} bytes for the window at {claim.source:#x}")
                    space.put(claim, userfaultfd.address_of(data) if data is not None else 0)
                    if not space.lacks(address):
                        break
                elif space.zero(address):
                    break
                time.sleep(PAUSE)

    def _fill(self, filler: Filler) -> None:
        """All others. Whoever waits, and the session itself, go first."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        base = userfaultfd.address_in(filler.buffer)
        while not self._ended.is_set():
            claims = ((space, claim) for space in list(self._spaces) if space.missing and (claim := space.claim()))
            found = next(claims, None)
            if found is not None:
                space, claim = found
                is_data = filler.fill(space.memory, claim.source, claim.size)
                space.put(claim, base if is_data else 0)
                continue
            with self._lock:  # of a fork that was not heard of, a page would be missing still
                if not any(space.missing for space in self._spaces):
                    self._done.set()
                    return
            time.sleep(PAUSE)
