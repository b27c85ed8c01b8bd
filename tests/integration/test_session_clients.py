"""Clients come and go, stop and die; the session and the others do not notice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cmdop_migrate.errors import TimedOut
from cmdop_migrate.holder import protocol
from cmdop_migrate.host import kill
from cmdop_migrate.session.holder_client import Channel
from tests.support import fenced_sessions
from tests.support.host import CM, Host, until
from tests.support.patience import bound
from tests.support.pty_client import Pty

DETACH = b"\x1cd"


def attach(host: Host, session: str, *options: str, rows: int = 24, cols: int = 80) -> Pty:
    return Pty([*CM, "attach", session, *options], host.env(), rows, cols)


def test_counter_with_clients_that_come_and_go(host: Host) -> None:
    """The scenario of the issue: no byte lost or doubled between a killed, a detached and a later client."""
    script = "for i in $(seq 1e6); do echo $i; sleep .05; done"
    made = host.start("bash", "-c", script, name="t")
    with attach(host, "t") as first, attach(host, "t") as second:
        first.expect(b"\r\n10\r\n")
        second.expect(b"\r\n10\r\n")
        until(lambda: host.sessions()[0]["clients"] == 2)
        first.process.kill()
        first.wait()
        until(lambda: host.sessions()[0]["clients"] == 1)
        second.expect(b"\r\n40\r\n")
        second.type(DETACH)
        assert second.wait() == 0
        at = int(re.findall(rb"detached from t at byte (\d+)", second.seen)[0])
        shown = bytes(second.seen[: second.seen.rfind(b"\x1b>\x1b[0m")])
        assert len(shown) == at
        with attach(host, "t", "--from", str(at)) as third:
            third.expect(b"\r\n60\r\n")
            third.type(DETACH)
            assert third.wait() == 0
            rest = bytes(third.seen[: third.seen.rfind(b"\x1b>\x1b[0m")])
    numbers = (shown + rest).split(b"\r\n")
    end = len(numbers) - 1
    assert numbers[:end] == [str(number).encode() for number in range(1, end + 1)] and end >= 60
    assert b"\r\n".join(numbers) == host.cm_json("output", "t")["data"].encode()[: len(shown + rest)]
    row = host.sessions()[0]
    assert (row["pid"], row["clients"], row["state"]) == (made["pid"], 0, "running")
    assert os.path.exists(f"/proc/{made['pid']}")


def test_survives_the_end_of_everything_but_its_holder(host: Host) -> None:
    made = host.start("bash", "-c", "for i in $(seq 1e6); do echo $i; sleep .05; done", name="t")
    follower = subprocess.Popen([*CM, "output", "t", "--follow"], env=host.env(), stdout=subprocess.PIPE)
    waiter = subprocess.Popen([*CM, "wait", "t"], env=host.env(), stdout=subprocess.PIPE)
    with attach(host, "t") as client:
        client.expect(b"\r\n5\r\n")
        holder = host.holder(made["session"])
        mine = [pid for pid in cmdop_pids(host) if pid != holder]
        assert len(mine) >= 3
        for pid in mine:
            os.kill(pid, signal.SIGKILL)
        client.wait()
    for process in (follower, waiter):
        process.communicate()
    row = host.sessions()[0]
    assert (row["state"], row["pid"], row["clients"]) == ("running", made["pid"], 0)
    seq = host.cm_json("output", "t")["to"]
    until(lambda: host.cm_json("output", "t")["to"] > seq)


def cmdop_pids(host: Host) -> list[int]:
    """Every process of this toolkit for this host."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if not entry.isdecimal() or b"cmdop_migrate" not in Path(f"/proc/{entry}/cmdline").read_bytes():
                continue
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if f"CMDOP_MIGRATE_STATE_DIR={host.state}".encode() in environ:
            found.append(int(entry))
    return found


