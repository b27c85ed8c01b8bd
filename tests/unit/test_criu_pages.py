"""Check the page-server protocol with the test as CRIU, in both header forms, and the pagemap images."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu import page_server
from cmdop_migrate.criu.image import pagemap
from cmdop_migrate.criu.image.pagemap import Run, joined
from cmdop_migrate.criu.page_server import LAZY, PAGE, PARENT, PRESENT, ProtocolError, Target
from cmdop_migrate.criu.protobuf import Malformed

NEW, OLD = (4, 2), (4, 1)
BASE = 0x7F0000001000


def header(version: tuple[int, int], cmd: int, flags: int = 0, nr: int = 0, vaddr: int = 0, dst: int = 0) -> bytes:
    if version >= (4, 2):
        return struct.pack("<IIQQQ", cmd | flags << 16, 0xDEAD, nr, vaddr, dst)  # CRIU's padding is noise
    return struct.pack("<IIQQ", cmd | flags << 16, nr, vaddr, dst)


class Sink:
    """Provide windows that end at 64 KiB boundaries, like the chunker's."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.parts: list[tuple[int, bytearray]] = []

    def open(self, target: Target) -> bool:
        self.log.append(target)
        return False

    def run(self, vaddr: int, nr_pages: int, flags: int) -> None:
        self.log.append(Run(vaddr, nr_pages, flags))

    def window(self, vaddr: int, size: int) -> memoryview:
        buffer = bytearray(min(size, (64 << 10) - vaddr % (64 << 10)))
        self.parts.append((vaddr, buffer))
        return memoryview(buffer)

    def done(self) -> None:
        self.log.append("done")


class Source:
    def __init__(self, most: int = 1 << 20, error: Exception | None = None) -> None:
        self.most, self.error = most, error

    def read(self, target: Target, vaddr: int, nr_pages: int) -> list[bytes]:
        if self.error:
            raise self.error
        return [content(vaddr + i * PAGE) for i in range(min(nr_pages, self.most))]


def content(vaddr: int) -> bytes:
    return struct.pack("<Q", vaddr) * (PAGE // 8)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    with ours, theirs:
        yield ours, theirs


def background(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("version", [NEW, OLD])
def test_receive_reads_a_whole_dump(pair: tuple[socket.socket, socket.socket], version: tuple[int, int]) -> None:
    ours, criu = pair
    sink = Sink()
    thread, outcome = background(lambda: page_server.receive(ours, sink, version))
    criu.sendall(header(version, page_server.OPEN2, dst=7 << 8 | 1))
    assert criu.recv(1) == b"\0"
    payload = os.urandom(40 * PAGE)
    criu.sendall(header(version, page_server.ADD_F, PRESENT | LAZY, 40, BASE) + payload[:100])
    criu.sendall(payload[100:])
    criu.sendall(header(version, page_server.ADD_F, LAZY, 3, BASE + 100 * PAGE))  # announced, no pages
    criu.sendall(header(version, page_server.CHECK_PARENT))
    assert criu.recv(4) == b"\0\0\0\0"
    criu.sendall(header(version, page_server.OPEN2, dst=9 << 8 | 2))
    assert criu.recv(1) == b"\0"
    criu.sendall(header(version, page_server.ADD_F, PRESENT, 1, 0) + bytes(PAGE))
    criu.sendall(header(version, page_server.FORCE_CLOSE))
    assert criu.recv(4) == b"\0\0\0\0"
    thread.join(10)
    assert outcome == [41]
    assert sink.log == [
        Target("process", 7),
        Run(BASE, 40, PRESENT | LAZY),
        Run(BASE + 100 * PAGE, 3, LAZY),
        Target("shmem", 9),
        Run(0, 1, PRESENT),
        "done",
    ]
    assert [vaddr for vaddr, _ in sink.parts] == [BASE, 0x7F0000010000, 0x7F0000020000, 0]
    assert b"".join(part for _, part in sink.parts) == payload + bytes(PAGE)


BAD = {
    "left early": header(NEW, page_server.OPEN2, dst=0x101),
    "left inside a run": header(NEW, page_server.ADD_F, PRESENT, 2, BASE) + bytes(PAGE),
    "left inside a header": header(NEW, page_server.OPEN2, dst=0x101)[:20],
    "unknown command": header(NEW, 99),
    "unknown kind": header(NEW, page_server.OPEN2, dst=0x103),
    "opened twice": header(NEW, page_server.OPEN2, dst=0x101) * 2,
    "absurd length": header(NEW, page_server.ADD_F, PRESENT, 1 << 60, BASE),
    "crooked address": header(NEW, page_server.ADD_F, PRESENT, 1, 5),
}


@pytest.mark.parametrize("name", BAD)
def test_broken_dump_is_refused_and_never_finished(pair: tuple[socket.socket, socket.socket], name: str) -> None:
    ours, criu = pair
    sink = Sink()
    criu.sendall(BAD[name])
    criu.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError):
        page_server.receive(ours, sink, NEW)
    assert "done" not in sink.log
    assert ours.fileno() == -1


def test_failing_sink_closes_the_connection_to_criu(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, criu = pair

    class Full(Sink):
        def window(self, vaddr: int, size: int) -> memoryview:
            raise OSError("no room")

    criu.sendall(header(NEW, page_server.ADD_F, PRESENT, 1, BASE) + bytes(PAGE))
    with pytest.raises(OSError, match="no room"):
        page_server.receive(ours, Full(), NEW)
    with pytest.raises((ConnectionError, BrokenPipeError)):
        criu.sendall(bytes(1 << 20))


def test_runs_are_joined_up_to_the_longest_length() -> None:
    runs = [Run(BASE, 2, 4), Run(BASE + 2 * PAGE, 3, 4), Run(BASE + 5 * PAGE, 1, 6), Run(BASE + 9 * PAGE, 9, 6)]
    assert list(joined(runs)) == [Run(BASE, 5, 4), *runs[2:]]
    assert [run.nr_pages for run in joined(runs, 4)] == [4, 1, 1, 4, 4, 1]


@pytest.mark.parametrize(
    "runs",
    [
        [Run(BASE, 2, 4), Run(BASE + PAGE, 1, 4)],
        [Run(BASE, 1, 4), Run(BASE - PAGE, 1, 4)],
        [Run(BASE, 1, PARENT)],
        [Run(BASE, 0, 4)],
        [Run(BASE + 1, 1, 4)],
        [Run(BASE, 1, 0)],
    ],
)
def test_invalid_runs_are_refused(runs: list[Run]) -> None:
    with pytest.raises(ValueError, match="run"):
        list(joined(runs))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.sampled_from([4, 6])), max_size=30), st.integers(1, 50)
)
def test_joining_runs_keeps_every_page_and_its_flags(shape: list[tuple[int, int, int]], longest: int) -> None:
    at, runs = BASE, []
    for gap, count, flags in shape:
        at += gap * PAGE
        runs.append(Run(at, count, flags))
        at += count * PAGE

    def flat(runs: list[Run]) -> list[tuple[int, int]]:
        return [(run.vaddr + i * PAGE, run.flags) for run in runs for i in range(run.nr_pages)]

    result = list(joined(runs, longest))
    assert flat(result) == flat(runs)
    assert all(run.nr_pages <= longest for run in result)


