"""Fill the memory of a lazily restored session while it runs.

The pager replaces CRIU's own lazy-pages daemon: CRIU connects to a socket in its work directory and sends, for each
process, its pid (inside) and its userfaultfd. From then on the kernel reports every access to a missing page, and
every system call that moves, drops or inherits missing pages. Several threads decode and place pages, a whole window
of the image at a time, those that a thread waits for first.

The table of missing pages may only change together with the kernel's own state, or a page that the process has dropped
reappears with its old content. So, for each process, one lock is held while an event is read and applied, and while a
page is placed.

A userfaultfd must never close early: the kernel would then supply zeros for all missing pages, and the session would
run with holes in its memory. So copies of them also lie, unread, in a socket (`keep`); the holder has an end of it
before the session runs. If the pager dies, the holder ends the session before it closes that end.
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
from cmdop_migrate.criu.lazy.address_space import BLOCK, RETRY_PAUSE, Memory, Space
from cmdop_migrate.criu.lazy.missing import Missing
from cmdop_migrate.criu.page_server import SNDBUFFORCE
from cmdop_migrate.errors import Unexpected

SOCKET = "lazy-pages.socket"
_FINISHED = 0x52535446  # instead of a pid: CRIU has sent all processes
_ROOM = 64 << 20  # for messages that are never read; each takes about 1 KiB
_FAULT_THREADS = 4
_REMOVE_ENDED_AFTER = 64  # forks
_POLL_INTERVAL = 0.2
PREFETCH_NICE = 5
_log = log.get("pager")


class Filler(Protocol):
    """Decode pages for one thread."""

    @property
    def buffer(self) -> memoryview:
        """Return the buffer, BLOCK bytes; always the same one."""

    def fill(self, memory: Memory, start: int, size: int) -> bool:
        """Read as `memory.fill` does, into the first `size` bytes of the buffer."""


class _ThreadFiller:
    """Decode in the thread itself."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BLOCK))

    def fill(self, memory: Memory, start: int, size: int) -> bool:
        """Read into the buffer."""
        return memory.fill(start, self.buffer[:size])


