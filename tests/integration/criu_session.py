"""Provide a session small enough for CRIU tests: start, talk, dump through our page server, restore, clean up."""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import importlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cmdop_migrate import config
from cmdop_migrate.criu import page_server, request, runner
from cmdop_migrate.criu.image import pagemap
from cmdop_migrate.criu.page_server import PAGE, Target
from tests.support.patience import bound

SUBREAPER = 36


def find_criu() -> tuple[str, ...]:
    """Return the command of the CRIU to test with. There must be one: a skipped test proves nothing."""
    if named := os.environ.get("CMDOP_MIGRATE_CRIU"):
        return (named,)
    with contextlib.suppress(ImportError):
        provide: Any = importlib.import_module("cmdop_migrate.criu.install.find")
        if known := provide.find(None, config.load().state_dir / "criu"):
            return tuple(known.argv)
    found = shutil.which("criu")
    assert found, "no CRIU: set CMDOP_MIGRATE_CRIU, or run `cmdop-migrate doctor --fix`"
    return (found,)


@functools.cache
def version(criu: tuple[str, ...]) -> tuple[int, ...]:
    told = subprocess.run([*criu, "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(int(part) for part in told.split()[1].split("."))


class Memory:
    """Keep all dumped pages in this process, as page sink and source."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.runs: dict[Target, list[pagemap.Run]] = {}
        self.data: dict[Target, dict[int, bytearray]] = {}
        self.most = most  # pages an answer
        self.finished = False
        self.fail_after: int | None = None
        self.gate = threading.Event()  # it fails only once this is set
        self.asked: list[int] = []

    def open(self, target: Target) -> bool:
        self.target = target
        self.runs[target], self.data[target] = [], {}
        return False

    def run(self, vaddr: int, nr_pages: int, flags: int) -> None:
        self.runs[self.target].append(pagemap.Run(vaddr, nr_pages, flags))

    def window(self, vaddr: int, size: int) -> memoryview:
        size = min(size, (64 << 10) - vaddr % (64 << 10))
        buffer = bytearray(size)
        for at in range(0, size, PAGE):
            self.data[self.target][vaddr + at] = buffer
        return memoryview(buffer)

    def done(self) -> None:
        self.finished = True

    def read(self, target: Target, vaddr: int, nr_pages: int) -> Sequence[memoryview]:
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            self.gate.wait(20)
            raise OSError("the store is away")
        self.asked.append(nr_pages)
        known, out = self.data[target], []
        for at in range(vaddr, vaddr + min(nr_pages, self.most) * PAGE, PAGE):
            if at not in known:
                break
            buffer = known[at]
            first = next(start for start in range(at, at - (64 << 10), -PAGE) if known.get(start - PAGE) is not buffer)
            out.append(memoryview(buffer)[at - first : at - first + PAGE])
        return out


class Session:
    """Run one session in its own namespaces under `base`."""

    def __init__(self, base: Path, criu: tuple[str, ...]) -> None:
        self.base, self.criu = base, criu
        self.images = base / "images"
        for name in ("upper", "work", "rootfs", "images"):
            (base / name).mkdir(parents=True)
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        cgroups = next(words[1] for words in mounts if words[2] == "cgroup2")
        self.group = Path(cgroups) / f"cmdop-test-{os.getpid()}-{base.parent.name}"
        self.group.mkdir()
        self.pid, self.master, self.text = 0, -1, ""
        self.directory = os.open(self.images, os.O_RDONLY | os.O_CLOEXEC)
        lower = f"lowerdir=/,upperdir={base}/upper,workdir={base}/work"
        self._mount("-t", "overlay", "overlay", "-o", lower, str(base / "rootfs"))

    def _mount(self, *words: str) -> None:
        subprocess.run(["mount", *words], check=True)

    def start(self, *argv: str) -> Session:
        ours, theirs = socket.socketpair()
        launcher = str(Path(__file__).with_name("criu_launch.py"))
        with ours, theirs:
            command = [sys.executable, "-I", launcher, str(theirs.fileno()), str(self.base), str(self.group), *argv]
            with subprocess.Popen(command, pass_fds=(theirs.fileno(),)):
                theirs.close()
                ours.settimeout(20)
                self.pid = struct.unpack("i", ours.recv(4))[0]
                _, control, *_ = ours.recvmsg(1, socket.CMSG_SPACE(4))
                self.master = array.array("i", control[0][2])[0]
        return self

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """Wait until the session has printed `text` (since the last call)."""
        deadline = time.monotonic() + bound(seconds)
        while text not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.text[-2000:]!r}"
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                self.text += os.read(self.master, 1 << 16).decode(errors="replace")
        before, _, self.text = self.text.partition(text)
        return before

    def freeze(self, on: bool) -> None:
        (self.group / "cgroup.freeze").write_text("1" if on else "0")

    def dump_request(self, pages_fd: int | None, **more: Any) -> dict[str, Any]:
        spec = request.DumpSpec(
            pid=self.pid,
            images_dir_fd=self.directory,
            root=str(self.base / "rootfs"),
            freeze_cgroup=str(self.group),
            pages_fd=pages_fd,
            **more,
        )
        return request.dump(spec)

    def dump(self, memory: page_server.PageSink | None, timeout: float = 60, **more: Any) -> runner.Response:
        """Dump through our page server, or into files without one."""
        if memory is None:
            return runner.run(
                self.criu, self.dump_request(None, **more), self.images / "dump.log", what="dump", timeout=timeout
            )
        ours, theirs = socket.socketpair()
        outcome: list[BaseException] = []

        def take() -> None:
            try:
                page_server.receive(ours, memory, version(self.criu))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=take)
        with theirs:
            thread.start()
            try:
                response = runner.run(
                    self.criu,
                    self.dump_request(theirs.fileno(), **more),
                    self.images / "dump.log",
                    what="dump",
                    pass_fds=(theirs.fileno(),),
                    timeout=timeout,
                    on_cancel=lambda: ours.shutdown(socket.SHUT_RDWR),
                )
            finally:
                theirs.close()
                thread.join(30)
        assert not outcome, outcome
        return response

    def gone(self) -> None:
        """Wait for the end of a session after a dump that did not leave it running."""
        os.close(self.master)
        self.master = -1
        reap(self.pid)
        self.pid = 0

    def prepare_root(self) -> None:
        root = str(self.base / "rootfs")
        self._mount("--bind", root, root)
        self._mount("--make-private", root)

    def restore_request(self, **more: Any) -> dict[str, Any]:
        return request.restore(request.RestoreSpec(self.directory, str(self.base / "rootfs"), **more))

    def restore(self, on_notify: runner.OnNotify | None = None, timeout: float = 60, **more: Any) -> runner.Response:
        log_path = self.images / "restore.log"
        what = self.restore_request(**more)
        response = runner.run(self.criu, what, log_path, what="restore", on_notify=on_notify, timeout=timeout)
        self.pid, (self.master,) = response.pid, response.fds
        return response

    def close(self) -> None:
        for pid in {self.pid, *map(int, (self.group / "cgroup.procs").read_text().split())} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.freeze(False)
        if self.pid:
            reap(self.pid)
        if self.master >= 0:
            os.close(self.master)
        os.close(self.directory)
        while os.path.ismount(self.base / "rootfs"):
            subprocess.run(["umount", "-R", str(self.base / "rootfs")], check=True)
        deadline = time.monotonic() + bound(10)
        while (self.group / "cgroup.procs").read_text().split() and time.monotonic() < deadline:
            reap(-1, block=False)
            time.sleep(0.01)
        self.group.rmdir()


def reap(pid: int, block: bool = True) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0 if block else os.WNOHANG)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Become the parent of the session's root, which is an orphan, to wait for it."""
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(SUBREAPER, 0, 0, 0, 0)
