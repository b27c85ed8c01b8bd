"""What a relay costs: many sessions and clients held on one, the echo of a key, a long output; beside doing without."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.register import Swap
from cmdop_migrate.lease.registry import open_register
from cmdop_migrate.relay import frames
from cmdop_migrate.relay.client_connection import Connection, dial
from cmdop_migrate.relay.credentials import Credential, b64
from cmdop_migrate.relay.frames import Frame, Kind
from cmdop_migrate.session.holder_client import Channel
from scripts.benchlib import common
from tests.support.relay_server import ARelay, a_relay
from tests.support.relayed_hosts import Linked, linked

PER_CREDENTIAL = 50  # connections; a relay lets 64
AT_ONCE = 16
LENGTH = 100 << 20
ECHO = "stty raw -echo; echo ready; exec cat"
FLOOD = "stty raw -echo; read -r x; head -c {length} /dev/zero | tr '\\0' x; echo; echo all-of-it; exec sleep 1000"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench relay", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000, help="how many are held [1000]")
    parser.add_argument("--clients", type=int, default=2, help="of each [2]")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they are looked at [30]")
    parser.add_argument("--echoes", type=int, default=500, help="keys typed each way [500]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"machine": {**common.machine(), "load": common.load()}}
    with tempfile.TemporaryDirectory(prefix="bench-relay-") as place:
        (Path(place) / "held").mkdir()
        with a_relay(Path(place) / "held") as relay:
            figures["held"] = asyncio.run(_held(relay, options))
        (Path(place) / "linked").mkdir()
        with linked(Path(place) / "linked", ttl="15s") as world:
            figures["echo_ms"] = _echoes(world, options.echoes)
            figures["output"] = _outputs(world)
    print(json.dumps(figures) if options.json else _shown(figures))
    return 0


# Held


async def _held(relay: ARelay, options: argparse.Namespace) -> dict[str, Any]:
    assert relay.process is not None
    pid = relay.process.pid
    sessions = [f"{number:024x}" for number in range(1, options.sessions + 1)]
    _lease(relay, sessions)
    empty = _memory(pid)
    count = options.sessions * options.clients
    badges = [relay.client_credential(f"c{number}") for number in range(-(-count // PER_CREDENTIAL))]
    host = await dial(relay.url, _pinned(relay, relay.host_credential("host-a")), 60)
    for session in sessions:
        await host.send(frames.with_table(Kind.REGISTER, {"name": f"s{session[-6:]}", "state": "running"}, session, 1))
    for _ in sessions:
        frame = await host.receive()
        assert frame.kind is Kind.REGISTERED, frame
    listening = [asyncio.create_task(_swallow(host, Kind.OPEN))]
    began, gate = time.monotonic(), asyncio.Semaphore(AT_ONCE)
    clients = await asyncio.gather(
        *(
            _client(relay, badges[number // PER_CREDENTIAL], sessions[number % len(sessions)], gate)
            for number in range(count)
        )
    )
    listening += [asyncio.create_task(_swallow(one, None)) for one in clients]
    joined = time.monotonic() - began
    before, at = _cpu(pid), time.monotonic()
    await asyncio.sleep(options.seconds)
    used = (_cpu(pid) - before) / (time.monotonic() - at)
    memory = _memory(pid)
    for task in listening:
        if task.done():
            task.result()
        task.cancel()
    for one in [*clients, host]:
        await one.close()
    return {
        "sessions": len(sessions),
        "clients": count,
        "joined_s": round(joined, 2),
        "rss_empty": empty,
        "rss": memory,
        "cpu": round(used, 4),
    }


def _lease(relay: ARelay, sessions: list[str]) -> None:
    register = open_register(relay.config.lease)
    for session in sessions:
        record = LeaseRecord(session, 1, "held", "host-a", "i" * 8, 15.0, 2, None, os.urandom(16).hex())
        assert register.write(Swap(session, record.to_bytes(), None))
    register.close()


def _pinned(relay: ARelay, made: Credential) -> Credential:
    return Credential(made.claims, made.signature, made.seed, made.fleet, relay.url, relay.facts["pin"])


async def _client(relay: ARelay, badge: Credential, session: str, gate: asyncio.Semaphore) -> Connection:
    async with gate:
        connection = await dial(relay.url, _pinned(relay, badge), 60)
        opening = {"handshake": b64(bytes(32)), **badge.presented()}
        await connection.send(frames.with_table(Kind.OPEN, opening, session, 0, 1))
        status = await connection.receive()
        assert status.kind is Kind.STATUS and status.text("state") == "routed", status
        return connection


async def _swallow(connection: Connection, wanted: Kind | None) -> None:
    """Nothing but signs of life, and what is `wanted`."""
    while True:
        frame: Frame = await connection.receive()
        assert frame.kind is wanted, f"{frame.kind.name} {frame.payload!r}"


def _memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Echo


def _echoes(world: Linked, count: int) -> dict[str, Any]:
    session = world.a.start("bash", "-c", ECHO, name="echo")["session"]
    world.a.wait_for("echo", "ready")
    file = world.credential()
    world.routed(session, file)
    found = {}
    with Channel(world.a.run / f"{session}.sock") as direct, world.line(file, session) as line:
        for channel in (direct, line.channel):
            channel.ask(op="attach", actor="x", read_only=False, **{"from": None})
            for _ in channel.follow(1):
                pass
        # In turn, so that both have the same machine.
        times: dict[str, list[float]] = {"direct": [], "relay": []}
        for number in range(count):
            for name, channel, other in (("direct", direct, line.channel), ("relay", line.channel, direct)):
                times[name].append(_echo(channel, number))
                _take(other)
        for name, values in times.items():
            ordered = sorted(values)
            found[name] = {f"p{part}": round(ordered[int(len(ordered) * part / 100)] * 1000, 3) for part in (50, 99)}
    world.a.ok("kill", "echo", "--signal", "KILL")
    found["added"] = {part: round(found["relay"][part] - found["direct"][part], 3) for part in ("p50", "p99")}
    return found


def _echo(channel: Channel, number: int) -> float:
    began = time.perf_counter()
    channel.type(b"abcdefghij"[number % 10 :][:1])
    _take(channel)
    return time.perf_counter() - began


def _take(channel: Channel) -> None:
    for message in channel.follow(10):
        if isinstance(message, tuple):
            return
    raise AssertionError("no echo")


# Output


def _outputs(world: Linked) -> dict[str, Any]:
    """Read a long output to its last byte. Bytes that the ring could not keep for a slow client are reported as lost: a
    session never waits for its clients."""
    found: dict[str, Any] = {"bytes": LENGTH}
    found["relay"] = _output(world, "far", True)
    found["direct"] = _output(world, "near", False)
    big = world.dir / "big"
    with big.open("wb") as out:
        for _ in range(LENGTH >> 20):
            out.write(b"x" * (1 << 20))
    words = [
        "ssh",
        *world.world.ssh_options.split(),
        "-p",
        str(world.world.sshd.port),
        "root@127.0.0.1",
        "cat",
        str(big),
    ]
    began = time.monotonic()
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=True)
    assert len(done.stdout) == LENGTH
    found["ssh"] = {"seconds": round(time.monotonic() - began, 3), "lost": 0}
    return found


def _output(world: Linked, name: str, far: bool) -> dict[str, Any]:
    session = world.a.start("bash", "-c", FLOOD.format(length=LENGTH), name=name)["session"]
    file = world.credential()
    world.routed(session, file)
    with world.line(file, session) as line:
        channel = line.channel if far else Channel(world.a.run / f"{session}.sock")
        channel.ask(op="attach", actor="x", read_only=False, **{"from": 0})
        began = time.monotonic()
        channel.type(b"\n")
        got, lost, tail = 0, 0, b""
        for message in channel.follow(300):
            if isinstance(message, tuple):
                got += len(message[1])
                tail = (tail + message[1])[-32:]
                if b"all-of-it" in tail:
                    break
            else:
                lost += message.get("bytes", 0) if message.get("event") == "lost" else 0
        seconds = time.monotonic() - began
    world.a.ok("kill", name, "--signal", "KILL")
    return {"seconds": round(seconds, 3), "got": got, "lost": lost}


def _shown(figures: dict[str, Any]) -> str:
    held, echo, output = figures["held"], figures["echo_ms"], figures["output"]
    each = (held["rss"] - held["rss_empty"]) / max(1, held["clients"]) / 1024
    lines = [
        f"held: {held['sessions']} sessions, {held['clients']} clients on one relay, joined in {held['joined_s']} s",
        f"  memory {held['rss'] >> 20} MiB ({held['rss_empty'] >> 20} MiB empty, {each:.0f} KiB a client), "
        f"CPU {held['cpu']:.1%} of one core",
        f"echo: direct p50 {echo['direct']['p50']} ms, p99 {echo['direct']['p99']} ms; "
        f"relay p50 {echo['relay']['p50']} ms, p99 {echo['relay']['p99']} ms; "
        f"added {echo['added']['p50']} / {echo['added']['p99']} ms",
    ]
    for name in ("relay", "direct", "ssh"):
        one = output[name]
        rate = (output["bytes"] - one["lost"]) / one["seconds"] / 1e6
        lines.append(f"100 MiB, {name}: {one['seconds']} s, {rate:.0f} MB/s, {one['lost'] >> 20} MiB not kept for it")
    machine = figures["machine"]
    return "\n".join([*lines, f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}"])
