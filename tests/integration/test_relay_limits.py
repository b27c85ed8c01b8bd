"""A relay in this process with limits small enough to reach: silence, slowness, and what all of it may cost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from cmdop_migrate.lease.memory import MemoryRegister
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.relay.credential_registry import CredentialRegistry
from cmdop_migrate.relay.credentials import Credential, issue, unb64
from cmdop_migrate.relay.frames import PAYLOAD_MAX, Frame, Kind, decode, encode, with_table
from cmdop_migrate.relay.lease_lookup import LeaseLookup
from cmdop_migrate.relay.metrics import relay_metrics
from cmdop_migrate.relay.router.router_events import Limits
from cmdop_migrate.relay.server import Relay, ServerOptions
from tests.support.relay_server import PLACE, SESSION

FLEET = Ed25519PrivateKey.from_private_bytes(bytes(32))
BASE = ServerOptions(PLACE, 0, FLEET.public_key().public_bytes_raw(), None)


class Inside:
    def __init__(self, serving: ServerOptions) -> None:
        self.leases, self.issued = LeaseStore(MemoryRegister()), CredentialRegistry(MemoryRegister())
        self.metrics = relay_metrics()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.truth = LeaseLookup(self.leases, self.issued, self.metrics)
        self.relay = Relay(
            serving, self.truth, self.metrics, lambda event, _, facts: self.events.append((event, facts))
        )
        self.port = 0

    def credential(self, kind: Any = "client", name: str = "alice") -> Credential:
        made = issue(FLEET, kind, name, "host" if kind == "host" else "read", "*", None)
        self.issued.add(made.claims, 0.0)
        return made

    async def dial(self, credential: Credential, **options: Any) -> ClientConnection:
        socket = await connect(f"ws://{PLACE}:{self.port}", ping_interval=None, compression=None, proxy=None, **options)
        nonce = unb64(decode(await whole(socket)).text("nonce"))
        await socket.send(encode(with_table(Kind.HELLO, credential.hello(nonce))))
        assert decode(await whole(socket)).kind is Kind.WELCOME
        return socket

    def refusals(self, code: str) -> int:
        return sum(facts.get("code") == code for _, facts in self.events)


async def whole(socket: ClientConnection) -> bytes:
    message = await asyncio.wait_for(socket.recv(), 10)
    assert isinstance(message, bytes)
    return message


async def next_of(socket: ClientConnection, kind: Kind) -> Frame:
    while (frame := decode(await whole(socket))).kind is not kind:
        pass
    return frame


@contextlib.asynccontextmanager
async def inside(serving: ServerOptions) -> AsyncIterator[Inside]:
    one = Inside(serving)
    stop, ready = asyncio.Event(), asyncio.Event()

    def listening(port: int) -> None:
        one.port = port
        ready.set()

    task = asyncio.create_task(one.relay.run(stop, listening))
    await asyncio.wait_for(ready.wait(), 10)
    try:
        yield one
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)
        one.truth.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_heartbeats_and_the_end_of_silent_connections() -> None:
    async def test() -> None:
        async with inside(replace(BASE, limits=Limits(beat=0.5))) as at:
            alive, dead = await at.dial(at.credential()), await at.dial(at.credential())
            for _ in range(5):
                await alive.send(encode(Frame(Kind.BEAT)))
                await next_of(alive, Kind.BEAT)
            assert (await next_of(dead, Kind.REFUSED)).text("code") == "silent"
            with pytest.raises(ConnectionClosed):
                await dead.recv()
            await alive.send(encode(Frame(Kind.LIST)))
            await next_of(alive, Kind.LISTING)
            assert at.refusals("silent") == 1

    run(test)


async def a_route(at: Inside) -> ClientConnection:
    at.leases.acquire(SESSION, "host-a", "i", 60.0)
    host = await at.dial(at.credential("host", "host-a"))
    await host.send(encode(with_table(Kind.REGISTER, {"name": "work"}, SESSION, 1)))
    await next_of(host, Kind.REGISTERED)
    return host


async def slow_client(at: Inside) -> ClientConnection:
    """One that opens a channel and then reads nothing, not even from its socket."""
    client = await at.dial(at.credential(), max_queue=1)
    await client.send(encode(with_table(Kind.OPEN, {}, SESSION, 0, 1)))
    await next_of(client, Kind.STATUS)
    client.transport.pause_reading()
    return client


async def fill(host: ClientConnection, size: int) -> int:
    """Its channel on the host's side, with that much under way to it."""
    channel = (await next_of(host, Kind.OPEN)).channel
    for seq in range(size // PAYLOAD_MAX):
        await host.send(encode(Frame(Kind.DATA, SESSION, 1, seq, channel, bytes(PAYLOAD_MAX))))
    return channel


def test_queues_are_bounded_together_and_the_longest_ends_first() -> None:
    limits = Limits(window=32 << 20, beat=20)

    async def test() -> None:
        async with inside(replace(BASE, queued=8 << 20, limits=limits)) as at:
            host = await a_route(at)
            little, much = await slow_client(at), await slow_client(at)
            first = await fill(host, 6 << 20)
            second = await fill(host, 24 << 20)
            closed = await next_of(host, Kind.CLOSE)
            assert closed.channel == second != first and closed.text("code") == "gone"
            assert at.refusals("slow") == 1
            little.transport.resume_reading()
            received = 0
            while received < 6 << 20:
                received += len((await next_of(little, Kind.DATA)).payload)
            much.transport.abort()

    run(test)


def test_a_client_that_reads_nothing_is_ended_despite_heartbeats() -> None:
    async def test() -> None:
        async with inside(replace(BASE, limits=Limits(window=32 << 20, beat=0.5))) as at:
            host = await a_route(at)
            client = await slow_client(at)
            await fill(host, 16 << 20)
            closing = asyncio.create_task(next_of(host, Kind.CLOSE))
            while not closing.done():
                await asyncio.sleep(0.2)
                for one in (client, host):
                    with contextlib.suppress(ConnectionClosed):
                        await one.send(encode(Frame(Kind.BEAT)))
            assert closing.result().text("code") == "gone" and at.refusals("silent") == 1
            client.transport.abort()

    run(test)


def test_a_client_that_does_not_read_listings_gets_no_more() -> None:
    """Each is 100 times what it costs to ask for it."""

    async def test() -> None:
        async with inside(replace(BASE, limits=Limits(requests=1e6, refill=1e6))) as at:
            host = await a_route(at)
            for number in range(1, 200):
                session = f"{number:024x}"
                at.leases.acquire(session, "host-a", "i", 60.0)
                table = {"name": "n" * 60, "info": {"x": "y" * 1800}}
                await host.send(encode(with_table(Kind.REGISTER, table, session, 1)))
                await next_of(host, Kind.REGISTERED)
            greedy = await at.dial(at.credential())
            greedy.transport.pause_reading()
            asked = 0
            with contextlib.suppress(TimeoutError):
                for _ in range(3000):
                    await asyncio.wait_for(greedy.send(encode(Frame(Kind.LIST))), 1)
                    asked += 1
            await asyncio.sleep(0.5)
            queued = sum(one.queued for one in at.relay._connections.values())
            assert 4 << 20 < queued < 6 << 20, (queued, asked)
            other = await at.dial(at.credential())
            await other.send(encode(Frame(Kind.LIST)))
            await next_of(other, Kind.LISTING)
            greedy.transport.abort()
            while at.relay._limiter.count > 2:  # nothing of it is left, though it never took its lists
                await asyncio.sleep(0.05)

    run(test)


def test_more_connections_than_allowed_are_cut_off() -> None:
    async def test() -> None:
        async with inside(replace(BASE, connections=3)) as at:
            kept = [await at.dial(at.credential()) for _ in range(3)]
            with pytest.raises((OSError, EOFError, WebSocketException)):
                await at.dial(at.credential())
            assert at.refusals("full") == 1
            await kept[0].close()
            kept.append(await at.dial(at.credential()))

    run(test)
