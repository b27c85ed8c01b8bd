"""Clients of sessions through a real relay: attach, send, output, wait, ls; and who may do what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.relayed import Linked, linked


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as made:
        yield made


def test_send_output_wait(world: Linked) -> None:
    file = world.credential()
    session = world.a.start("bash", "--norc", name="talk")["session"]
    world.routed(session, file)
    sent = world.client_json(file, "send", "talk", "echo $((6*7))", "--enter")
    found = world.client_json(file, "wait", "talk", "--for", "^42", "--from", str(sent["at"]))
    assert found["matched"] == "42"
    assert "42" in world.client_json(file, "output", session)["data"]


def test_attach_type_detach(world: Linked, tmp_path: Path) -> None:
    file = world.credential()
    session = world.a.start("bash", "--norc", name="term")["session"]
    world.routed(session, file)
    with world.attach(file, "term") as pty:
        pty.expect(b"# ")
        pty.type("echo so-$((1+1))\r")
        pty.expect(b"so-2")
        pty.type(b"\x1cd")
        assert pty.wait() == 0
        assert b"detached from term" in pty.seen
        assert pty.is_sane()
    assert world.a.pids(session)
