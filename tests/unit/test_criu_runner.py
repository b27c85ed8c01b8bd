"""Check the conversation with CRIU's worker, with the test as CRIU."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate.criu import runner
from cmdop_migrate.criu.rpc import ReqType, decode, encode
from cmdop_migrate.criu.runner import HungUp, Notification, converse
from cmdop_migrate.errors import CriuFailed, TimedOut

REQUEST = {"type": ReqType.RESTORE, "opts": {"images_dir_fd": 3}}


class Peer:
    """Play CRIU's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.answers = sock, list[bool]()

    def hear(self) -> dict[str, Any]:
        return decode("req", self.sock.recv(65536))

    def notify(self, script: str, fds: list[int] | None = None, **more: int) -> bool:
        note = {"script": script, **more}
        data = encode("resp", {"type": ReqType.NOTIFY, "success": True, "notify": note})
        socket.send_fds(self.sock, [data], fds or [])
        self.answers.append(bool(self.hear().get("notify_success")))
        return self.answers[-1]

    def finish(self, success: bool, **more: Any) -> None:
        self.sock.send(encode("resp", {"type": ReqType.RESTORE, "success": success, **more}))


@contextlib.contextmanager
def criu(play: Callable[[Peer], None]) -> Iterator[tuple[socket.socket, Peer]]:
    """Yield our end, and a thread that plays the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    peer = Peer(theirs)

    def run() -> None:
        with theirs:
            play(peer)

    thread = threading.Thread(target=run)
    thread.start()
    with ours:
        yield ours, peer
    thread.join(10)
    assert not thread.is_alive()


def test_notifications_descriptors_and_phases() -> None:
    def play(peer: Peer) -> None:
        assert peer.hear() == REQUEST
        reader, writer = os.pipe()
        time.sleep(0.05)
        peer.notify("setup-namespaces", pid=77)
        peer.notify("orphan-pts-master", [reader])
        peer.notify("pre-resume")
        os.write(writer, b"alive")
        os.close(reader)
        os.close(writer)
        peer.finish(True, restore={"pid": 77})

    seen: list[Notification] = []
    with criu(play) as (ours, peer):
        began = time.monotonic()
        response = converse(ours, REQUEST, lambda note: (seen.append(note), time.sleep(0.2))[0], timeout=10)
        took = time.monotonic() - began
    assert [note.script for note in seen] == ["setup-namespaces", "orphan-pts-master", "pre-resume"]
    assert seen[0].pid == 77 and seen[1].pid is None and seen[1].fds == response.fds
    assert response.success and response.pid == 77 and peer.answers == [True] * 3
    assert list(response.phases) == ["setup-namespaces", "orphan-pts-master", "pre-resume", "finish"]
    assert response.phases["setup-namespaces"] >= 0.05
    assert sum(response.phases.values()) <= took - 3 * 0.2, "time in callbacks is not CRIU's"
    (fd,) = response.fds
    assert not os.get_inheritable(fd) and os.read(fd, 5) == b"alive"
    os.close(fd)


def test_failure_reported_by_criu_is_a_result_and_descriptors_are_closed() -> None:
    def play(peer: Peer) -> None:
        peer.hear()
        peer.notify("orphan-pts-master", [0])
        peer.finish(False, cr_errno=-17, cr_errmsg="it failed\n")

    before = set(os.listdir("/proc/self/fd"))
    with criu(play) as (ours, _):
        response = converse(ours, REQUEST, timeout=10)
    assert (response.success, response.errno, response.errmsg, response.fds) == (False, -17, "it failed", ())
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("how", [False, KeyboardInterrupt(), ValueError("token")])
def test_refusal_is_sent_to_criu_before_it_is_raised(how: bool | BaseException) -> None:
    def play(peer: Peer) -> None:
        peer.hear()
        assert peer.notify("pre-restore")
        assert not peer.notify("post-restore")
        assert not peer.notify("network-unlock"), "once refused, refused for good"
        peer.finish(False)

    def refuse(note: Notification) -> bool:
        if note.script != "post-restore":
            return True
        if isinstance(how, BaseException):
            raise how
        return False

    with criu(play) as (ours, _):
        if how is False:
            response = converse(ours, REQUEST, refuse, timeout=10)
            assert not response.success and response.refused_at == "post-restore"
        else:
            with pytest.raises(type(how)):
                converse(ours, REQUEST, refuse, timeout=10)


def test_refusal_at_pre_resume_kills_the_root_without_an_answer() -> None:
    with subprocess.Popen(["sleep", "60"]) as root:

        def play(peer: Peer) -> None:
            peer.hear()
            peer.notify("post-restore", pid=root.pid)
            with contextlib.suppress(KeyError):
                peer.notify("pre-resume")

        with criu(play) as (ours, peer):
            response = converse(ours, REQUEST, lambda note: note.script != "pre-resume", timeout=10)
        assert root.wait(5) == -9
    assert not response.success and response.refused_at == "pre-resume"
    assert peer.answers == [True, False], "the second is the hang-up"


def test_time_out_covers_the_whole_conversation() -> None:
    def play(peer: Peer) -> None:
        peer.hear()
        for _ in range(5):
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                peer.notify("tick")

    with criu(play) as (ours, _), pytest.raises(TimedOut):
        converse(ours, REQUEST, timeout=0.5)


def test_time_in_callbacks_does_not_count_for_the_time_out() -> None:
    def play(peer: Peer) -> None:
        peer.hear()
        peer.notify("pre-dump")
        peer.finish(True)

    with criu(play) as (ours, _):
        assert converse(ours, REQUEST, lambda _: time.sleep(1.2), timeout=1).success


@pytest.mark.parametrize("when", ["at once", "after a notification"])
def test_worker_that_ends_without_answer_raises_hung_up(when: str) -> None:
    def play(peer: Peer) -> None:
        peer.hear()
        if when != "at once":
            peer.notify("pre-restore")

    with criu(play) as (ours, _), pytest.raises(HungUp):
        converse(ours, REQUEST, timeout=10)


WORKER = """#!{python}
import signal, socket, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({mark!r}, "w").write(str(__import__("os").getpid()))
time.sleep(60)
"""


def test_worker_that_ignores_sigterm_is_killed_after_a_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_RELEASE_WITHIN", 2.0)
    mark, fake, cancelled = tmp_path / "pid", tmp_path / "criu", list[bool]()
    fake.write_text(WORKER.format(python=sys.executable, mark=str(mark)))
    fake.chmod(0o755)
    with pytest.raises(TimedOut):
        runner.run(
            [str(fake)], REQUEST, tmp_path / "log", what="x", timeout=2, on_cancel=lambda: cancelled.append(True)
        )
    assert cancelled == [True]
    assert not Path(f"/proc/{mark.read_text()}").exists()


def test_error_of_a_dead_worker_contains_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("(00.1) Error (criu/x.c:1): No space left on device\n")
    with pytest.raises(CriuFailed, match=r"dump of t: CRIU died \(exit status 3\): there is no space left") as caught:
        runner.run(["sh", "-c", "exit 3"], REQUEST, tmp_path / "log", what="dump of t", timeout=5)
    assert "criu/x.c:1" in caught.value.message
