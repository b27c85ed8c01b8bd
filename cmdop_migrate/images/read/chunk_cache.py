"""Cache the sealed chunks of one checkpoint in a local file, each verified as it arrives from the store.

The file holds spans: neighbouring chunks of one pack, read with one request. Packs of a store on the same disk are not
copied but hard-linked beside the file. Spans arrive all at the start (`fill`), or on demand and by prefetch in the
background (`start_background`). Bytes that do not verify are never written and never returned.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from itertools import zip_longest
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import ImageRefused, StoreUnreachable, Unreachable
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.read.load_table import check_packs, read_range
from cmdop_migrate.images.read.ranges import SPAN, Span, neighbours, plan
from cmdop_migrate.storage.base import Store
from cmdop_migrate.util import bulk_io
from cmdop_migrate.util.worker_process import WorkerProcess, close_all

LINKS = "pack-*"  # names of linked packs, beside the file
CHECK_IN_PROCESSES, MOST_PROCESSES = 64 << 20, 4  # local bytes from which on processes check chunks, and how many
LOCAL = 2  # threads that read from this disk: more only wait for the interpreter lock
RECENT = 4  # spans that a streaming thread keeps
_ABSENT, _COMING, _HERE = 0, 1, 2
_VERIFIED = b"1"
_FIRST_RETRY_WAIT, _LONGEST_RETRY_WAIT = 0.2, 5.0
_STOP_WAIT = 1.0
_logger = log.get("images.cache")


class BaseImage:
    """Give access to an image that is already local, so that chunks shared with it are not fetched again."""

    def __init__(self, table: ChunkTable, cache: ChunkCache) -> None:
        self._table, self._cache = table, cache

    def find(self, ident: bytes, length: int) -> int:
        """Return the number here of a chunk sealed to that many bytes, or -1."""
        number = self._table.find(ident)
        return number if number >= 0 and self._table.place(number).length == length else -1

    def sealed(self, number: int) -> bytes | memoryview:
        return self._cache.sealed(number)

    def descriptors(self) -> set[int]:
        return self._cache.descriptors()


class ChunkCache:
    """Answer `sealed(number)` from the file; `fill` or `start_background` fetches the rest."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        table: ChunkTable,
        sealer: Sealer,
        path: Path,
        on_stall: Callable[[float, Unreachable | None], None] | None = None,
        base: BaseImage | None = None,
    ) -> None:
        """Plan the spans and create the file. With `on_stall`, retry an unreachable store until it answers, and report
        each failure with the seconds waited so far, then None; without it an unreachable store is an error."""
        self._store, self._manifest, self._table, self._sealer = store, manifest, table, sealer
        self._on_stall = on_stall
        self._base = base
        self._in_base = array("q")
        if base is not None:
            self._in_base.extend(base.find(ident, length) for ident, _, _, length, _ in table.rows())
        self._spans = plan(table, (lambda number: self._in_base[number] >= 0) if base is not None else None)
        self._span_of = array("I", bytes(4 * len(table)))
        for at, span in enumerate(self._spans):
            for number in span.numbers:
                self._span_of[number] = at
        self._state = bytearray([_ABSENT]) * len(self._spans)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        self._path = path
        self._linking = threading.Lock()
        self._links: dict[int, int | None] = {}  # pack -> descriptor of its link, None if it cannot be linked
        self._local = threading.local()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    @property
    def size(self) -> int:
        """Return the size of the file once all spans are there."""
        return self._spans[-1].base + self._spans[-1].end - self._spans[-1].start if self._spans else 0

    @property
    def missing(self) -> int:
        """Return the number of spans that are not local yet."""
        return len(self._state) - self._state.count(_HERE)

    def descriptors(self) -> set[int]:
        """Return the descriptors that a forked process must keep open to read from here, once all spans are local."""
        own = {self._fd, *(fd for fd in self._links.values() if fd is not None)}
        return own if self._base is None else own | self._base.descriptors()

    def sealed(self, number: int) -> bytes | memoryview:
        """Return the sealed bytes of a chunk, as stored; fetch it now if necessary."""
        if self._base is not None and self._in_base[number] >= 0:
            return self._base.sealed(self._in_base[number])
        place = self._table.place(number)
        return self._here(self._span(number)[1], place.offset, memoryview(bytearray(place.length)))

    def stream(self, number: int) -> tuple[bytes, bytes | memoryview]:
        """Return the id and sealed bytes of a chunk, for a thread that reads its neighbours next; valid until then.
        Neighbours in memory lie in several packs, one per checkpoint since they changed, so the last few spans are
        kept."""
        ident, _, offset, length, _ = self._table.row(number)
        if self._base is not None and self._in_base[number] >= 0:
            return ident, self._base.sealed(self._in_base[number])
        at, span = self._span(number)
        recent: dict[int, memoryview] = self._local.__dict__.setdefault("recent", {})
        data = recent.pop(at, None)
        if data is None:
            oldest = recent.pop(next(iter(recent))).obj if len(recent) >= RECENT else bulk_io.buffer(SPAN)
            data = self._here(span, span.start, _room_in(oldest, span.end - span.start))
        recent[at] = data  # most recently used
        begin = offset - span.start
        return ident, data[begin : begin + length]

    def _span(self, number: int) -> tuple[int, Span]:
        """Return the span of a chunk and its position, after fetching it if necessary."""
        at = self._span_of[number]
        if self._state[at] != _HERE:
            self._demand(at)
        return at, self._spans[at]

    def _scratch(self, size: int) -> memoryview:
        """Return this thread's scratch buffer, valid until its next call."""
        room = _room_in(self._local.__dict__.get("scratch", bytearray()), size)
        self._local.scratch = room.obj
        return room

    def _here(self, span: Span, offset: int, data: memoryview) -> memoryview:
        """Read a part of a span that is local."""
        fd = self._link(span.pack)
        at = offset if fd is not None else span.base + offset - span.start
        if bulk_io.read(fd if fd is not None else self._fd, data, at) != len(data):
            raise ImageRefused("the local copy of the image is cut short", "Run the restore again.")
        return data

    def _link(self, pack: int) -> int | None:
        with self._linking:
            if pack not in self._links:
                self._links[pack] = self._open_link(pack)
            return self._links[pack]

    def _open_link(self, pack: int) -> int | None:
        path = self._path.with_name(LINKS.replace("*", str(pack)))
        path.unlink(missing_ok=True)
        if not self._store.link(layout.pack_name(self._manifest.packs[pack]), path):
            return None
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def fill(self, parallel: int = 4) -> None:
        """Fetch everything. The first failure stops it and is raised."""
        groups = neighbours(self._spans)
        if self._spans and self._link(self._spans[0].pack) is not None:
            parallel = min(parallel, LOCAL)
            if self.size >= CHECK_IN_PROCESSES:
                groups = self._by_processes(groups)
        with ThreadPoolExecutor(parallel, "fetch") as pool:
            jobs = [pool.submit(self._fetch, group) for group in groups]
            try:
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                for job in jobs:
                    job.cancel()
        for job in done:
            job.result()

    def _by_processes(self, groups: list[list[int]]) -> list[list[int]]:
        """Verify linked packs in processes. Return the groups that none of them verified."""
        linked = [self._link(self._spans[group[0]].pack) is not None for group in groups]
        here = [group for group, is_linked in zip(groups, linked, strict=True) if is_linked]
        left = [group for group, is_linked in zip(groups, linked, strict=True) if not is_linked]
        count = min(MOST_PROCESSES, os.cpu_count() or 1)
        shares = [here[n::count] for n in range(count)]
        made: list[WorkerProcess] = []
        try:
            try:
                for share in shares:
                    made.append(WorkerProcess(partial(self._vouch, share), self.descriptors()))
            except OSError as error:
                _logger.warning("cannot start more processes to check chunks: %s", error)
            for share, worker in zip_longest(shares, made):
                if worker is not None and all(worker.hear() == _VERIFIED for _ in share):
                    self._arrived([at for group in share for at in group])
                else:
                    left += share  # this process checks it again, and so finds and reports the cause
        finally:
            close_all(made)
        return left

    def _vouch(self, share: list[list[int]], sock: socket.socket) -> None:
        """Verify a share of the groups, in a worker process."""
        for group in share:
            self._check(group, self._local_data(group))
            sock.sendall(_VERIFIED)

    def reserve(self) -> None:
        """Allocate the disk space for all spans in advance. Raise OSError if there is not enough."""
        if self._spans and self._link(self._spans[0].pack) is None:
            try:
                os.posix_fallocate(self._fd, 0, self.size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system without fallocate
                    raise

    def check_store(self) -> None:
        """Check that the store has every needed pack in the needed length, else raise ImageRefused. Fetch nothing."""
        needed: dict[str, int] = {}
        for span in self._spans:
            pack = self._manifest.packs[span.pack]
            needed[pack] = max(span.end, needed.get(pack, 0))
        check_packs(self._store, needed)

    def bring(self, numbers: Iterable[int], parallel: int = 4) -> None:
        """Fetch the spans of these chunks now."""
        needed = {self._span_of[number] for number in numbers}
        groups = [[at for at in group if at in needed] for group in neighbours(self._spans)]

        def run(group: list[int]) -> None:
            for part in self._claim(group):
                self._fetch(part)

        with ThreadPoolExecutor(parallel, "first") as pool:
            list(pool.map(run, filter(None, groups)))

    def start_background(self, parallel: int = 2) -> None:
        """Prefetch missing spans in the background while `sealed` is answered on demand. Further calls do nothing."""
        if self._threads:
            return
        groups = neighbours(self._spans)
        lock = threading.Lock()

        def take() -> list[int] | None:
            with lock:
                return groups.pop(0) if groups else None

        def run() -> None:
            try:
                while not self._closed.is_set() and (group := take()) is not None:
                    for part in self._claim(group):
                        self._fetch(part)
            except BaseException as error:  # noqa: BLE001  a supervising loop: every reader gets it
                self._fail(error)

        self._threads = [threading.Thread(target=run, name=f"fill-{n}", daemon=True) for n in range(parallel)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """Stop fetching, and fail readers that wait for the store. Return False if a thread is still blocked in a
        request, which may take another minute."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        until = boottime() + _STOP_WAIT
        for thread in self._threads:
            thread.join(max(0.0, until - boottime()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Close the files. Call it when there are no more readers."""
        if not self.stop():
            return  # a thread still uses the descriptors: they are closed with the process
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for fd in self._links.values():
            if fd is not None:
                os.close(fd)
        self._links.clear()

    def _claim(self, group: list[int]) -> list[list[int]]:
        """Mark the absent spans as coming, and return them as stretches of neighbours."""
        parts: list[list[int]] = []
        with self._changed:
            for at in group:
                if self._state[at] == _ABSENT:
                    self._state[at] = _COMING
                    if parts and parts[-1][-1] == at - 1:
                        parts[-1].append(at)
                    else:
                        parts.append([at])
        return parts

    def _demand(self, at: int) -> None:
        with self._changed:
            while self._state[at] == _COMING and not self.failure and not self._closed.is_set():
                self._changed.wait()
            if self.failure:
                raise self.failure
            if self._state[at] == _HERE:
                return
            if self._closed.is_set():
                raise StoreUnreachable("the image was closed before all of it was fetched", "Run the restore again.")
            self._state[at] = _COMING
        try:
            self._fetch([at])
        except BaseException as error:
            self._fail(error)
            raise

    def _fetch(self, group: list[int]) -> None:
        """Read the spans with one request, verify every chunk, and keep them."""
        first, last = self._spans[group[0]], self._spans[group[-1]]
        if self._link(first.pack) is not None:
            self._check(group, self._local_data(group))
        else:
            data = memoryview(self._read(first.pack, first.start, last.end - first.start))
            self._check(group, data)
            for span in (self._spans[at] for at in group):
                bulk_io.write(self._fd, data[span.start - first.start : span.end - first.start], span.base)
        self._arrived(group)

    def _local_data(self, group: list[int]) -> memoryview:
        first, last = self._spans[group[0]], self._spans[group[-1]]
        return self._here(first, first.start, self._scratch(last.end - first.start))

    def _check(self, group: list[int], data: memoryview) -> None:
        """Raise ImageRefused unless every chunk in these spans is as it was sealed."""
        start, scratch = self._spans[group[0]].start, memoryview(bytearray(layout.MAX_CHUNK))
        for at in group:
            for number in self._spans[at].numbers:
                ident, _, offset, length, size = self._table.row(number)
                begin = offset - start
                self._sealer.prove(ident, data[begin : begin + length], size, scratch)

    def _arrived(self, group: Iterable[int]) -> None:
        with self._changed:
            for at in group:
                self._state[at] = _HERE
            self._changed.notify_all()

    def _read(self, pack: int, start: int, length: int) -> bytes:
        began, pause = boottime(), _FIRST_RETRY_WAIT
        while True:
            try:
                data = read_range(self._store, self._manifest.packs[pack], start, length)
                if pause > _FIRST_RETRY_WAIT and self._on_stall is not None:
                    self._on_stall(boottime() - began, None)
                return data
            except Unreachable as error:
                if self._on_stall is None:
                    raise
                self._on_stall(boottime() - began, error)
                if self._closed.wait(pause):
                    raise StoreUnreachable("closed while waiting for the store", error.hint) from error
                pause = min(pause * 2, _LONGEST_RETRY_WAIT)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()


def _room_in(buffer: object, size: int) -> memoryview:
    """Return `size` bytes of the buffer, or of a new one if it is too small."""
    assert isinstance(buffer, bytearray)
    return memoryview(buffer if len(buffer) >= size else bulk_io.buffer(max(size, SPAN)))[:size]