class Pager:
    """Run the pager of one restore; usable as a context manager."""

    def __init__(
        self,
        work_dir: Path,
        memory: Callable[[int], Memory],
        on_lost: Callable[[BaseException], None],
        fillers: Sequence[Filler] = (),
        prefetch: bool = True,
    ) -> None:
        """Start the threads. `memory` returns the pages of a process by its pid inside. `on_lost` is called when no
        more pages can be supplied; when it returns, no process of the session may run. `fillers` decode for the
        prefetch; without them its threads do. Without `prefetch` only pages that the session accesses are placed."""
        self._prefetch = prefetch
        self._fillers = fillers or [_ThreadFiller() for _ in range(max(2, min(4, os.cpu_count() or 2)))]
        self._memory, self._on_lost = memory, on_lost
        self._spaces: list[Space] = []
        self._by_fd: dict[int, Space] = {}
        self._pids: set[int] = set()
        self._forks = 0  # since the last search for ended children
        self._lock = threading.Lock()
        self._faults: queue.SimpleQueue[tuple[Space, int] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._done = threading.Event()
        self.lost: BaseException | None = None
        self._keeper, self.keep = socket.socketpair()
        with contextlib.suppress(PermissionError):
            self._keeper.setsockopt(socket.SOL_SOCKET, SNDBUFFORCE, _ROOM)
        self._keeper.setblocking(False)
        self._listener = socket.socket(socket.AF_UNIX)
        directory = os.open(work_dir, os.O_PATH | os.O_CLOEXEC)
        try:
            # the path of the directory may be too long for a socket
            self._listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
        finally:
            os.close(directory)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._criu: socket.socket | None = None
        self._pid: int | None = None  # CRIU sends its userfaultfd next
        self._wake_up = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        for fd in (self._listener.fileno(), self._wake_up):
            self._epoll.register(fd, select.EPOLLIN)
        self._threads: list[threading.Thread] = []
        self._start(self._listen, *[self._serve] * _FAULT_THREADS)

    def secure(self, expected: Iterable[int]) -> None:
        """Check, at `pre-resume`, that all userfaultfds are in `keep`. If this raises, the session must not run."""
        with self._lock:
            self._accept()
            self._receive()
            absent = set(expected) - self._pids
        if self.lost is not None:
            raise self.lost
        if absent:
            raise Unexpected(f"CRIU sent no userfaultfd of the processes {sorted(absent)}", "See CRIU's log.")

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all memory is in place, and return True; return False if memory is lost or `is_over` tells that
        the session has ended."""
        while not self._done.wait(_POLL_INTERVAL):
            if is_over():
                return False
        return self.lost is None

    def close(self) -> None:
        """Stop the threads and close all descriptors. Missing pages read as zeros once no other process has `keep`: the
        session must have ended by then."""
        self._ended.set()
        os.eventfd_write(self._wake_up, 1)
        for _ in range(_FAULT_THREADS):
            self._faults.put(None)
        until = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._keeper.close()
        self.keep.close()
        self._listener.close()
        if any(thread.is_alive() for thread in self._threads):
            return  # it waits for the store and uses them: they are closed when this process ends
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
        except BaseException as error:  # noqa: BLE001 - after any error the session must not run
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
                    self._read_events(self._by_fd[fd])
                elif self._criu is not None and fd == self._criu.fileno():
                    with self._lock:
                        self._receive()

    def _accept(self) -> None:
        """Accept CRIU's connection, with the lock held."""
        with contextlib.suppress(BlockingIOError):
            self._criu, _ = self._listener.accept()
            self._epoll.register(self._criu.fileno(), select.EPOLLIN)

    def _receive(self) -> None:
        """Handle all messages that CRIU has sent, with the lock held."""
        while self._criu is not None:
            size = 4 if self._pid is None else 1
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC  # `recv_fds` does not set the second
            try:
                data, extra, _, _ = self._criu.recvmsg(size, socket.CMSG_LEN(4), flags)
            except BlockingIOError:
                return
            if len(data) != size:
                self._epoll.unregister(self._criu.fileno())  # CRIU has ended; its caller handles that
                self._criu.close()
                self._criu = None
            elif self._pid is not None:
                pid, self._pid = self._pid, None
                memory = self._memory(pid)
                if not extra:
                    raise Unexpected(
                        "too many open files for the userfaultfds of all processes", "Raise the limit: ulimit -n."
                    )
                (fd,) = struct.unpack("<i", extra[0][2])
                self._add(Space(fd, memory, Missing((start, end, 0) for start, end in memory.later())))
                self._pids.add(pid)
            else:
                (number,) = struct.unpack("<i", data)
                if number == _FINISHED:
                    self._begin()
                elif number > 0:  # a negative number is a zombie's
                    self._pid = number

    def _add(self, space: Space) -> None:
        try:
            socket.send_fds(self._keeper, [b"\0"], [space.fd])
        except BlockingIOError:
            _log.warning("no room in the socket to keep another userfaultfd")
        self._by_fd[space.fd] = space
        self._spaces.append(space)
        self._epoll.register(space.fd, select.EPOLLIN)

    def _begin(self) -> None:
        """Start the prefetch: CRIU has sent all processes."""
        if self._prefetch:
            self._start(*(functools.partial(self._fill, filler) for filler in self._fillers))

    def _start(self, *work: Callable[[], None]) -> None:
        for target in work:
            thread = threading.Thread(target=self._supervised, args=(target,), name="pager", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read_events(self, space: Space) -> None:
        """Handle the pending events of one process."""
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
                    os.close(event.fd)  # nothing is missing in its parent, so nothing is in it
        self._forks += forks
        if self._forks >= _REMOVE_ENDED_AFTER:
            self._forks = 0
            self._remove_ended()

    def _remove_ended(self) -> None:
        """Forget children that have ended: a script may fork more children than this process may have open files."""
        for space in list(self._spaces):
            if space.inherited and userfaultfd.has_ended(space.fd):
                self._epoll.unregister(space.fd)  # closing does not do that: `keep` has a copy
                with self._lock:
                    del self._by_fd[space.fd]
                    self._spaces.remove(space)
                space.close()

    def _serve(self) -> None:
        """Place the pages that threads wait for."""
        while (job := self._faults.get()) is not None:
            space, address = job
            while not self._ended.is_set():
                claim = space.claim_at(address)
                if claim is not None:
                    data = space.memory.read(claim.source)
                    if data is not None and len(data) != claim.size:
                        raise ValueError(f"{len(data)} bytes for the window at {claim.source:#x}")
                    space.put(claim, userfaultfd.address_of(data) if data is not None else 0)
                    if not space.lacks(address):
                        break
                elif space.zero(address):
                    break
                time.sleep(RETRY_PAUSE)

    def _fill(self, filler: Filler) -> None:
        """Place all other pages, with less priority than waiting threads and the session itself."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREFETCH_NICE)
        base = userfaultfd.address_in(filler.buffer)
        while not self._ended.is_set():
            claims = ((space, claim) for space in list(self._spaces) if space.missing and (claim := space.claim()))
            claimed = next(claims, None)
            if claimed is not None:
                space, claim = claimed
                is_data = filler.fill(space.memory, claim.source, claim.size)
                space.put(claim, base if is_data else 0)
                continue
            with self._lock:  # the event of a fork is applied under it: a page of an unread fork is still missing
                if not any(space.missing for space in self._spaces):
                    self._done.set()
                    return
            time.sleep(RETRY_PAUSE)
