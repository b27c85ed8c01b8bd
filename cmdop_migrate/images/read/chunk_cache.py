"""Sealed chunks of one checkpoint, brought from the store into a local file, each checked as it arrives.

The file holds spans: neighbouring chunks of one pack, read with one request. Packs of a store on the same disk are not
copied: they get a second name beside the file.
Spans arrive all at once (`fill`), or on demand and in the background (`lazy`).
Bytes that do not verify are never written, never returned.
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

LINKS = "pack-*"  # names of packs that were linked, beside the file
WORTH, MOST = 64 << 20, 4  # bytes on this disk that are checked by processes, and how many of these
LOCAL = 2  # threads that read from this disk: more only wait for each other's interpreter
RECENT = 4  # spans that a thread keeps while it streams
_ABSENT, _COMING, _HERE = 0, 1, 2
_TRUE = b"1"
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
_STOP_WAIT = 1.0
_logger = log.get("images.cache")


class Base:
    """An image that is here already: what another one shares with it need not be fetched again."""

    def __init__(self, table: ChunkTable, cache: SealedCache) -> None:
        self._table, self._cache = table, cache

    def find(self, ident: bytes, length: int) -> int:
        """The number here of a chunk sealed to that many bytes; -1: it is not here."""
        number = self._table.find(ident)
        return number if number >= 0 and self._table.place(number).length == length else -1

    def sealed(self, number: int) -> bytes | memoryview:
        return self._cache.sealed(number)

    def descriptors(self) -> set[int]:
        return self._cache.descriptors()


class SealedCache:
    """Answers `sealed(number)` from the file; `fill` or `start_background` brings the rest."""

    def __init__(
        self,
        store: Store | None,
        manifest: Manifest,
        table: ChunkTable,
        sealer: Sealer,
        path: Path,
        on_stall: Callable[[float, Unreachable | None], None] | None = None,
        base: Base | None = None,
    ) -> None:
        """Without a store everything is in the file already. With `on_stall` an unreachable store is asked again until
        it answers, and each failure reported with the seconds waited so far, then None; without, it is an error."""
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
        self._state = bytearray([_ABSENT if store else _HERE]) * len(self._spans)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        self._path = path
        self._linking = threading.Lock()
        self._links: dict[int, int | None] = {}  # pack -> its descriptor, where it lies on this disk as it is
        self._local = threading.local()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC if store else os.O_RDONLY
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)

    @property
    def size(self) -> int:
        """Bytes of the file when all is there."""
        return self._spans[-1].base + self._spans[-1].end - self._spans[-1].start if self._spans else 0

    @property
    def missing(self) -> int:
        """Spans that are not here yet."""
        return len(self._state) - self._state.count(_HERE)

    def descriptors(self) -> set[int]:
        """What another process that has a copy of this must keep open, once all is here."""
        own = {self._fd, *(fd for fd in self._links.values() if fd is not None)}
        return own if self._base is None else own | self._base.descriptors()

    def sealed(self, number: int) -> bytes | memoryview:
        """The sealed bytes of a chunk, as stored; fetched now if need be."""
        if self._base is not None and self._in_base[number] >= 0:
            return self._base.sealed(self._in_base[number])
        place = self._table.place(number)
        return self._here(self._span(number)[1], place.offset, memoryview(bytearray(place.length)))

    def stream(self, number: int) -> tuple[bytes, bytes | memoryview]:
        """Its id, and the same, for a thread that will ask for its neighbours next; good until then. Neighbours in
        memory lie in several packs, as many as there were checkpoints since they changed: the last few stay."""
        ident, _, offset, length, _ = self._table.row(number)
        if self._base is not None and self._in_base[number] >= 0:
            return ident, self._base.sealed(self._in_base[number])
        at, span = self._span(number)
        recent: dict[int, memoryview] = self._local.__dict__.setdefault("recent", {})
        data = recent.pop(at, None)
        if data is None:
            oldest = recent.pop(next(iter(recent))).obj if len(recent) >= RECENT else bulk_io.buffer(SPAN)
            data = self._here(span, span.start, _room(oldest, span.end - span.start))
        recent[at] = data  # the last one now
        begin = offset - span.start
        return ident, data[begin : begin + length]

    def _span(self, number: int) -> tuple[int, Span]:
        """Where a chunk is, which is here now."""
        at = self._span_of[number]
        if self._state[at] != _HERE:
            self._demand(at)
        return at, self._spans[at]

    def _scratch(self, size: int) -> memoryview:
        """A buffer of this thread's own, for what is done with before the next is asked for."""
        room = _room(self._local.__dict__.get("scratch", bytearray()), size)
        self._local.scratch = room.obj
        return room

    def _here(self, span: Span, offset: int, data: memoryview) -> memoryview:
        """A part of a span that is here."""
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
        if self._store is not None:
            path.unlink(missing_ok=True)
            if not self._store.link(layout.pack_name(self._manifest.packs[pack]), path):
                return None
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def fill(self, parallel: int = 4) -> None:
        """Bring everything. The first failure stops it and is raised."""
        groups = neighbours(self._spans)
        if self._spans and self._link(self._spans[0].pack) is not None:
            parallel = min(parallel, LOCAL)
            if self.size >= WORTH:
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
        """What lies on this disk is checked by processes; -> what none of them vouched for."""
        linked = [self._link(self._spans[group[0]].pack) is not None for group in groups]
        here = [group for group, is_linked in zip(groups, linked, strict=True) if is_linked]
        left = [group for group, is_linked in zip(groups, linked, strict=True) if not is_linked]
        count = min(MOST, os.cpu_count() or 1)
        shares = [here[n::count] for n in range(count)]
        made: list[WorkerProcess] = []
        try:
            try:
                for share in shares:
                    made.append(WorkerProcess(partial(self._vouch, share), self.descriptors()))
            except OSError as error:
                _logger.warning("no more processes to check chunks with: %s", error)
            for share, one in zip_longest(shares, made):
                if one is not None and all(one.hear() == _TRUE for _ in share):
                    self._arrived([at for group in share for at in group])
                else:
                    left += share  # whatever it was, it is seen here, too, and can be told
        finally:
            close_all(made)
        return left

    def _vouch(self, share: list[list[int]], sock: socket.socket) -> None:
        """In the process."""
        for group in share:
            self._check(group, self._local_data(group))
            sock.sendall(_TRUE)

    def reserve(self) -> None:
        """Room on this disk for all that is to come: nobody else gets it meanwhile. OSError when there is none."""
        if self._spans and self._link(self._spans[0].pack) is None:
            try:
                os.posix_fallocate(self._fd, 0, self.size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of a file system that knows no such thing
                    raise

    def check_store(self) -> None:
        """That the store has every pack that is needed, as far as it is: ImageRefused. Nothing is brought."""
        assert self._store is not None
        needed: dict[str, int] = {}
        for span in self._spans:
            pack = self._manifest.packs[span.pack]
            needed[pack] = max(span.end, needed.get(pack, 0))
        check_packs(self._store, needed)

    def bring(self, numbers: Iterable[int], parallel: int = 4) -> None:
        """These chunks, now, and whatever lies between them."""
        wanted = {self._span_of[number] for number in numbers}
        groups = [[at for at in group if at in wanted] for group in neighbours(self._spans)]

        def run(group: list[int]) -> None:
            for part in self._claim(group):
                self._fetch(part)

        with ThreadPoolExecutor(parallel, "first") as pool:
            list(pool.map(run, filter(None, groups)))

    def start_background(self, parallel: int = 2) -> None:
        """Bring what is missing while `sealed` is answered on demand. Once."""
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
            except BaseException as error:  # noqa: BLE001  a supervising loop: every reader is told
                self._fail(error)

        self._threads = [threading.Thread(target=run, name=f"fill-{n}", daemon=True) for n in range(parallel)]
        for thread in self._threads:
            thread.start()

    def wait_filled(self, timeout: float | None = None) -> bool:
        """Until everything is here; False when the time ran out. Raises what made it impossible."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or not self.missing, timeout)
        if self.failure:
            raise self.failure
        return not self.missing

    def stop(self) -> bool:
        """Nothing more is fetched; whoever waits for the store is told. False: it keeps one waiting, who may be at it
        for a minute yet."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        until = boottime() + _STOP_WAIT
        for thread in self._threads:
            thread.join(max(0.0, until - boottime()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """When nobody reads any more."""
        if not self.stop():
            return  # it has them in use: they go when we do
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for fd in self._links.values():
            if fd is not None:
                os.close(fd)
        self._links.clear()

    def _claim(self, group: list[int]) -> list[list[int]]:
        """Mark the absent ones as coming; -> stretches of neighbours."""
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
        """Read the spans with one request, check every chunk, keep them."""
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
        """ImageRefused unless every chunk in these spans is as it was sealed."""
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
        assert self._store is not None
        began, pause = boottime(), _FIRST_WAIT
        while True:
            try:
                data = read_range(self._store, self._manifest.packs[pack], start, length)
                if pause > _FIRST_WAIT and self._on_stall is not None:
                    self._on_stall(boottime() - began, None)
                return data
            except Unreachable as error:
                if self._on_stall is None:
                    raise
                self._on_stall(boottime() - began, error)
                if self._closed.wait(pause):
                    raise StoreUnreachable("closed while waiting for the store", error.hint) from error
                pause = min(pause * 2, _LONGEST_WAIT)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()


def _room(buffer: object, size: int) -> memoryview:
    """So much of it, or of a larger one."""
    assert isinstance(buffer, bytearray)
    return memoryview(buffer if len(buffer) >= size else bulk_io.buffer(max(size, SPAN)))[:size]
