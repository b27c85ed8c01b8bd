"""A session moves underneath its client: nothing is lost, nothing doubled."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support import typing_client
from tests.support.faulty_proxy import Proxy
from tests.support.relayed_hosts import Linked, linked


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as made:
        yield made


def test_a_typing_client_stays_through_moves(world: Linked) -> None:
    file = world.credential()
    session = typing_client.start(world.a, "w")
    world.routed(session, file)
    with typing_client.typing(world.line(file, session)) as typist:
        typist.counts_on()
        for number in range(4):
            typist.gaps.clear()
            facts = world.move("w", there=number % 2 == 0)
            typist.counts_on()
            print(f"move {number}: frozen {facts.get('frozen_s')}, the client saw nothing for {typist.gaps}")
        typist.finish()
        assert [one["to"] for one in typist.events if one["event"] == "moving"].count("host-b") == 2, typist.events
        assert not [one for one in typist.events if one["event"] in ("lost", "undone", "refused")]
    world.a.ok("kill", "w", "--signal", "KILL")


def test_relays_die_and_lines_are_cut_while_it_moves(world: Linked) -> None:
    """At random: the relay is killed and started again, and the client's connection cut, while the session moves."""
    with Proxy(world.relay.port) as proxy:
        file = world.credential(url=f"wss://127.0.0.1:{proxy.port}")
        session = typing_client.start(world.a, "x")
        world.routed(session, file)
        over, dice = threading.Event(), random.Random(6)
        done = {"killed": 0, "cut": 0}

        def trouble() -> None:
            while not over.wait(dice.uniform(0.3, 1.2)):
                if dice.random() < 0.4:
                    world.restart_relay()
                    done["killed"] += 1
                else:
                    proxy.block()
                    time.sleep(dice.uniform(0, 0.3))
                    proxy.unblock()
                    done["cut"] += 1

        with typing_client.typing(world.line(file, session)) as typist:
            typist.counts_on()
            thread = threading.Thread(target=trouble)
            thread.start()
            try:
                for number in range(2):
                    world.move("x", there=number % 2 == 0)
                    typist.counts_on(within=60)
            finally:
                over.set()
                thread.join(30)
            typist.finish(60)
            assert done["killed"] >= 1 and done["cut"] >= 1, done
            print(f"{done}, {typist.typed} lines, {len(typist.data)} bytes of output")
            assert not [one for one in typist.events if one["event"] in ("lost", "undone", "refused")]
    world.a.ok("kill", "x", "--signal", "KILL")


def test_attach_shows_where_the_session_moves(world: Linked) -> None:
    file = world.credential()
    session = world.a.start("bash", "--norc", name="seen")["session"]
    world.routed(session, file)
    with world.attach(file, "seen") as pty:
        pty.expect(b"# ")
        world.move("seen", there=True)
        at = pty.expect(b"moving to host-b \xe2\x80\xa6")
        cleared = pty.expect(b"\x1b[2K\x1b8", after=at)
        pty.type("echo on-$HOSTNAME-$((1+1))\r")
        pty.expect(b"-2\r\n", after=cleared)
        pty.type(b"\x1cd")
        assert pty.wait() == 0 and pty.is_sane()
    assert world.b.pids(session) and not world.a.pids(session)
    world.b.ok("kill", "seen", "--signal", "KILL")


def test_clients_resume_on_the_source_after_a_failed_move(world: Linked) -> None:
    """The client typed meanwhile: it is applied here, once."""
    file = world.credential()
    session = typing_client.start(world.a, "stay")
    world.b.start("sleep", "1000", name="stay")  # found out only when it is there already
    world.routed(session, file)
    with typing_client.typing(world.line(file, session)) as typist:
        typist.counts_on()
        world.a.fails("migrate", "stay", "--to", "host-b", "--accept", "name", status=4, code="blocked")
        typist.counts_on()
        typist.finish()
        assert not [one for one in typist.events if one["event"] in ("lost", "undone", "refused")]
    for host in (world.a, world.b):
        host.ok("kill", "stay", "--signal", "KILL")


def test_clients_are_told_what_a_dead_host_has_undone(world: Linked) -> None:
    """The session is restored from a checkpoint older than the output that the client has seen: the client is notified
    how much was undone, and resumes."""
    file = world.credential()
    session = typing_client.start(world.a, "gone")
    world.routed(session, file)
    with world.line(file, session) as line:
        line.channel.ask(op="attach", actor="x", read_only=False, **{"from": None})
        world.a.ok("checkpoint", "gone", "--leave-running")
        line.channel.type(b"after\n")
        got = b""
        for message in line.channel.follow(20):
            got += message[1] if isinstance(message, tuple) else b""
            if b"in after\n" in got:
                break
        os.kill(world.a.holder(session), signal.SIGKILL)
        world.a.sessions()  # any command corrects the record; the agent releases the lease
        world.b.ok("restore", session, "--wait", "20s", timeout=60)
        undone = {"output": 0, "input": 0}
        for message in line.channel.follow(30):
            if isinstance(message, dict) and message.get("event") == "undone":
                undone = {key: undone[key] + message[key] for key in undone}
            elif isinstance(message, tuple) and undone["input"]:
                break
        assert undone["input"] == len(b"after\n") and undone["output"] > 0, undone
    world.b.ok("kill", session, "--signal", "KILL")
