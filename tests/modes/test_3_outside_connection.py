"""Mode 3: a connection to the outside. The peer's kernel holds its half: it is reset, listed, never faked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.modes import record
from tests.modes.conftest import Sign
from tests.support.host_pair import World
from tests.support.outside_server import CLIENT, PYTHON, Server, is_reset


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(f"cmdop-mode-{os.getpid()}", 1 + os.getpid() % 200)
    try:
        yield made
    finally:
        made.close()


def test_it_is_reset_and_listed_and_the_program_told(world: World, server: Server, tmp_path: Path, sign: Sign) -> None:
    a, b = world.a, world.b
    hook = tmp_path / "reconnect"
    hook.write_text(f"#!/bin/sh\ncat > {tmp_path}/heard\n")
    hook.chmod(0o755)
    command = (PYTHON, "-c", CLIENT, server.address, "7200")
    session = a.start(*command, name="w", options=("--hook", f"post-restore={hook}"))["session"]
    peer = server.accept()
    a.wait_for("w", "said b'welcome'")
    (outside,) = [one for one in a.cm_json("show", "w")["sockets"] if one["remote"] == f"{server.address}:7200"]
    answer = a.cm_json("migrate", "w", "--to", "host-b")
    assert is_reset(peer, 1), "the peer learns at once"

    event = record.one(a, session, "checkpointed")
    (reset,) = event["connections"]
    assert [reset] == answer["closed_connections"] and event["closed"] == 1
    assert (reset["local"], reset["remote"]) == (outside["local"], f"{server.address}:7200")
    assert json.loads((tmp_path / "heard").read_text())["closed_connections"][0]["remote"] == reset["remote"]
    states = {one["state"] for one in b.cm_json("show", session)["sockets"] if one["remote"] == reset["remote"]}
    assert "ESTABLISHED" not in states, "nothing is faked"
    Path(f"/proc/{min(b.pids(session))}/root/root/go").touch()
    told = b.wait_for(session, r"error (ConnectionResetError|BrokenPipeError)")["matched"]
    b.wait_for(session, "udp")  # what is its own alone is as it was
    sign(reset=reset, peer="reset at once", program=told)
