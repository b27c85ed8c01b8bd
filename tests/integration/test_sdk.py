"""Sessions from a program, here and through a relay; and the example of an operator beside a person."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import cmdop_migrate
from cmdop_migrate import AsyncSession, Session
from cmdop_migrate.errors import Blocked, NotAdmitted, SessionExited, SessionNotFound, TimedOut, Usage
from tests.support.host import PROJECT, Host, until
from tests.support.patience import bound
from tests.support.relayed_hosts import Linked, linked

EXAMPLE = PROJECT / "docs" / "examples" / "beside_a_person.py"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as made:
        yield made


def test_sdk_is_imported_only_on_use() -> None:
    loaded = "import sys, cmdop_migrate; print(len([one for one in sys.modules if one.startswith('cmdop_migrate.')]))"
    done = subprocess.run([sys.executable, "-c", loaded], text=True, capture_output=True, check=True, cwd=PROJECT)
    assert done.stdout == "0\n"
    with pytest.raises(AttributeError):
        _ = cmdop_migrate.Sessions  # type: ignore[attr-defined]  # that is the point


def test_local_session_from_a_program(host: Host) -> None:
    env = host.env()
    shell = Session.run("bash", "--norc", name="sdk", actor="ann", environ=env)
    assert shell.send("echo $((6*7))") == 1
    found = shell.expect(r"^\d+$")
    assert found.text == "42" and shell.seq == found.seq
    shell.send("echo a; echo b")
    assert (shell.expect("^a").text, shell.expect("^b").text) == ("a", "b")
    with pytest.raises(TimedOut):
        shell.expect("^a", timeout=0.3)  # what was found once is behind us
    shell.send("echo $((1000+1))")
    until(lambda: "1001" in shell.output(found.seq).data.decode(), 10, "it prints")
    assert "1001" in shell.read() and "1001" not in shell.read()
    other = Session.attach("sdk", actor="bob", environ=env)
    assert other.seq >= found.seq and other.session == shell.session
    assert other.turn("request") == "bob" and shell.turn("show") == "bob"
    with pytest.raises(NotAdmitted, match="bob has the write turn"):
        shell.send("echo no")
    assert shell.turn("seize") == "ann" and shell.turn("release") is None
    with pytest.raises(Usage):
        Session.attach("sdk", relay="wss://127.0.0.1:1", environ=env)
    with pytest.raises(SessionNotFound):
        Session.attach("unknown", environ=env)
    with pytest.raises(Blocked, match="more than one request can hold; nothing was sent"):
        shell.send("\u044f" * 100_000)
    shell.send("exit 3")
    assert shell.wait(10) == 3
    with pytest.raises(SessionExited):
        shell.expect("never")
    assert [one["actor"] for one in host.cm_json("inputs", "sdk")["inputs"] if "text" in one] == ["ann"] * 4


def test_asyncio_can_be_cancelled(host: Host) -> None:
    env = host.env()
    Session.run("bash", "--norc", name="sdk", environ=env)

    async def both() -> float:
        session = await AsyncSession.attach("sdk", environ=env)
        waiting = asyncio.create_task(session.expect("never", timeout=60))
        await session.send("echo x-$((1+1))")
        other = await AsyncSession.attach(session.name, environ=env)
        await other.send("echo y-$((1+1))")
        await other.expect("^y-2")
        waiting.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TimedOut):
            await session.expect("never", timeout=1.5)
        return began

    began = asyncio.run(both())
    assert time.monotonic() - began < bound(10)


def test_sdk_through_a_relay_and_a_move(world: Linked) -> None:
    file = world.credential(actor="carl")
    session = world.a.start("bash", "--norc", name="far")["session"]
    world.routed(session, file)
    shell = Session.attach("far", credential=file)
    assert shell.actor == "carl"
    shell.send("x=kept; echo $((6*7))")
    assert shell.expect(r"^\d+").text == "42"
    with pytest.raises(Usage, match="cannot be migrated through a relay"):
        shell.migrate("host-b")
    moved = Session.attach("far", environ=world.a.env()).migrate("host-b")
    assert moved["to"] == "host-b"
    shell.send("echo $x-$((1+1))")
    assert shell.expect("^kept-2", timeout=60).text == "kept-2"
    assert shell.turn("request") == "carl" and shell.turn("release") is None


def test_an_operator_is_taken_over_and_handed_back_to(world: Linked) -> None:
    """A person with an admin's credential seizes; the operator's next line is refused where the session is."""
    machine, person = world.credential(actor="robot"), world.credential("admin", actor="ann")
    session = world.a.start("bash", "--norc", name="job")["session"]
    world.routed(session, machine)
    lines = ["sleep 4", "echo two > two", "cat two"]
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE), "job", *lines, "--credential", str(machine)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)},
    ) as operator:  # fmt: skip
        try:
            ann = Session.attach("job", credential=person)
            until(lambda: operator.poll() is not None or ann.turn("show") == "robot", 30, "the operator works")
            assert operator.poll() is None, operator.communicate()
            assert ann.turn("seize", timeout=60) == "ann"
            ann.send("echo by-ann-$((1+1))")
            ann.expect("^by-ann-2")
            assert ann.turn("show") == "ann"
            assert ann.turn("release") in (None, "robot")
            out, _ = operator.communicate(timeout=90)
        finally:
            operator.kill()
    assert operator.returncode == 0, out
    done = [line for line in out.splitlines() if not line.startswith("taken over")]
    assert done == ["sleep 4: 0", "echo two > two: 0", "cat two: 0"], out
    who = [one["actor"] for one in world.a.cm_json("inputs", session)["inputs"] if "text" in one]
    assert who.count("robot") == 3 and who.count("ann") == 1, who
