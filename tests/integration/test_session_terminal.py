"""Real terminal programs in sessions, through real terminals."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.integration.test_session_clients import DETACH, attach
from tests.support.host import CM, Host, until
from tests.support.patience import bound
from tests.support.pty_client import Pty

ALTERNATE, MAIN = b"\x1b[?1049h", b"\x1b[?1049l"


def needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


@needs("vim")
def test_vim_edits_and_redraws(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("first line\n")
    # By its short name: one that fills a line makes vim wait for Enter.
    host.start("vim", "-u", "NONE", "-n", file.name, name="v", options=("--cwd", str(tmp_path)))
    with attach(host, "v") as one:
        one.expect(b"first line")
        one.type("osecond line\x1b")
        one.expect(b"second line")
        one.type(DETACH)
        assert one.wait() == 0 and one.is_sane()
        assert one.seen.rfind(MAIN) > one.seen.rfind(ALTERNATE) >= 0
    with attach(host, "v", rows=30, cols=100) as two:
        two.expect(b"second line")
        for _ in range(20):  # it hears of the new size when the kernel tells it, perhaps after the keys
            two.type(":set lines? columns?\r")
            two.pump(0.3)
            if b"lines=30" in two.seen and b"columns=100" in two.seen:
                break
            two.type("\r")
        assert b"lines=30" in two.seen and b"columns=100" in two.seen, two.seen[-500:]
        two.type("\r:wq\r")
        assert two.wait() == 0
        assert b"[v: exited 0]" in two.seen and two.is_sane()
    assert file.read_text() == "first line\n"
    changed = [one for one in host.cm_json("show", "v")["files"] if one["path"] == str(file)]
    assert [one["change"] for one in changed] == ["changed"]


@needs("vim")
def test_vim_repaints_when_its_screen_is_no_longer_kept(host: Host, tmp_path: Path) -> None:
    """The bytes that switched to the other screen, and painted it, were evicted long ago."""
    host.extra["CMDOP_MIGRATE_RING_SIZE"] = "4KiB"
    host.start("vim", "-u", "NONE", "-n", name="v")
    with attach(host, "v") as one:
        one.type("ihallo welt\x1b")
        one.expect(b"hallo")
        for _ in range(30):
            one.type(":redraw!\r")
            one.pump(0.03)
        one.type(DETACH)
        one.wait()
    assert host.cm_json("show", "v")["output"]["start"] > 0
    with attach(host, "v") as two:
        assert two.expect(ALTERNATE) < 200
        two.pump(0.5)
        two.expect(b"hallo welt")
        two.type(":q!\r")
        assert two.wait() == 0


@needs("htop")
def test_htop(host: Host) -> None:
    host.start("htop", name="h")
    with attach(host, "h", rows=40, cols=120) as one:
        one.expect(b"Load average")
        one.expect(b"htop")
        one.type("q")
        assert one.wait() == 0 and b"exited 0" in one.seen


@needs("tmux")
def test_tmux_inside(host: Host) -> None:
    host.start("tmux", "new", "bash --norc", name="m")
    with attach(host, "m") as one:
        one.expect(b"bash")
        one.type("echo in$((20+22))side\r")
        one.expect(b"in42side")
        one.type(DETACH)
        one.wait()
    with attach(host, "m") as two:
        two.expect(b"in42side")
        two.type("exit\r")
        assert two.wait() == 0


@needs("tmux")
def test_attach_inside_tmux(host: Host, tmp_path: Path) -> None:
    """The other way round: a person's tmux is the terminal."""
    host.start("bash", "--norc", name="b")
    server = ["tmux", "-L", f"t{os.getpid()}", "-f", os.devnull]
    subprocess.run([*server, "new", "-d", "-x", "90", "-y", "20", *CM, "attach", "b"], env=host.env(), check=True)
    try:
        subprocess.run([*server, "send-keys", "stty size; echo at$((40+2))", "Enter"], check=True)

        def screen() -> str:
            return subprocess.run([*server, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout

        until(lambda: "at42" in screen() and re.search(r"^(19|20) 90$", screen(), re.MULTILINE))
    finally:
        subprocess.run([*server, "kill-server"], check=False)
    assert host.sessions()[0]["state"] == "running"


def test_window_size_follows(host: Host) -> None:
    host.start("bash", "--norc", name="b")
    with attach(host, "b", rows=33, cols=101) as one:
        one.type("stty size\r")
        one.expect(b"33 101")
        one.type("trap 'stty size' WINCH\r")
        one.pump(0.3)
        one.resize(44, 132)
        one.process.send_signal(signal.SIGWINCH)
        for _ in range(30):  # bash runs the trap after the next line, which may overtake the signal
            one.type("\r")
            one.pump(0.3)
            if b"44 132" in one.seen:
                break
        one.expect(b"44 132")
        with attach(host, "b", "--read-only", rows=10, cols=10) as watcher:
            watcher.expect(b"44 132")
            watcher.type("exit\r")
            one.type("stty size; echo same$((1+1))\r")
            one.expect(b"44 132", after=one.expect(b"same$"))
            one.expect(b"same2")


def test_job_control(host: Host) -> None:
    host.start("bash", "--norc", "-i", name="b")
    with attach(host, "b") as one:
        one.type("sleep 1000\r")
        one.expect(b"sleep 1000\r\n")
        until(lambda: any("sleep" in p["command"] for p in host.cm_json("show", "b")["tree"]))
        one.type("\x1a")
        one.expect(b"Stopped")
        one.type("bg\r")
        one.expect(b"sleep 1000 &")
        one.type("fg\r")
        one.expect(b"sleep 1000\r\n", after=one.expect(b"fg\r\n"))
        one.type("\x03")
        one.type("echo free$((1+1))\r")
        one.expect(b"free2")
        assert b"no job control" not in one.seen


def test_ctrl_backslash_reaches_the_session_when_doubled(host: Host) -> None:
    host.start("bash", "-c", "trap 'echo quit$((1+1))' QUIT; echo up; while :; do sleep 0.1; done", name="b")
    with attach(host, "b") as one:
        one.expect(b"up")
        one.type(b"\x1c\x1c")
        one.expect(b"quit2")
        one.type(b"\x1c")
        one.pump(0.2)
        one.type(b"d")
        assert one.wait() == 0


@pytest.mark.parametrize("how", ["process", "job", "term", "hup"])
def test_terminal_is_sane_after_a_killed_attach(host: Host, how: str) -> None:
    host.start("sh", "-c", r"printf '\033[?1049h\033[?1000h\033[?2004h\033[?25lready'; sleep 1000", name="t")
    with attach(host, "t") as one:
        one.expect(b"ready")
        assert not one.is_sane()
        number = {"term": signal.SIGTERM, "hup": signal.SIGHUP}.get(how, signal.SIGKILL)
        (os.killpg if how == "job" else os.kill)(one.process.pid, number)
        one.process.wait(10)
        until(lambda: (one.pump(), one.is_sane())[1], what="termios as before")
        one.expect(b"\x1b>\x1b[0m")
        undone = bytes(one.seen[one.seen.find(b"ready") :])
        for code in (b"\x1b[?1049l", b"\x1b[?1000l", b"\x1b[?2004l", b"\x1b[?25h"):
            assert code in undone
    assert host.sessions()[0]["state"] == "running"


def test_attach_when_its_terminal_vanishes(host: Host) -> None:
    host.start("sleep", "1000", name="t")
    one = attach(host, "t")
    until(lambda: host.sessions()[0]["clients"] == 1)
    os.close(one.slave)
    os.close(one.master)
    assert one.process.wait(10) in (0, -signal.SIGHUP)
    until(lambda: host.sessions()[0]["clients"] == 0)
    assert "Traceback" not in (host.state / "log" / "cmdop-migrate.log").read_text()


def test_a_stopped_and_continued_attach_is_raw_again(host: Host) -> None:
    host.start("cat", name="t")
    with attach(host, "t") as one:
        until(lambda: (one.pump(0.05), not one.is_sane())[1])
        one.process.send_signal(signal.SIGSTOP)
        termios.tcsetattr(one.slave, termios.TCSANOW, one.before)  # as a shell with job control does
        one.process.send_signal(signal.SIGCONT)
        until(lambda: (one.pump(0.05), not one.is_sane())[1])
        one.type("x\r")
        one.expect(b"x\r\n")


def test_old_questions_are_not_asked_again(host: Host) -> None:
    """A replayed `where is the cursor` would have the terminal type its answer into the session."""
    questions = r"\033[6n\033[c\033[>c\033]11;?\007\033[18t\033Z\033P+q544e\033\\"
    host.start("sh", "-c", rf"printf 'a{questions}b\033[0mc\n'; stty -echo; cat >/dev/null", name="t")
    host.wait_for("t", "b")
    with attach(host, "t") as one:
        one.expect(b"c\r\n")
        assert b"ab\x1b[0mc\r\n" in one.seen
        one.type(DETACH)
        one.wait()


def test_a_quiet_session_is_shown_immediately(host: Host) -> None:
    """What was printed comes with the answer to `attach`: it must not wait for the next output."""
    host.start("sh", "-c", "echo here; sleep 1000", name="t")
    host.wait_for("t", "here")
    for _ in range(6):
        with attach(host, "t") as one:
            one.expect(b"here\r\n", within=5)
            one.type(DETACH)
            assert one.wait() == 0


def test_end_of_the_session_while_attached(host: Host) -> None:
    host.start("bash", "--norc", name="t")
    with attach(host, "t") as one, attach(host, "t", "--read-only") as two:
        two.expect(b"# ")  # it is there, however busy the machine
        one.type("echo last words; exit 9\r")
        for client in (one, two):
            assert client.wait() == 0 and client.is_sane()
            assert b"last words" in client.seen and b"[t: exited 9]" in client.seen


def test_run_attaches(host: Host) -> None:
    with Pty([*CM, "run", "--name", "t", "--", "bash", "--norc"], host.env(), 31, 97) as one:
        one.expect(b"# ")
        one.type("stty size; tty; echo pid$$\r")
        one.expect(b"31 97")
        one.expect(b"/dev/pts/0")
        one.expect(b"pid2")
        one.type(DETACH)
        assert one.wait() == 0
        assert b"come back with: cmdop-migrate attach t" in one.seen
    assert host.sessions()[0]["state"] == "running"


def test_attach_without_a_terminal(host: Host) -> None:
    host.start("cat", name="t")
    host.fails("attach", "t", status=2, code="usage")


def test_a_terminal_that_a_program_left_without_blocking(host: Host) -> None:
    """It takes what it can and says that it is full: that is not its end."""
    host.start("bash", "-c", "read; seq -f 'line %06.0f' 100000; echo all-done; read", name="t")
    with attach(host, "t") as one:
        until(lambda: not termios.tcgetattr(one.slave)[3] & termios.ICANON, what="attached")
        os.set_blocking(one.slave, False)
        one.type("\r")
        time.sleep(1.0)  # a reader that is slow
        one.expect(b"all-done")
        one.type(DETACH)
        assert one.wait() == 0 and one.is_sane()


def test_a_paste_that_the_program_does_not_read_for_long(host: Host) -> None:
    """It arrives when the program reads; meanwhile output comes and the terminal can be left."""
    script = "stty raw -echo; echo up; sleep 12; echo late; head -c 600000 | md5sum; sleep 1000"
    host.start("sh", "-c", script, name="t")
    data = bytes(b"0123456789abcdef" * 37500)
    with attach(host, "t") as one:
        one.expect(b"up")
        paste(one, data)
        one.expect(b"late", 20)
        one.expect(hashlib.md5(data, usedforsecurity=False).hexdigest().encode(), 20)
        paste(one, data)
        one.type(DETACH)
        one.expect(rb"bytes you typed came too late, and were discarded", 10)
        assert one.wait() == 0 and one.is_sane()


def paste(one: Pty, data: bytes) -> None:
    os.set_blocking(one.master, False)
    left = memoryview(data)
    end = time.monotonic() + bound(30)
    while left and time.monotonic() < end:
        try:
            left = left[os.write(one.master, left[:4096]) :]
        except BlockingIOError:
            time.sleep(0.005)


def test_a_large_paste_arrives(host: Host) -> None:
    host.start("sh", "-c", "stty raw -echo; echo up; head -c 300000 | md5sum; sleep 1000", name="t")
    with attach(host, "t") as one:
        one.expect(b"up")
        data = bytes(b"0123456789abcdef" * 18750)
        paste(one, data)
        one.expect(hashlib.md5(data, usedforsecurity=False).hexdigest().encode(), 20)
