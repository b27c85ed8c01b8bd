"""A gate checks each line: allowed lines are passed on, refused ones erased; a gate that hangs delays only its line."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate import config
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.session.holder_client import Channel
from tests.support import fenced_sessions
from tests.support.host import CM, Host, a_host, until
from tests.support.pty_client import Pty

GATE = """#!/bin/sh
read -r question
printf '%s\\n' "$question" >> "$(dirname "$0")/asked"
case $question in
    *forbidden*) echo "not today"; echo "and not tomorrow"; exit 1;;
    *hang*) [ -e "$(dirname "$0")/go" ] || sleep 1000;;
    *crash*) kill -9 $$;;
    *odd*) echo oops; exit 7;;
    *flood*) yes;;
esac
"""


def gate_at(directory: Path) -> Path:
    path = directory / "gate"
    path.write_text(GATE)
    path.chmod(0o755)
    return path


@contextmanager
def gated(directory: Path, gate: str, **settings: str) -> Iterator[Host]:
    extra = {"CMDOP_MIGRATE_GATE": gate, "CMDOP_MIGRATE_GATE_TIMEOUT": "1s"}
    with a_host(
        directory, extra={**extra, **{f"CMDOP_MIGRATE_{key}": value for key, value in settings.items()}}
    ) as host:
        yield host


def refused(host: Host, text: str, actor: str = "ann") -> str:
    error = json.loads(host.cm("--json", "send", "w", text, "--enter", "--actor", actor).stdout)["error"]
    assert (error["code"], error["exit"]) == ("not_admitted", 12), error
    return str(error["message"])


def decisions(host: Host, session: str) -> list[tuple[Any, ...]]:
    found = host.cm_json("inputs", session)["inputs"]
    return [(one["text"], one["gate"], one.get("why"), one["originators"]) for one in found if "gate" in one]


def pss(pid: int) -> int:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))


def test_executable_gate_admits_and_refuses_lines(tmp_path: Path) -> None:
    with gated(tmp_path, str(gate_at(tmp_path))) as host:
        session = host.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
        assert host.cm_json("send", "w", "good", "--enter", "--actor", "ann")["seq"] == 1
        host.wait_for("w", "did good")
        host.ok("send", "w", "forbid", "--actor", "bob")
        assert refused(host, "den\rnext").endswith("'w': not today")
        assert "exited 7: oops" in refused(host, "odd")
        assert "killed by SIGKILL" in refused(host, "crash")
        assert "no answer after 1 s" in refused(host, "hang")
        assert "no answer after 1 s" in refused(host, "flood")
        host.ok("send", "w", "after", "--enter", "--actor", "ann")
        host.wait_for("w", "did after")
        said = [line for line in host.output("w").splitlines() if line.startswith("did ")]
        assert said == ["did good", "did after"]
        found = decisions(host, session)
        assert found[:2] == [
            ("good\r", "allowed", None, ["ann"]),
            ("forbidden\r", "refused", "not today", ["bob", "ann"]),
        ]
        assert [one[1] for one in found[2:]] == ["refused"] * 4 + ["allowed"]
        assert host.cm_json("inputs", "w", "--verify")["ok"]
        question = json.loads((tmp_path / "asked").read_text().splitlines()[1])
        assert (question["session"], question["name"], question["host"]) == (session, "w", "host-t")
        assert (question["actor"], question["originators"], question["text"]) == ("ann", ["bob", "ann"], "forbidden\r")
        assert (question["seq"], question["token"], question["secret"]) == (2, 1, False)
        kinds = [one["event"] for one in host.events(session) if one["event"].startswith("gate_")]
        assert kinds == ["gate_refused"] + ["gate_failed"] * 4
        assert "forbidden" not in (host.state / "events.jsonl").read_text(), "what was typed is for the journal alone"
        assert cgroup.pids(cgroup.gate(host.group(session))) == [], "what hung, and what that had started, is gone"
        assert pss(host.holder(session)) < 12 << 20


def test_a_refused_line_is_reported_and_erased(tmp_path: Path) -> None:
    """In a shell with line editing: the refused line goes, even with the cursor in the midst of it."""
    with gated(tmp_path, str(gate_at(tmp_path)), GATE_TIMEOUT="10s") as host:
        host.start("bash", "--norc", name="w", options=("--env", "PS1=ready> "))
        with Pty([*CM, "attach", "w", "--actor", "ann"], host.env()) as ann:
            ann.expect(b"ready> ")
            ann.type("echo right")
            ann.expect(b"right")
            ann.type("\x01echo forbidden; \r")
            at = ann.expect(b"[the line was refused, and erased: not today]")
            ann.type("echo a$((1+1))b\r")
            ann.expect(b"a2b\r\n", after=at)
            ann.type("exit\r")
            ann.expect(b"exited 0")
        assert "\nforbidden" not in host.output("w") and "\nright" not in host.output("w")


def test_a_hanging_gate_blocks_nothing_else(tmp_path: Path) -> None:
    with gated(tmp_path, str(gate_at(tmp_path)), GATE_TIMEOUT="60s") as host:
        session = host.start(
            "bash", "-c", f"(n=0; while :; do echo n$((n+=1)); sleep 0.1; done) & {fenced_sessions.ECHO}", name="w"
        )["session"]
        with hanging(host, "hang") as one:
            seq = talk.output(fenced_sessions.records(host), "w", None).end
            until(lambda: talk.output(fenced_sessions.records(host), "w", None).end > seq)
            host.ok("turn", "w", "seize", "--actor", "root")
            assert one.wait(20) == 12
        (dropped,) = [one for one in host.cm_json("inputs", "w")["inputs"] if "turn" in one]
        assert dropped["dropped"] == 1, "its Enter"
        host.ok("turn", "w", "release", "--actor", "root")
        (tmp_path / "go").touch()
        host.ok("send", "w", "\x15fine", "--enter", "--actor", "ann")  # the gate sees the keys: what was killed, too
        host.wait_for("w", "did fine")
        (tmp_path / "go").unlink()
        with hanging(host, "hang again") as two:
            host.ok("checkpoint", "w")
            assert two.wait(20) == 4
        (tmp_path / "go").touch()
        host.ok("restore", "w")
        host.wait_for("w", "did hang again")
        assert decisions(host, session)[-1] == ("hang again\r", "allowed", None, ["ann"])
        (tmp_path / "go").unlink()
        with hanging(host, "hang for ever") as three:
            host.ok("kill", "w", timeout=30)  # half of what the gate may take
            assert three.wait(20) == 4
        session = host.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
        with hanging(host, "hang without a holder") as four:
            (asked, *_) = until(lambda: cgroup.pids(cgroup.gate(host.group(session))), 10, "the gate is there")
            os.kill(host.holder(session), signal.SIGKILL)
            assert four.wait(20) == 4
            until(lambda: not os.path.exists(f"/proc/{asked}"), 10, "it ends with the session")


@contextmanager
def hanging(host: Host, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """A line that waits for the gate's answer."""
    asked = host.dir / "asked"
    before = asked.read_text().count("\n") if asked.exists() else 0
    with subprocess.Popen(
        [*CM, "send", "w", text, "--enter", "--actor", "ann"], env=host.env(), stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: asked.exists() and asked.read_text().count("\n") > before)
        yield process


