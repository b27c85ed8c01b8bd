"""Check the pager on a real userfaultfd, without CRIU, while a process changes its memory."""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from pager_subject import PAGE, pattern

from cmdop_migrate.criu.install import find
from cmdop_migrate.criu.lazy import userfaultfd
from cmdop_migrate.criu.lazy.address_space import BLOCK, Memory
from cmdop_migrate.criu.lazy.pager import SOCKET, Pager
from cmdop_migrate.errors import ImageRefused, Unexpected
from tests.integration.criu_session import find_criu, version
from tests.support.host import until

BASE, PAGES = 0x1000_0003, 4000  # not at the edge of a window
WINDOW = 16


class Pages:
    """Supply pages as an image does: in windows of 16 pages, slowly."""

    def __init__(self, pages: int = PAGES, pause: float = 0.0005) -> None:
        self.first, self.end = BASE, BASE + pages
        self.pause = pause
        self.gate = threading.Event()
        self.gate.set()
        self.fail_after = 1 << 60
        self.reads = 0

    def later(self) -> Iterator[tuple[int, int]]:
        yield self.first * PAGE, self.end * PAGE

    def window(self, vaddr: int) -> tuple[int, int]:
        start = vaddr // PAGE // WINDOW * WINDOW
        return max(start, self.first) * PAGE, min(start + WINDOW, self.end) * PAGE

    def read(self, start: int) -> bytes | None:
        self.reads += 1
        if self.reads > self.fail_after:
            raise ImageRefused("a chunk was changed", "Restore another.")
        self.gate.wait(20)
        time.sleep(self.pause)
        low, high = self.window(start)
        data = b"".join(pattern(number) for number in range(low // PAGE, high // PAGE))
        return None if not any(data) else data

    def stretch(self, vaddr: int, most: int) -> tuple[int, int]:
        start, end = self.window(vaddr)
        while end < self.end * PAGE and end + WINDOW * PAGE - start <= most:
            end = self.window(end)[1]
        return start, end

    def fill(self, start: int, out: memoryview) -> bool:
        at = 0
        while at < len(out):
            data = self.read(start + at) or bytes(WINDOW * PAGE)
            out[at : at + len(data)] = data
            at += len(data)
        return True


@contextmanager
def subject(folder: Path, seed: int, pages: int = PAGES, forks: int = 0) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, str(Path(__file__).with_name("pager_subject.py")), str(folder / SOCKET)]
    process = subprocess.Popen(
        [*words, str(BASE), str(pages), str(seed), str(forks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(process: subprocess.Popen[str], end: str) -> list[str]:
    assert process.stdout
    lines = []
    for line in process.stdout:
        if line.strip() == end:
            return lines
        lines.append(line.strip())
    raise AssertionError(f"it ended before {end}: {lines}")


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def fail(error: BaseException) -> None:
    raise AssertionError("lost") from error


@pytest.mark.parametrize("seed", range(6))
def test_lazily_restored_memory_is_correct_while_the_process_changes_its_mappings(tmp_path: Path, seed: int) -> None:
    pages = Pages(pause=(0.002, 0.008)[seed % 2])
    with Pager(tmp_path, lambda pid: pages, fail) as pager, subject(tmp_path, seed) as process:
        said(process, "RUNS")
        pager.secure({42})
        tell(process)
        wrong = said(process, "ACTED")
        assert pager.wait(), pager.lost
        tell(process)
        assert wrong + said(process, "END") == []
    assert pager.lost is None
    assert pages.reads < 3 * PAGES / WINDOW * 8, "the same is read over and over"


class Filler:
    """Decode for a thread; a stuck filler, as if its process were stopped, never returns its claim."""

    def __init__(self, stuck: threading.Event | None = None) -> None:
        self.buffer, self.stuck, self.asked = memoryview(bytearray(BLOCK)), stuck, 0

    def fill(self, memory: Memory, start: int, size: int) -> bool:
        self.asked += 1
        if self.stuck is not None:
            self.stuck.wait(60)
        return memory.fill(start, self.buffer[:size])


def test_window_of_a_stuck_thread_is_filled_by_others(tmp_path: Path) -> None:
    over = threading.Event()
    fillers = [Filler(over), Filler(), Filler()]
    pages = Pages()
    try:
        with Pager(tmp_path, lambda pid: pages, fail, fillers) as pager, subject(tmp_path, 8) as process:
            said(process, "RUNS")
            pager.secure({42})
            tell(process)
            wrong = said(process, "ACTED")
            assert pager.wait(), pager.lost
            assert fillers[0].asked == 1 and not over.is_set(), "it holds what it took"
            tell(process)
            assert wrong + said(process, "END") == []
    finally:
        over.set()


def test_missing_pages_never_read_as_zeros_while_the_holder_keeps_the_userfaultfds(tmp_path: Path) -> None:
    """Check that a thread that accesses a missing page stays blocked after the pager has ended, until `keep` is
    closed."""
    pages = Pages()
    pages.gate.clear()
    with subject(tmp_path, 1) as process:
        with Pager(tmp_path, lambda pid: pages, fail) as pager:
            said(process, "RUNS")
            pager.secure({42})
            kept = os.dup(pager.keep.fileno())
            pages.gate.set()
            tell(process)
        time.sleep(0.5)
        assert process.poll() is None
        stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[0]
        assert stat in "SD"
        os.killpg(process.pid, signal.SIGKILL)
        os.close(kept)
        assert process.stdout and "WRONG" not in process.stdout.read()


def test_refused_chunk_ends_the_session_before_userfaultfds_close(tmp_path: Path) -> None:
    pages = Pages()
    pages.fail_after = 20
    heard: list[BaseException] = []
    with subject(tmp_path, 2) as process:

        def lost(error: BaseException) -> None:
            time.sleep(0.3)  # plenty of time to run into a hole, were there one
            os.killpg(process.pid, signal.SIGKILL)
            heard.append(error)

        with Pager(tmp_path, lambda pid: pages, lost) as pager:
            said(process, "RUNS")
            tell(process)
            assert not pager.wait()
        assert [type(one) for one in heard] == [ImageRefused] and pager.lost is heard[0]
        assert process.stdout and "WRONG" not in process.stdout.read()


def test_secure_refuses_a_process_without_userfaultfd(tmp_path: Path) -> None:
    with Pager(tmp_path, lambda pid: Pages(), fail) as pager, subject(tmp_path, 3) as process:
        said(process, "RUNS")
        with pytest.raises(Unexpected, match="43"):
            pager.secure({42, 43})


def test_ended_process_has_no_missing_memory(tmp_path: Path) -> None:
    pages = Pages(pause=0.01)
    with Pager(tmp_path, lambda pid: pages, fail) as pager, subject(tmp_path, 4) as process:
        said(process, "RUNS")
        process.kill()
        process.wait()
        assert pager.wait()
        assert pages.reads < PAGES / WINDOW


def test_userfaultfds_of_ended_children_are_closed(tmp_path: Path) -> None:
    """A script that starts programs all the time, while its memory comes: of these there may be more than we may have
    files open."""
    pages = Pages(pause=0)
    pages.gate.clear()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lost(_: BaseException) -> None:
        os.killpg(process.pid, signal.SIGKILL)

    with Pager(tmp_path, lambda pid: pages, lost) as pager, subject(tmp_path, 0, forks=500) as process:
        said(process, "RUNS")
        pager.secure({42})
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, before[1]))
        try:
            tell(process)
            assert said(process, "ACTED") == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        pages.gate.set()
        assert pager.wait(), pager.lost
        tell(process)
        assert said(process, "END") == []


def test_userfaultfds_of_children_without_missing_memory_are_closed(tmp_path: Path) -> None:
    with Pager(tmp_path, lambda pid: Pages(pause=0), fail) as pager, subject(tmp_path, 1, forks=100) as process:
        said(process, "RUNS")
        assert pager.wait()
        before = len(os.listdir("/proc/self/fd"))
        tell(process)
        assert said(process, "ACTED") == []
        assert len(os.listdir("/proc/self/fd")) == before


def test_memory_without_a_mapping_is_reported_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check pages of the image for which the process has no mapping, without an event."""
    monkeypatch.setattr("cmdop_migrate.criu.lazy.address_space._UNMAPPED_FOR", 0.2)
    pages = Pages(PAGES + 3)
    heard: list[BaseException] = []
    with Pager(tmp_path, lambda pid: pages, heard.append) as pager, subject(tmp_path, 5) as process:
        said(process, "RUNS")
        assert not pager.wait()
        assert "no mapping" in str(heard[0])


def test_closing_the_pager_leaves_no_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with Pager(tmp_path, lambda pid: Pages(pause=0), fail) as pager, subject(tmp_path, 6) as process:
        said(process, "RUNS")
        assert pager.wait()
    until(lambda: len(os.listdir("/proc/self/fd")) == len(before), 5, "descriptors are closed")


def test_userfaultfd_probe_agrees_with_criu_check() -> None:
    criu = find.Criu(find_criu(), version(find_criu()), "private")
    assert userfaultfd.is_possible() == bool(find.features(criu, ("uffd-noncoop",)))


def test_userfaultfd_is_not_used_on_an_unknown_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert not userfaultfd.is_possible()
