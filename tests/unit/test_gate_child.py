"""The gate's own machinery, without a session: what it is given, what it leaves, what it does when nothing can be started."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.holder import cgroup, gate_http
from cmdop_migrate.holder.gate import Gate
from tests.support.patience import bound

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a gate belongs to root")


class Asker:
    def __init__(self, path: str, timeout: float = 5.0, on_error: str = "deny") -> None:
        mount = cgroup.mount_point()
        self.group = f"{mount}/cmdop-migrate/test-{os.getpid()}-{os.urandom(4).hex()}"
        self.epoll = select.epoll()
        self.answers: list[tuple[bool, str, bool]] = []
        self.started: set[int] = set()
        order: dict[str, object] = {"address": path, "timeout": timeout, "on_error": on_error}
        self.gate = Gate(order, self.group, self.epoll, lambda *answer: self.answers.append(answer))

    def ask(self, within: float = 10.0) -> tuple[bool, str, bool]:
        self.gate.ask({"text": "x"})
        self.note()
        end = time.monotonic() + bound(within)
        while not self.answers:
            assert time.monotonic() < end
            for _ in self.epoll.poll(0.01):
                self.gate.on_output()
            pid = self.gate._pid
            found, status = os.waitpid(pid, os.WNOHANG) if pid else (0, 0)
            if found:
                self.gate.on_exit(found, status)
            self.gate.check(time.monotonic())
        return self.answers.pop()

    def close(self) -> None:
        """Reap only the processes started here: other children are servers of other tests."""
        self.note()
        self.gate.cancel()
        cgroup.remove(self.group)
        for pid in self.started:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def note(self) -> None:
        if self.gate._pid:
            self.started.add(self.gate._pid)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "gate"
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    yield path


def test_gate_process_gets_the_question_and_leaves_nothing_behind(script: Path, tmp_path: Path) -> None:
    script.write_text(
        f"#!/bin/sh\n(ls -l /proc/self/fd; env; cat; pwd; ps -o sid= -p $$) > {tmp_path}/seen\nsleep 1000 & echo no; exit 1\n"
    )
    asker = Asker(str(script))
    files = len(os.listdir("/proc/self/fd"))
    try:
        assert asker.ask() == (False, "no", False)
        seen = (tmp_path / "seen").read_text()
        assert '{"text": "x"}' in seen and "socket:" not in seen and "CMDOP" not in seen
        assert len(os.listdir("/proc/self/fd")) == files
        end = time.monotonic() + bound(5)
        while cgroup.pids(cgroup.gate(asker.group)):
            assert time.monotonic() < end, "what it left behind is ended"
            time.sleep(0.01)
        script.write_text("#!/bin/sh\nkill -40 $$\n")
        assert asker.ask() == (False, "the gate failed: killed by signal 40", True)
        script.write_text("#!/nowhere/sh\n")
        assert asker.ask() == (False, "the gate failed: not run: No such file or directory", True)
        script.write_text("#!/bin/sh\necho 'a\x1b[2Jb'; exit 1\n")
        assert asker.ask() == (False, "a[2Jb", False)
        assert len(os.listdir("/proc/self/fd")) == files
    finally:
        asker.close()


def test_gate_fails_without_descriptors_and_recovers(script: Path) -> None:
    asker = Asker(str(script))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        assert asker.ask() == (True, "", False)
        for spare in (0, 1, 2, 3):
            highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
            taken = []
            while len(os.listdir("/proc/self/fd")) <= highest + 1:
                taken.append(os.open("/dev/null", os.O_RDONLY))
                highest = max(highest, taken[-1])
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, before[1]))
            asker.gate.ask({"text": "x"})
            asker.note()
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in taken:
                os.close(fd)
            asker.gate.check(time.monotonic() + 100)
            assert asker.answers.pop()[0] is False
        assert asker.ask() == (True, "", False)
        assert len(os.listdir("/proc/self/fd")) == used
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        asker.close()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x", "http://[", "http://127.0.0.1:0/"])
def test_http_gate_without_a_server_fails(address: str) -> None:
    status, words = gate_http.call(address, b"{}", 2.0)
    assert status == gate_http.FAILED and words