@pytest.mark.parametrize(("on_error", "goes"), [("deny", False), ("allow", True)])
def test_a_gate_that_cannot_be_run(tmp_path: Path, on_error: str, goes: bool) -> None:
    gate = gate_at(tmp_path)
    gate.chmod(0o644)
    with gated(tmp_path, str(gate), GATE_ON_ERROR=on_error) as host:
        session = host.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
        if goes:
            host.ok("send", "w", "a\rb\rc", "--enter", "--actor", "ann")
            host.wait_for("w", "did c")
        else:
            assert "the gate failed: not run: not executable" in refused(host, "a\rb\rc")
        found = decisions(host, session)
        assert [one[1] for one in found] == (["allowed"] * 3 if goes else ["refused"])
        assert {one[2] for one in found} == {"the gate failed: not run: not executable"}
        gate.chmod(0o777)
        if not goes:
            assert "users other than root may write it" in refused(host, "a")
        host.fails("run", "-d", "--gate", str(gate), "--", "true", status=2, code="usage")
        host.fails("run", "-d", "--gate", "gate", "--", "true", status=2, code="usage")


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        if "away" in text:
            self.send_response(302)
            self.send_header("Location", "/")
            self.end_headers()
            return
        body = (
            b"yes" if "odd" in text else json.dumps({"allow": "forbidden" not in text, "why": "by the book"}).encode()
        )
        self.send_response(500 if "broken" in text else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_an_address_of_a_session_s_own(host: Host) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/gate"
    try:
        session = host.start("bash", "-c", fenced_sessions.ECHO, name="w", options=("--gate", address))["session"]
        assert host.cm_json("show", "w")["gate"] == address
        host.ok("send", "w", "good", "--enter", "--actor", "ann")
        host.wait_for("w", "did good")
        assert refused(host, "forbidden").endswith("by the book")
        for text, words in (("odd", "does not answer with"), ("broken", "answers 500"), ("away", "answers 302")):
            assert words in refused(host, text)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "the gate failed" in refused(host, "good") and "cannot be reached" in refused(host, "good")
    host.ok("checkpoint", "w")
    host.ok("restore", "w")
    assert "cannot be reached" in refused(host, "good"), "it is asked wherever the session goes"
    assert host.output("w").count("did ") == 1 and host.cm_json("inputs", session, "--verify")["ok"]


def test_resent_input_is_not_reported_applied_while_the_gate_decides(tmp_path: Path) -> None:
    """A client that lost its connection sends the same input, by the same stream, over another one."""
    with gated(tmp_path, str(gate_at(tmp_path)), GATE_TIMEOUT="30s") as host:
        session = host.start("bash", "--norc", name="w")["session"]
        records = LocalHost(config.load(environ=host.env()))
        asked = {"op": "send", "data": "echo hang\r", "actor": "ann", "stream": "a" * 16}
        with Channel(records.socket(session)) as lost:
            lost.send(asked)
            until(lambda: (tmp_path / "asked").exists(), 10, "the gate is asked")
        with Channel(records.socket(session)) as again:
            answer = again.ask(**asked)
        assert answer["error"] == "gate" and "was lost" in answer["why"], answer
        assert len((tmp_path / "asked").read_text().splitlines()) == 1, "it is there once"
