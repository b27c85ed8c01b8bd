"""Check the real CRIU on real sessions, as root: pages both ways, time-out, cancel, refusal, lost memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from criu_session import Memory, Session, find_criu, reap, subreaper, version

from cmdop_migrate.criu import page_server, runner
from cmdop_migrate.criu.image import pagemap, watched_paths
from cmdop_migrate.criu.install import find
from cmdop_migrate.criu.lazy.pager import Pager
from cmdop_migrate.errors import CriuFailed, ImageRefused, TimedOut
from tests.support.host import until
from tests.support.patience import bound

# Fills SIZE MiB, then counts; every so often it proves that its memory is what it was.
PROGRAM = """
import hashlib, os, sys, time
from multiprocessing import shared_memory
seed = os.urandom(1 << 16)
heap = [seed + bytes(1 << 18) + b'text %d ' % i * 65536 for i in range(SIZE)]
digest = lambda: hashlib.md5(b''.join(heap)).hexdigest()
import mmap
shared = mmap.mmap(-1, 1 << 20); shared[:] = os.urandom(1 << 20)
shared_digest = hashlib.md5(shared[:]).hexdigest()
child = os.fork()
if child == 0:
    while True: time.sleep(0.05)
before = digest()
print('READY', flush=True)
n = 0
while True:
    n += 1
    print('tick', n, flush=True)
    time.sleep(0.05)
    if n % 10 == 0:
        print('INTACT', digest() == before and hashlib.md5(shared[:]).hexdigest() == shared_digest, flush=True)