RUNS = [Run(BASE, 300, PRESENT | LAZY), Run(BASE + 400 * PAGE, 2, PRESENT), Run(BASE + 402 * PAGE, 5, PRESENT | LAZY)]


@pytest.mark.parametrize("most", [1, 1 << 20])
@pytest.mark.parametrize(
    ("target", "lazy", "eager"),
    [
        (Target("process", 7), False, RUNS),
        (Target("process", 7), True, RUNS[1:2]),
        (Target("shmem", 7), True, RUNS),  # shared memory is never lazy
    ],
)
def test_written_pagemaps_are_loaded_again(
    tmp_path: Path, target: Target, lazy: bool, eager: list[Run], most: int
) -> None:
    written = pagemap.write(tmp_path, target, 3, RUNS, Source(most), lazy=lazy)
    assert written == sum(run.nr_pages for run in eager)
    pages_id, entries = pagemap.load(tmp_path / pagemap.image_name(target))
    assert pages_id == 3
    read = {run.vaddr + i * PAGE: run.flags for run in entries for i in range(run.nr_pages)}
    laid = {run.vaddr + i * PAGE for run in eager for i in range(run.nr_pages)}
    assert read == {
        run.vaddr + i * PAGE: PRESENT if run.vaddr + i * PAGE in laid else LAZY
        for run in RUNS
        for i in range(run.nr_pages)
    }
    assert (tmp_path / "pages-3.img").read_bytes() == b"".join(map(content, sorted(laid)))
    assert (tmp_path / "pages-3.img").stat().st_mode & 0o777 == 0o600


def test_pagemap_entry_has_both_page_counts() -> None:
    """Check the u32 for readers before CRIU 4.2, and the u64 for those since."""
    entry = pagemap._entry(Run(0x400000, 1, 4), 4)
    assert entry.hex() == "0880808002100120042801"


@pytest.mark.parametrize("keep", [0, 5, 8, 10, 13])
def test_truncated_pagemap_is_malformed(tmp_path: Path, keep: int) -> None:
    pagemap.write(tmp_path, Target("process", 1), 1, RUNS, Source(), lazy=True)
    path = tmp_path / "pagemap-1.img"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Malformed):
        pagemap.load(path)