def test_death_of_the_holder_is_reported(host: Host) -> None:
    made = host.start("bash", "-c", "trap '' TERM HUP; echo up; while :; do sleep 1; done", name="t")
    session = made["session"]
    host.wait_for("t", "up")
    waiter = subprocess.Popen([*CM, "--json", "wait", "t"], env=host.env(), stdout=subprocess.PIPE)
    follower = subprocess.Popen([*CM, "--json", "output", "t", "--follow"], env=host.env(), stdout=subprocess.PIPE)
    with attach(host, "t") as client:
        client.expect(b"up")
        pids = host.pids(session)
        os.kill(host.holder(session), signal.SIGKILL)
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 2, "the session dies at once")
        assert client.wait() == 4
        assert b"its holder died" in client.seen and client.is_sane()
    assert json.loads(waiter.communicate(timeout=10)[0])["reason"] == "its holder died"
    last = json.loads(follower.communicate(timeout=10)[0].splitlines()[-1])
    assert (last["event"], last["reason"]) == ("exit", "its holder died")
    row = host.sessions()[0]
    assert (row["state"], row["note"]) == ("exited", "its holder died")
    assert host.cm_json("show", "t")["exit"]["reason"] == "its holder died"
    waited = host.cm_json("wait", "t")
    assert (waited["exited"], waited["reason"]) == (None, "its holder died")
    assert "its holder died" in host.fails("output", "t", status=4, code="session_exited")["message"]
    assert "its holder died" in host.fails("send", "t", "x", status=4, code="session_exited")["message"]
    assert [one["event"] for one in host.events(session)] == ["started", "attached", "holder_lost"]
    host.assert_clean(ended=True)


def test_clients_that_do_not_read(host: Host) -> None:
    """A stopped client and one that never reads delay no other client, and cost the holder no memory."""
    session = host.start("sh", "-c", "read x; seq 600000; echo finished; read x; echo end", name="t")["session"]
    holder = host.holder(session)
    before = pss(holder)
    silent = protocol.connect(str(host.run / f"{session}.sock"), 5)
    silent.sendall(protocol.control({"op": "attach", "actor": "", "read_only": True}))
    with attach(host, "t") as stopped:
        until(lambda: host.sessions()[0]["clients"] == 1)
        stopped.process.send_signal(signal.SIGSTOP)
        host.ok("send", "t", "", "--enter")
        host.wait_for("t", "finished")
        assert pss(holder) - before < 6 << 20
        stopped.process.send_signal(signal.SIGCONT)
        stopped.expect(b"finished")
        assert b"too much to keep" in stopped.seen
        host.ok("send", "t", "", "--enter")
        assert stopped.wait() == 0 and b"[t: exited 0]" in stopped.seen
    silent.close()
    got = host.cm_json("output", "t", "--from", "0")
    assert got["lost"] == got["from"] > 0 and got["data"].endswith("end\r\n") and got["to"] - got["from"] == 1 << 20
    until(lambda: not os.path.exists(f"/proc/{holder}"))


def pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise AssertionError


def test_nonsense_from_a_client(host: Host) -> None:
    """A session survives malformed messages from a client."""
    session = host.start("cat", name="t")["session"]
    path = str(host.run / f"{session}.sock")
    for nonsense in (
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff" * 100,
        protocol.control({"op": "attach"}),
        protocol.control({"op": "kill", "signal": "x", "grace": 1}),
        protocol.control({"op": "kill", "signal": 999, "grace": 100}),
        *(protocol.control({"op": "kill", "signal": 18, "grace": float(never)}) for never in ("inf", "nan", "1e300")),
        protocol.control({"op": "fresh", "token": 1, "until": float("inf"), "since": 0}),
        protocol.control({"op": "resize", "rows": 1 << 40, "cols": -1}),
        protocol.control({"op": "send", "data": "\u20ac", "actor": "x"}),
        protocol.control({"op": "attach", "actor": "x", "from": -1}),
        b"\x00\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x00\x01{",
        b"\x00\x00\x01\x86\xa0" + b'{"op":' + b"[" * 99_994,
        protocol.output(1, b"x"),
    ):
        sock = protocol.connect(path, 5)
        sock.sendall(nonsense)
        sock.settimeout(0.2)
        try:
            sock.recv(65536)
        except (TimeoutError, ConnectionError):
            pass
        sock.close()
    # asks and asks, never reads; then types a lot into a session that is gone from its list
    sock = protocol.connect(path, 1)
    try:
        for _ in range(20000):
            sock.sendall(protocol.control({"op": "status"}))
    except (BlockingIOError, ConnectionError):
        pass
    sock.close()
    assert host.sessions()[0]["state"] == "running"
    host.ok("send", "t", "still here", "--enter")
    host.wait_for("t", "still here")


def test_more_clients_than_are_taken(host: Host) -> None:
    session = host.start("cat", name="t")["session"]
    socks = []
    for _ in range(530):
        socks.append(protocol.connect(str(host.run / f"{session}.sock"), 5))
    time.sleep(0.3)
    error = host.fails("send", "t", "x", status=6, code="unreachable")
    assert "closed the connection" in error["message"]
    for sock in socks:
        sock.close()
    host.ok("send", "t", "back", "--enter")
    host.wait_for("t", "back")