"""


# Holds one of each thing that CRIU treats specially, and says what is left of them when a line is typed.
HOLDINGS = """
import ctypes, fcntl, os, select, signal, socket, sys, threading
libc = ctypes.CDLL(None)
master, slave = os.openpty()
os.write(master, b'inner\\n')
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
client.sendall(b'in flight')
backlog = socket.create_connection(listener.getsockname())
left, right = socket.socketpair()
left.sendall(b'unix')
ghost = open('/srv/ghost', 'w+'); ghost.write('gone'); ghost.flush(); os.unlink('/srv/ghost')
lock = open('/srv/lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)
os.makedirs('/srv/watched')
watch = libc.inotify_init(); libc.inotify_add_watch(watch, b'/srv/watched', 0x100)
memfd = os.memfd_create('m'); os.write(memfd, b'memfd')
alarms = []
signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print('READY', flush=True)
sys.stdin.readline()
alarms.clear()
open('/srv/watched/x', 'w').close()
ghost.seek(0); os.lseek(memfd, 0, 0)
try:
    fcntl.flock(open('/srv/lock', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB); locked = False
except BlockingIOError:
    locked = True
while not alarms:
    signal.sigtimedwait([], 0.1)
try:
    backlog.sendall(b'x'); backlog.sendall(b'x'); reset = backlog.recv(1) == b''
except OSError:
    reset = True
print('HELD', os.read(slave, 9), server.recv(9), right.recv(9), ghost.read(), locked, os.read(memfd, 9),
      len(os.read(watch, 99)) > 0, threading.active_count(), reset, 'END', flush=True)
threading.Event().wait()
"""


def program(size: int) -> tuple[str, ...]:
    return ("/usr/bin/python3", "-c", PROGRAM.replace("SIZE", str(size)))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with subreaper():
        session = Session(tmp_path / "s", find_criu())
        try:
            yield session
        finally:
            session.close()


def parked(session: Session, size: int = 8) -> Memory:
    """Start a session, dump it through our page server, end it, and return its memory."""
    session.start(*program(size))
    session.wait_for("READY")
    memory = Memory()
    response = session.dump(memory)
    assert response.success and memory.finished
    assert not list(session.images.glob("pages-*.img")), "pages went through a file"
    session.gone()
    return memory


def lay_out(session: Session, memory: Memory, lazy: bool) -> int:
    return sum(
        pagemap.write(session.images, target, number, runs, memory, lazy=lazy)
        for number, (target, runs) in enumerate(memory.runs.items(), 1)
    )


class Later:
    """Supply the memory of one process to the pager."""

    def __init__(self, memory: Memory, pid: int) -> None:
        self.memory, self.target = memory, page_server.Target("process", pid)
        self.runs = [run for run in memory.runs[self.target] if run.flags & page_server.LAZY]

    def later(self) -> Iterator[tuple[int, int]]:
        return ((run.vaddr, run.end) for run in self.runs)

    def window(self, vaddr: int) -> tuple[int, int]:
        run = next(run for run in self.runs if run.vaddr <= vaddr < run.end)
        start = vaddr - vaddr % (64 << 10)
        return max(start, run.vaddr), min(start + (64 << 10), run.end)

    def read(self, start: int) -> bytes:
        _, end = self.window(start)
        return b"".join(self.memory.read(self.target, start, (end - start) // page_server.PAGE))

    def stretch(self, vaddr: int, most: int) -> tuple[int, int]:
        return self.window(vaddr)

    def fill(self, start: int, out: memoryview) -> bool:
        out[:] = self.read(start)
        return True


def processes(memory: Memory) -> set[int]:
    return {target.id for target in memory.runs if target.kind == "process"}


def test_eager_restore_from_pages_of_our_page_server(session: Session) -> None:
    memory = parked(session)
    assert {target.kind for target in memory.runs} == {"process", "shmem"}
    session.prepare_root()
    laid = lay_out(session, memory, lazy=False)
    assert laid == sum(run.nr_pages for runs in memory.runs.values() for run in runs)
    seen: list[str] = []
    session.text = ""
    response = session.restore(lambda note: seen.append(note.script))
    session.wait_for("INTACT True")
    assert {"setup-namespaces", "post-restore", "pre-resume", "orphan-pts-master"} <= set(seen)
    assert response.phases.keys() >= {"pre-resume", "finish"} and response.pid == session.pid
    assert not os.get_inheritable(session.master)
    with open(f"/proc/{session.pid}/stat") as stat:
        assert int(stat.read().rsplit(")")[1].split()[1]) == os.getpid(), "the root is not our child"


def test_lazy_restore_from_pages_of_our_page_server(session: Session) -> None:
    memory = parked(session)
    session.prepare_root()
    laid = lay_out(session, memory, lazy=True)
    total = sum(run.nr_pages for runs in memory.runs.values() for run in runs)
    assert laid < total / 2
    memory.asked.clear()
    session.text = ""
    with Pager(session.images, lambda pid: Later(memory, pid), lost_is_wrong) as pager:

        def secure(note: runner.Notification) -> bool:
            if note.script == "pre-resume":
                pager.secure(processes(memory))
            return True

        session.restore(secure, lazy_pages=True)
        session.wait_for("INTACT True")
        assert pager.wait()
    assert sum(memory.asked) >= total - laid
    session.text = ""
    session.wait_for("INTACT True")


def lost_is_wrong(error: BaseException) -> None:
    raise AssertionError("memory lost") from error


def test_memory_that_cannot_be_read_never_reads_as_zeros(session: Session) -> None:
    """Check that the session does not print INTACT False or crash, as it would if its userfaultfds were closed."""
    memory = parked(session)
    session.prepare_root()
    lay_out(session, memory, lazy=True)
    memory.asked.clear()
    memory.fail_after = 5
    session.text = ""
    errors: list[BaseException] = []

    def lost(error: BaseException) -> None:
        time.sleep(1.5)  # plenty of time to run into a hole, were there one
        with pytest.raises(AssertionError, match="no 'INTACT'"):
            session.wait_for("INTACT", 0.5)
        with open(f"/proc/{session.pid}/stat") as stat:
            assert stat.read().rsplit(")")[1].split()[0] in "SD", "alive, and blocked"
        os.kill(session.pid, signal.SIGKILL)
        errors.append(error)

    with Pager(session.images, lambda pid: Later(memory, pid), lost) as pager:

        def secure(note: runner.Notification) -> bool:
            if note.script == "pre-resume":
                pager.secure(processes(memory))
                memory.gate.set()
            return True

        session.restore(secure, lazy_pages=True)
        assert not pager.wait()
    assert isinstance(errors[0], OSError)


def test_memory_error_before_resume_fails_the_restore(session: Session) -> None:
    memory = parked(session, 1)
    session.prepare_root()
    lay_out(session, memory, lazy=True)

    def refused(pid: int) -> Later:
        raise ImageRefused("not this one", "Restore another.")

    errors: list[BaseException] = []
    pids: list[int] = []

    def lost(error: BaseException) -> None:
        os.kill(until(lambda: pids and pids[0], 10, "its root"), signal.SIGKILL)
        errors.append(error)

    with Pager(session.images, refused, lost) as pager:

        def secure(note: runner.Notification) -> bool:
            if note.pid:
                pids.append(note.pid)
            if note.script == "pre-resume":
                pager.secure(processes(memory))
            return True

        with pytest.raises((CriuFailed, ImageRefused)):
            session.restore(secure, lazy_pages=True)
    assert isinstance(errors[0], ImageRefused)


@pytest.mark.parametrize("how", ["false", "raise"])
@pytest.mark.parametrize("script", ["post-restore", "pre-resume"])
def test_a_refusal_leaves_no_process(session: Session, script: str, how: str) -> None:
    memory = parked(session, 1)
    session.prepare_root()
    lay_out(session, memory, lazy=False)
    pids: list[int] = []

    class Superseded(Exception):
        pass

    def refuse(note: runner.Notification) -> bool:
        if note.pid:
            pids.append(note.pid)
        if note.script == script and how == "raise":
            raise Superseded
        return note.script != script

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Superseded if how == "raise" else CriuFailed):
        session.restore(refuse)
    assert pids
    session.pid = pids[-1]
    with contextlib.suppress(ChildProcessError):
        os.waitpid(session.pid, 0)
    assert not os.path.exists(f"/proc/{session.pid}")
    session.pid = 0
    assert set(os.listdir("/proc/self/fd")) == before, "a descriptor leaked"


def test_dump_time_out_ends_the_worker_and_the_session_keeps_running(session: Session) -> None:
    """Let the page server never read: the dump hangs half-way, with parasites in the tasks."""

    class Stuck(Memory):
        def window(self, vaddr: int, size: int) -> memoryview:
            released.wait(20)
            raise OSError("never mind")

    released = threading.Event()
    session.start(*program(8))
    session.wait_for("READY")
    threading.Timer(2, released.set).start()
    began = time.monotonic()
    with pytest.raises(TimedOut):
        session.dump(Stuck(), timeout=1)
    assert time.monotonic() - began < bound(10)
    session.freeze(False)
    session.text = ""
    session.wait_for("INTACT True")
    response = session.dump(Memory())  # and it can be dumped still
    assert response.success


@pytest.mark.parametrize("frozen_before", [False, True])
def test_criu_killed_during_a_dump_leaves_the_session_intact(session: Session, frozen_before: bool) -> None:
    """Kill CRIU with its code inside the tasks: when they are thawed, that code removes itself."""
    session.start(*program(8))
    session.wait_for("READY")
    session.freeze(frozen_before)
    mark, plain = session.base / "worker.pid", session.criu
    session.criu = ("sh", "-c", f'echo $$ > {mark}; exec "$@"', "sh", *plain)
    version(session.criu)  # asked now: it writes the mark, too

    class Killer(Memory):
        def window(self, vaddr: int, size: int) -> memoryview:
            os.kill(int(mark.read_text()), signal.SIGKILL)
            raise OSError("CRIU is dead")

    with pytest.raises(CriuFailed, match="SIGKILL"):
        session.dump(Killer())
    session.criu = plain
    session.freeze(False)
    session.text = ""
    session.wait_for("INTACT True")
    assert session.dump(Memory()).success


def test_restored_root_is_a_child_of_the_process_that_spawned_the_worker(session: Session) -> None:
    """Do as the holder does: it starts the worker, this process talks, and the restored root is the child of the
    holder."""
    memory = parked(session, 1)
    session.prepare_root()
    lay_out(session, memory, lazy=False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        words = ["sh", "-c", '"$@" & wait; exec sleep 60', "holder", *session.criu, "swrk", str(theirs.fileno())]
        holder = subprocess.Popen(words, pass_fds=(theirs.fileno(),))
        try:
            theirs.close()
            response = runner.converse(ours, session.restore_request(), timeout=30)
            assert response.success
            session.pid, (session.master,) = response.pid, response.fds
            status = Path(f"/proc/{session.pid}/status").read_text()
            assert f"PPid:\t{holder.pid}\n" in status
            session.text = ""
            session.wait_for("INTACT True")
        finally:
            if session.pid:
                os.kill(session.pid, signal.SIGKILL)
            holder.kill()
            holder.wait()
            reap(session.pid)
            session.pid = 0


def test_session_dumped_with_leave_running_keeps_running(session: Session) -> None:
    session.start(*program(1))
    session.wait_for("READY")
    assert session.dump(Memory(), leave_running=True).success
    session.freeze(False)
    session.text = ""
    session.wait_for("INTACT True")


def test_ctrl_c_ends_the_worker_and_the_session_keeps_running(session: Session) -> None:
    session.start(*program(1))
    session.wait_for("READY")

    def interrupt(note: runner.Notification) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(
            session.criu, session.dump_request(None), session.images / "dump.log", what="dump", on_notify=interrupt
        )
    session.freeze(False)
    session.text = ""
    session.wait_for("INTACT True")


def test_kernel_objects_of_a_session_survive(session: Session) -> None:
    session.start("/usr/bin/python3", "-c", HOLDINGS)
    session.wait_for("READY")
    memory = Memory()
    watched = os.stat(f"/proc/{session.pid}/root/srv/watched")
    watched_paths.write(
        session.images, {(os.major(watched.st_dev) << 20 | os.minor(watched.st_dev), watched.st_ino): "/srv/watched"}
    )
    session.dump(memory)
    session.gone()
    session.prepare_root()
    lay_out(session, memory, lazy=False)
    session.text = ""
    session.restore()
    os.write(session.master, b"go\n")
    session.wait_for("HELD ")
    held = session.wait_for(" END").split()
    assert held == ["b'inner\\n'", "b'in", "flight'", "b'unix'", "gone", "True", "b'memfd'", "True", "2", "True"]


def test_pagemaps_written_by_criu_are_loaded(session: Session) -> None:
    session.start(*program(1))
    session.wait_for("READY")
    assert session.dump(None, leave_running=True).success
    theirs = {path.name: pagemap.load(path) for path in session.images.glob("pagemap-*.img")}
    for pages_id, runs in theirs.values():
        assert (session.images / f"pages-{pages_id}.img").stat().st_size == sum(
            r.nr_pages for r in runs
        ) * page_server.PAGE
    memory = Memory()
    assert session.dump(memory).success
    assert {pagemap.image_name(target) for target in memory.runs} == theirs.keys()


def test_worker_that_dies_silently_raises_criu_failed(session: Session, tmp_path: Path) -> None:
    fake = tmp_path / "criu"
    fake.write_text("#!/bin/sh\nkill -KILL $$\n")
    fake.chmod(0o755)
    session.start(*program(1))
    with pytest.raises(CriuFailed, match="SIGKILL"):
        runner.run((str(fake),), session.dump_request(None), session.images / "dump.log", what="dump", timeout=5)


def test_real_failure_of_criu_is_explained(session: Session) -> None:
    """Restore a session after a file that it has open was truncated."""
    session.start("/bin/bash", "-c", "exec 5>/srv/data; echo hello >&5; echo READY; while sleep 0.1; do :; done")
    session.wait_for("READY")
    memory = Memory()
    session.dump(memory)
    session.gone()
    session.prepare_root()
    lay_out(session, memory, lazy=False)
    (session.base / "rootfs/srv/data").write_text("x")
    with pytest.raises(CriuFailed, match="/srv/data has 1 bytes here and had 6") as caught:
        session.restore(timeout=30)
    assert "has bad size" in caught.value.message and "restore.log" in caught.value.hint


def test_child_that_outlives_the_worker_is_not_waited_for(tmp_path: Path) -> None:
    """Kill CRIU while it probes the kernel in a child: it leaves a stopped child with its end of our socket."""
    mark = tmp_path / "child.pid"
    fake = ("sh", "-c", f"sleep 300 & echo $! > {mark}; kill -9 $$", "sh")
    began = time.monotonic()
    with pytest.raises(CriuFailed, match="SIGKILL"):
        runner.run(fake, {"type": 1}, tmp_path / "log", what="dump", timeout=60)
    assert time.monotonic() - began < bound(30)
    pid = int(mark.read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 10, "its child is gone")


def test_half_written_cache_of_criu_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = tmp_path / "half"
    monkeypatch.setattr(find, "HALF_CACHE", str(half))
    half.touch()
    find.find(None, tmp_path)
    assert half.exists()  # another process may be writing it
    os.utime(half, (1, 1))
    find.find(None, tmp_path)
    assert not half.exists()
