"""Mode 1: the client goes, the host lives."""

from __future__ import annotations

import re
from pathlib import Path

from cmdop_migrate.holder import protocol
from cmdop_migrate.holder.input_admission import NOTES
from tests.modes import record
from tests.modes.conftest import Sign
from tests.support import fenced_sessions
from tests.support.host import CM, Host, a_host, until
from tests.support.pty_client import Pty
from tests.support.relayed_hosts import linked

DETACH = b"\x1cd"


def attach(host: Host, *options: str) -> Pty:
    return Pty([*CM, "attach", *options], host.env())


def left(client: Pty) -> tuple[int, bytes]:
    """Detached: the number it was told to come back with, and all it was shown."""
    client.type(DETACH)
    assert client.wait() == 0
    at = int(re.findall(rb"detached from w at byte (\d+)", client.seen)[0])
    return at, bytes(client.seen[: client.seen.rfind(b"\x1b>\x1b[0m")])


def test_a_client_that_vanishes_and_comes_back(quick: Host, sign: Sign) -> None:
    session = fenced_sessions.counter(quick)
    with attach(quick, "w", "--actor", "ann") as client:
        client.expect(b"n 5\r\n")
        client.process.kill()
    until(lambda: record.events(quick, session, "detached"), 10, "its end is noticed")
    with attach(quick, "w", "--actor", "ann") as client:
        client.expect(b"n 20\r\n")
        at, shown = left(client)
    until(lambda: len(fenced_sessions.numbers(quick, session)) > 40, 20, "it counts on with nobody there")
    with attach(quick, "w", "--actor", "ann", "--from", str(at)) as client:
        client.expect(b"n 60\r\n")
        _, rest = left(client)
    numbers = [int(one) for one in re.findall(rb"n (\d+)\r\n", shown + rest)]
    assert numbers == list(range(1, len(numbers) + 1)), "every byte of what it missed, once"

    came = record.events(quick, session, "attached")
    until(lambda: len(record.events(quick, session, "detached")) == 3, 10, "the holder sees it go")
    went = record.events(quick, session, "detached")
    assert (len(came), len(went)) == (3, 3) and all(one["actor"] == "ann" for one in came + went)
    again = came[2]
    assert (again["from"], again["lost"]) == (at, 0) and again["replayed"] > 0
    assert {one["pid"] for one in came + went} == {record.one(quick, session, "started")["pid"]}, "same process"
    assert not record.events(quick, session, "restored"), "no cold start"
    sign(pid=again["pid"], again={key: again[key] for key in ("from", "replayed", "lost")}, cold_starts=0)


def test_output_that_is_no_longer_kept_is_reported(tmp_path: Path, sign: Sign) -> None:
    with a_host(tmp_path, extra={"CMDOP_MIGRATE_RING_SIZE": "4KiB"}) as host:
        session = host.start("bash", "-c", "seq 1 3000; echo done; sleep 1000", name="w")["session"]
        host.wait_for("w", "done")
        with attach(host, "w", "--from", "0") as client:
            client.expect(b"done")
            left(client)
        event = record.one(host, session, "attached")
        assert event["replayed"] == 4096 and event["lost"] == host.cm_json("output", "w")["to"] - 4096
        went = until(lambda: record.events(host, session, "detached"))
        assert went[0]["lost"] == event["lost"]
        assert host.cm_json("output", "w", "--from", "0")["lost"] == event["lost"]
        sign(buffer=4096, replayed=event["replayed"], lost=event["lost"])


def test_from_afar_it_is_the_same(tmp_path: Path, sign: Sign) -> None:
    """Through the relay: who it was is what the credential says, and the relay's death is one more disconnect."""
    with linked(tmp_path) as world:
        file = world.credential(actor="ann")
        session = fenced_sessions.counter(world.a)
        world.routed(session, file)
        with world.attach(file, "w") as client:
            client.expect(b"n 5\r\n")
            client.process.kill()
        until(lambda: record.events(world.a, session, "detached"), 20, "its end is noticed")
        with world.attach(file, "w") as client:
            client.expect(b"n 20\r\n")
            world.restart_relay()
            client.expect(f"n {len(fenced_sessions.numbers(world.a, session)) + 10}\r\n".encode(), 40)
            numbers = [int(one) for one in re.findall(rb"n (\d+)\r\n", client.seen)]
        assert numbers == list(range(1, len(numbers) + 1)), "every number once, in order"
        came = record.events(world.a, session, "attached")
        assert len(came) >= 3 and {one["actor"] for one in came} == {"ann"}
        assert came[-1]["from"] > 0 and came[-1]["lost"] == 0, "it goes on where its line was cut"
        assert {one["pid"] for one in came} == {record.one(world.a, session, "started")["pid"]}
        sign(again={key: came[-1][key] for key in ("from", "replayed", "lost")}, actor="ann", cold_starts=0)


def test_clients_without_end_do_not_push_others_out_of_the_record(host: Host) -> None:
    session = host.start("sleep", "1000", name="w")["session"]
    for _ in range(150):
        with protocol.connect(str(host.run / f"{session}.sock")) as sock:
            sock.sendall(protocol.control({"op": "attach", "actor": "eve", "terminal": True}))
            sock.recv(1)
    until(lambda: host.sessions()[0]["clients"] == 0, 10, "they are gone")
    assert len(record.events(host, session, "attached", "detached")) == NOTES