def test_wait_without_a_time_limit(host: Host) -> None:
    host.start("cat", name="t")
    waiter = subprocess.Popen([*CM, "wait", "t", "--for", "now", "--timeout", "999999d"], env=host.env(), stdout=-1)
    host.ok("send", "t", "now", "--enter")
    assert waiter.communicate(timeout=20)[0] == b"now\n" and waiter.returncode == 0


def test_kill_escalates(host: Host) -> None:
    host.start("bash", "-c", "trap '' TERM HUP INT; echo up; while :; do sleep 1; done", name="t")
    host.wait_for("t", "up")
    began = time.monotonic()
    assert host.cm_json("kill", "t", "--grace", "1s")["exit"] == 137
    assert time.monotonic() - began > 1
    host.start("sleep", "1000", name="u")
    assert host.cm_json("kill", "u", "--signal", "9")["exit"] == 137
    host.assert_clean(ended=True)


def test_kill_of_one_that_does_not_end_is_not_called_done(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.start("bash", "-c", "trap '' TERM HUP; echo up; while :; do sleep 1; done", name="t")
    host.wait_for("t", "up")
    monkeypatch.setattr(
        kill, "END_WITHIN", -29.0
    )  # for example its holder is stopped, and does not kill it after its grace
    with pytest.raises(TimedOut, match="did not end within"):
        kill.kill(fenced_sessions.records(host), "t", signal.SIGTERM, 30.0)
    assert host.sessions()[0]["state"] == "running" and "killed" not in host.ok("events", "t")


def test_kill_with_a_grace_of_a_month(host: Host) -> None:
    host.start("sh", "-c", "trap 'exit 3' USR1; echo up; while :; do sleep 0.1; done", name="t")
    host.wait_for("t", "up")
    assert host.cm_json("kill", "t", "--signal", "USR1", "--grace", "30d")["exit"] == 3


def test_kill_ends_an_interactive_shell(host: Host) -> None:
    host.start("bash", "-i", name="t")
    host.ok("send", "t", "sleep 1000 & echo up$((1+1))", "--enter")
    host.wait_for("t", "up2")
    began = time.monotonic()
    host.ok("kill", "t")
    assert time.monotonic() - began < bound(4.5)
    host.assert_clean(ended=True)


def test_kill_with_a_stopped_holder(host: Host) -> None:
    session = host.start("sleep", "1000", name="t")["session"]
    os.kill(host.holder(session), signal.SIGSTOP)
    assert "does not answer" in host.ok("ls")
    host.ok("kill", "t")
    assert host.sessions()[0]["state"] == "exited"
    host.assert_clean(ended=True)


def test_output_by_number(host: Host) -> None:
    host.start("sh", "-c", "echo 0123456789; read x; echo more; read x", name="t")
    host.wait_for("t", "9")
    assert host.cm_json("output", "t", "--from", "4") == {"data": "456789\r\n", "from": 4, "to": 12, "lost": 0}
    assert host.cm_json("output", "t", "--from", "12") == {"data": "", "from": 12, "to": 12, "lost": 0}
    host.fails("output", "t", "--from", "13", status=2, code="usage")
    host.fails("output", "t", "--from", "13", "--follow", status=2, code="usage")
    host.fails("wait", "t", "--for", "x", "--from", "13", status=2, code="usage")
    assert b"no output has number 13" in attach_fails(host, "t", "--from", "13")
    sent = host.cm_json("send", "t", "", "--enter")
    assert sent["seq"] == 1 and sent["at"] == 12
    host.wait_for("t", "more", "--from", "12")
    follower = subprocess.Popen([*CM, "output", "t", "--follow"], env=host.env(), stdout=subprocess.PIPE)
    host.ok("send", "t", "", "--enter")
    whole = b"0123456789\r\n\r\nmore\r\n\r\n"
    assert follower.communicate(timeout=10)[0] == whole
    assert host.cm("output", "t").stdout == whole
    assert host.cm("output", "t", "--follow", "--from", "12").stdout == whole[12:]
    assert host.cm_json("output", "t", "--from", "4")["data"].encode() == whole[4:]


def attach_fails(host: Host, session: str, *options: str) -> bytes:
    with attach(host, session, *options) as client:
        assert client.wait() == 2 and client.is_sane()
        return bytes(client.seen)


def test_follow_at_a_slow_pace_gets_everything(host: Host) -> None:
    """The session ends long before its reader has caught up."""
    host.start("sh", "-c", "read x; seq 100000; echo end", name="t")
    follower = subprocess.Popen([*CM, "output", "t", "--follow"], env=host.env(), stdout=subprocess.PIPE)
    time.sleep(0.5)
    host.ok("send", "t", "", "--enter")
    host.cm_json("wait", "t")
    time.sleep(2.5)  # longer than a holder waits with its farewell
    whole = follower.communicate(timeout=20)[0]
    assert whole.split() == [str(number).encode() for number in range(1, 100001)] + [b"end"]


def test_wait(host: Host) -> None:
    host.start("sh", "-c", "printf 'one tw'; sleep 0.7; printf 'o three\\n'; read x; exit 5", name="t")
    found = host.cm_json("wait", "t", "--for", "t[w]o")
    assert (found["matched"], found["seq"]) == ("two", 7)
    host.fails("wait", "t", "--for", "four", "--timeout", "300ms", status=11, code="timed_out")
    host.fails("wait", "t", "--timeout", "300ms", status=11, code="timed_out")
    host.fails("wait", "t", "--for", "(", status=2, code="usage")
    assert host.cm_json("wait", "t", "--for", "^o", "--from", "0")["seq"] == 1
    waiter = subprocess.Popen([*CM, "--json", "wait", "t", "--for", "never"], env=host.env(), stdout=subprocess.PIPE)
    time.sleep(0.5)
    host.ok("send", "t", "", "--enter")
    said = json.loads(waiter.communicate(timeout=10)[0])
    assert waiter.returncode == 4 and said["exited"] == 5
    done = host.cm("--json", "wait", "t", "--for", "never")
    assert done.returncode == 4 and json.loads(done.stdout) == said
    assert host.cm_json("wait", "t", "--for", "three")["matched"] == "three"
    assert host.cm_json("wait", "t")["exited"] == 5


def test_inputs_are_attributed_and_ordered(host: Host) -> None:
    session = host.start("sh", "-c", "while read x; do echo got $x; done", name="t")["session"]
    host.ok("send", "t", "first", "--enter", "--actor", "ann")
    host.ok("send", "t", "half ", "--actor", "ann")
    sent = host.cm_json("send", "t", "whole", "--enter", "--actor", "bob")
    host.wait_for("t", "got half whole")
    lines = journal(host, session)
    assert [(one["actor"], one["originators"], one["text"], one["token"]) for one in lines] == [
        ("ann", ["ann"], "first\r", 1),
        ("bob", ["ann", "bob"], "half whole\r", 1),
    ]
    assert [one["seq"] for one in lines] == [1, 2] and sent["seq"] == 2


def journal(host: Host, session: str) -> list[dict[str, object]]:
    """Its whole lines: one may have been cut by a full disk, and must not take the next one along."""
    lines = []
    for line in (host.state / "sessions" / session / "inputs.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def test_passwords_are_not_journalled(host: Host) -> None:
    script = "stty -echo; echo ask; read x; stty echo; echo have ${#x}; read y"
    session = host.start("sh", "-c", script, name="t")["session"]
    host.wait_for("t", "ask")
    with attach(host, "t") as client:
        client.expect(b"ask")
        for key in "geheim":
            client.type(key)
            client.pump(0.02)
        client.type("\r")
        client.expect(b"have 6")
    host.ok("send", "t", "public", "--enter")
    host.cm_json("wait", "t")
    lines = journal(host, session)
    assert [one["text"] for one in lines] == [None, "public\r"]
    assert all(b"geheim" not in path.read_bytes() for path in host.state.rglob("*") if path.is_file())


def test_a_half_typed_password_is_not_journalled(host: Host, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    script = f"stty -echo; echo ask; until [ -e {shared}/go ]; do sleep 0.1; done; stty echo; echo late; read x"
    session = host.start("sh", "-c", script, name="t", options=("--share", str(shared)))["session"]
    host.wait_for("t", "ask")
    host.ok("send", "t", "gehe")
    (shared / "go").touch()
    host.wait_for("t", "late")
    host.ok("send", "t", "im", "--enter")
    host.cm_json("wait", "t")
    assert [one["text"] for one in journal(host, session)] == [None]


def test_send_to_a_session_that_does_not_read(host: Host) -> None:
    """Refused whole once it is full; what was taken arrives, and the session lives."""
    session = host.start("sh", "-c", "stty raw -echo; echo up; sleep 10; head -c 100000 | wc -c; sleep 100", name="t")
    host.wait_for("t", "up")
    codes = [host.cm("send", "t", "x" * 100_000).returncode for _ in range(6)]
    assert codes[0] == 0 and codes[-1] == 4
    error = host.fails("send", "t", "x" * 100_000, status=4, code="blocked")
    assert "nothing was sent" in error["message"]
    host.wait_for("t", "100000")
    assert pss(host.holder(session["session"])) < 16 << 20


def test_sends_of_many_arrive_whole(host: Host) -> None:
    host.start("sh", "-c", "stty -echo; while read x; do echo $x; done", name="t")
    senders = [subprocess.Popen([*CM, "send", "t", letter * 500, "--enter"], env=host.env()) for letter in "abcdefgh"]
    assert [one.wait(timeout=30) for one in senders] == [0] * 8
    host.ok("send", "t", "end", "--enter")
    host.wait_for("t", "^end")
    lines = [line for line in host.output("t").split("\r\n") if len(line) == 500]
    assert sorted(lines) == [letter * 500 for letter in "abcdefgh"]


def test_disk_full_while_running(host: Host, tmp_path: Path) -> None:
    """A full disk ends no session, and its user can still type; connected clients are notified how it ended."""
    host.state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "host-t", str(host.state)], check=True)
    try:
        session = host.start("sh", "-c", "while read x; do echo got $x; done; exit 3", name="t")["session"]
        host.ok("send", "t", "one", "--enter")
        fill = host.state / "fill"
        fd = os.open(fill, os.O_WRONLY | os.O_CREAT)
        try:
            while os.write(fd, b"x" * 4096):
                pass
        except OSError:
            os.close(fd)
        for number in range(4):
            host.ok("send", "t", "x" * 1500 + f" line{number}", "--enter")
        host.wait_for("t", "got x+ line3")
        assert host.sessions()[0]["state"] == "running"
        waiter = subprocess.Popen([*CM, "--json", "wait", "t"], env=host.env(), stdout=subprocess.PIPE)
        time.sleep(0.5)
        fill.unlink()
        host.ok("send", "t", "after", "--enter")
        host.wait_for("t", "got after")
        assert journal(host, session)[-1]["text"] == "after\r"
        host.ok("send", "t", "\x04")
        assert json.loads(waiter.communicate(timeout=10)[0])["exited"] == 3
        host.close()
    finally:
        subprocess.run(["umount", "-l", str(host.state)], check=True)


def test_disk_full_at_a_checkpoint(host: Host) -> None:
    """The disk is full at the freeze, or when the checkpoint is in the store: the session keeps running."""
    host.state.mkdir()
    host.extra["CMDOP_MIGRATE_STORE"] = f"file://{host.dir}/store"
    hook, fill = host.dir / "hooks" / "pre-freeze.d" / "one", host.state / "fill"
    hook.parent.mkdir(parents=True)
    hook.write_text(f"#!/bin/sh\ncat /dev/zero > {fill} 2> /dev/null\nexit 0\n")
    hook.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "host-t", str(host.state)], check=True)
    try:
        session = host.start("sh", "-c", "while read x; do echo got $x; done", name="t")["session"]
        error = json.loads(host.cm("--json", "checkpoint", "t").stdout)["error"]
        assert error["exit"] == 4 and "No space left" in error["message"], error
        with Channel(host.run / f"{session}.sock") as channel:
            assert "No space left" in channel.ask(op="freeze")["why"]
            assert channel.ask(op="saved", checkpoint="c1") == {"re": "saved"}
        host.ok("send", "t", "on", "--enter")
        host.wait_for("t", "got on")
        fill.unlink()
        hook.unlink()
        host.ok("checkpoint", "t", "--leave-running")
        assert host.sessions()[0]["state"] == "running"
        host.close()
    finally:
        subprocess.run(["umount", "-l", str(host.state)], check=True)


def test_its_terminal_cannot_be_found_at_a_checkpoint(host: Host) -> None:
    """Its /dev/pts was unmounted, before or during the freeze: no checkpoint is made, and the session resumes."""
    made = host.start("bash", "-c", "echo ready; while read -r x; do echo got $x; done", name="t")
    host.wait_for("t", "ready")
    host.ok("send", "t", "half")
    path = host.run / f"{made['session']}.sock"
    with Channel(path) as channel:
        assert "pid" in channel.ask(op="freeze")
        assert channel.ask(op="typeahead")["unread"] == "half"
        subprocess.run(["nsenter", "-m", "-p", "-r", "-t", str(made["pid"]), "umount", "-l", "/dev/pts"], check=True)
    host.ok("send", "t", "one", "--enter")
    host.wait_for("t", "got one")
    with Channel(path) as channel:
        assert "pid" in channel.ask(op="freeze")
        assert "cannot be read" in channel.ask(op="typeahead")["error"]
    host.ok("send", "t", "two", "--enter")
    host.wait_for("t", "got two")


def test_bad_sends(host: Host) -> None:
    host.start("cat", name="t")
    host.fails("send", "t", "", status=2, code="usage")
