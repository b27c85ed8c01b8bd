"""The journal of inputs on the move: all of it comes along, and who typed what is not yet committed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate.holder.input_journal import ROTATE_AT
from cmdop_migrate.host import input_journal
from tests.support import fenced_sessions
from tests.support.host import Host, pair


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with pair(tmp_path) as both:
        yield both


def journal(host: Host, session: str) -> list[dict[str, Any]]:
    records = fenced_sessions.records(host)
    return list(input_journal.journal(records, records.find(session)))


def test_a_rotated_journal_moves_with_the_session(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = a.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
    where = a.state / "sessions" / session / "inputs.jsonl"
    a.ok("send", "w", "one", "--enter")
    with where.open("a") as file:
        file.write(json.dumps({"seq": 1, "text": "x" * ROTATE_AT}) + "\n")
    a.ok("send", "w", "two", "--enter")
    a.ok("send", "w", "three", "--enter")
    a.wait_for("w", "did three")
    assert where.with_name("inputs.jsonl.1").stat().st_size > ROTATE_AT > where.stat().st_size
    assert [one["seq"] for one in journal(a, session)] == [1, 1, 2, 3]
    a.ok("checkpoint", "w")
    b.ok("restore", session)
    assert b.cm_json("send", "w", "four", "--enter")["seq"] == 4
    b.wait_for(session, "did four")
    assert [one["seq"] for one in journal(b, session)] == [1, 1, 2, 3, 4]
    assert (b.state / "sessions" / session / "inputs.jsonl.1").stat().st_size > ROTATE_AT


def test_author_of_a_half_typed_line_is_named_after_a_move(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    session = a.start("bash", "-c", fenced_sessions.ECHO, name="w")["session"]
    a.ok("send", "w", "rm -rf", "--actor", "ann")
    a.ok("checkpoint", "w")
    b.ok("restore", session)
    b.ok("send", session, " /tmp/x", "--enter", "--actor", "bob")
    b.wait_for(session, "did rm -rf /tmp/x")
    (line,) = journal(b, session)
    assert (line["actor"], line["originators"], line["text"]) == ("bob", ["ann", "bob"], "rm -rf /tmp/x\r")


def test_a_half_typed_password_is_not_journalled_after_a_move(host: Host) -> None:
    command = "stty -echo; echo ask; read -r x; stty echo; echo have ${#x}; read -r y"
    session = host.start("bash", "-c", command, name="w")["session"]
    host.wait_for("w", "ask")
    host.ok("send", "w", "gehe", "--actor", "ann")
    host.ok("checkpoint", "w")
    host.ok("restore", "w")
    host.ok("send", "w", "im", "--enter", "--actor", "bob")
    host.wait_for("w", "have 6")
    (line,) = journal(host, session)
    assert (line["originators"], line["text"], line["bytes"]) == (["ann", "bob"], None, 7)
