"""A session as an object: started, looked at, talked to, ended; what it sees and what it may not see."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.host import Host, until
from tests.support.patience import bound


def test_start_show_end(host: Host) -> None:
    made = host.start("sleep", "1000", name="t")
    assert set(made) >= {"session", "name", "host", "token", "pid"}
    assert (made["name"], made["host"], made["token"]) == ("t", host.name, 1)
    row = host.sessions()[0]
    assert {"session", "name", "host", "state", "token", "clients", "idle_s", "rss"} <= set(row)
    assert (row["state"], row["pid"], row["clients"]) == ("running", made["pid"], 0)
    assert row["rss"] > 0
    shown = host.cm_json("show", made["session"][:8])
    assert [one["command"] for one in shown["tree"]][1:] == ["sleep 1000"]
    assert [one["inner_pid"] for one in shown["tree"]] == [1, 2]
    assert "sleep 1000" in host.ok("show", "t") and "running" in host.ok("ls")
    ended = host.cm_json("kill", "t")
    assert ended == {"session": made["session"], "exit": 143, "reason": "exited 143"}
    assert host.sessions()[0]["state"] == "exited"
    assert host.cm_json("kill", "t")["removed"] is True
    assert host.sessions() == []
    host.assert_clean()
    kinds = [one["event"] for one in host.events(made["session"])]
    assert kinds == ["started", "exited", "killed"]


def test_exit_codes_are_reported(host: Host) -> None:
    for command, code, reason in (
        ("exit 7", 7, "exited 7"),
        ("kill -9 $$", 137, "exited 137"),
        ("true", 0, "exited 0"),
    ):
        session = host.start("sh", "-c", f"sleep 0.2; {command}")["session"]
        assert host.cm_json("wait", session) == {"exited": code, "reason": reason, "seq": 0}
        assert host.cm_json("show", session)["exit"]["code"] == code


def test_no_descriptor_of_ours_leaks_into_a_session(host: Host) -> None:
    session = host.start("sleep", "1000")["session"]
    for pid in host.pids(session):
        fds = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        assert set(fds) == {"0", "1", "2"} and set(fds.values()) == {"/dev/pts/0"}, fds


def test_looks_like_the_host(host: Host) -> None:
    script = "id -un; hostname; echo $TERM $HOME; ls -d /proc/self /sys/kernel /dev/null /dev/shm; ps ax | wc -l; pwd"
    session = host.start("sh", "-c", script, options=("--cwd", "/usr"))["session"]
    host.cm_json("wait", session)
    lines = host.output(session).split()
    assert lines[:4] == ["root", os.uname().nodename, "xterm-256color", pwd.getpwnam("root").pw_dir]
    assert lines[-1] == "/usr" and int(lines[-2]) < 10


def test_environment(host: Host) -> None:
    host.extra["MINE"] = "of the caller"
    options = ("--env", "A=1", "--env", "MINE", "--env", "E=", "--env", "P=a=b")
    session = host.start("env", options=options)["session"]
    host.cm_json("wait", session)
    got = dict(line.split("=", 1) for line in host.output(session).split("\r\n") if line)
    assert {key: got[key] for key in ("A", "MINE", "E", "P")} == {
        "A": "1",
        "MINE": "of the caller",
        "E": "",
        "P": "a=b",
    }
    assert not [key for key in got if key.startswith("CMDOP_")]
    assert got["PATH"] and got["LANG"] == "C.UTF-8"
    host.fails("run", "-d", "--env", "NOT_THERE", "--", "true", status=2, code="usage")


def test_user(host: Host, tmp_path: Path) -> None:
    user = pwd.getpwnam("nobody")
    script = (
        'id -u; id -g; id -G; echo "$USER:$HOME:$LOGNAME"; echo written > $(tty); pwd; touch /root/x || echo refused'
    )
    session = host.start("sh", "-c", script, options=("--user", "nobody"))["session"]
    host.cm_json("wait", session)
    lines = host.output(session).split("\r\n")
    groups = " ".join(map(str, os.getgrouplist("nobody", user.pw_gid)))
    assert lines[:5] == [str(user.pw_uid), str(user.pw_gid), groups, f"nobody:{user.pw_dir}:nobody", "written"]
    assert lines[-2] == "refused"


def test_setuid_programs_work(host: Host) -> None:
    """sudo needs a setuid bit that the overlay honours; `su` and `sudo` are what people have."""
    session = host.start("sh", "-c", "sudo -n id -un; sudo -n -u nobody id -un")["session"]
    host.cm_json("wait", session)
    assert host.output(session).split() == ["root", "nobody"]
    script = "grep NoNewPrivs /proc/self/status; findmnt -no OPTIONS / | tr , '\\n' | grep -c nosuid"
    session = host.start("sh", "-c", script, options=("--user", "nobody"))["session"]
    host.cm_json("wait", session)
    assert host.output(session).split() == ["NoNewPrivs:", "0", "0"]


def test_changes_stay_in_the_session(host: Host, tmp_path: Path) -> None:
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    kept.write_text("host\n")
    gone.write_text("host\n")
    script = f"echo session > {kept}; rm {gone}; echo new > {tmp_path}/new; cat {kept}; ls {tmp_path}; sleep 1000"
    session = host.start("sh", "-c", script)["session"]
    host.wait_for(session, "new")
    assert (kept.read_text(), gone.read_text()) == ("host\n", "host\n")
    assert not (tmp_path / "new").exists()
    assert host.output(session).split() == ["session", "kept", "new"]
    changed = {one["path"]: one["change"] for one in host.cm_json("show", session)["files"]}
    assert changed == {str(kept): "changed", str(gone): "deleted", str(tmp_path / "new"): "added"}


def test_shared_directory_is_the_hosts_own(host: Host, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    session = host.start("sh", "-c", f"echo session > {shared}/x; cat {shared}/y", options=("--share", str(shared)))
    until(lambda: (shared / "x").exists())
    host.cm_json("wait", session["session"])
    assert (shared / "x").read_text() == "session\n"


def test_private_things_are_hidden(host: Host, tmp_path: Path) -> None:
    key = tmp_path / "elsewhere" / "keys"
    key.parent.mkdir()
    host.extra["CMDOP_MIGRATE_KEY_FILE"] = str(key)
    session = host.start("sh", "-c", f"read x; ls {host.state} {host.run} {key}; ls -d {tmp_path}")["session"]
    key.write_text("made while the session runs")
    host.ok("send", session, "", "--enter")
    host.cm_json("wait", session)
    assert host.output(session).count("No such file") == 3


@pytest.mark.parametrize("what", ["/", "/dev", "state", "above"])
def test_sharing_what_must_not_be_shared(host: Host, what: str) -> None:
    share = {"state": str(host.state), "above": str(host.dir)}.get(what, what)
    host.state.mkdir()
    host.fails("run", "-d", "--share", share, "--", "true", status=2, code="usage")
    host.assert_clean()


def test_two_hosts_with_equal_names(make_host: Callable[[str], Host]) -> None:
    a, b = make_host("host-a"), make_host("host-b")
    b.subnet = a.subnet
    made = [one.start("sleep", "1000", name="same") for one in (a, b)]
    assert made[0]["session"] != made[1]["session"]
    assert [len(one.sessions()) for one in (a, b)] == [1, 1]
    addresses = {one.cm_json("show", "same")["address"] for one in (a, b)}
    assert len(addresses) == 2 and a.group() != b.group()
    a.ok("kill", "same")
    assert b.sessions()[0]["state"] == "running"
    b.ok("kill", "same")


@pytest.mark.slow
def test_fifty_sessions_simultaneously(host: Host) -> None:
    began = time.monotonic()
    for number in range(50):
        host.start("sleep", "1000", name=f"s{number}")
        assert time.monotonic() - began < bound(150)
    rows = host.sessions()
    assert [row["state"] for row in rows] == ["running"] * 50
    assert len({row["pid"] for row in rows}) == 50
    host.ok("send", "s49", "x", "--enter")
    assert host.wait_for("s49", "x")["matched"] == "x"
