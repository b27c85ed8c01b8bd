"""How a relay is dialled: who it is, whether it is there, and how it is noticed that it no longer is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cmdop_migrate import clock
from cmdop_migrate.errors import CmdopError, NotAdmitted, Unreachable, Usage
from cmdop_migrate.relay.client_connection import Lost, dial
from cmdop_migrate.relay.credentials import Credential
from tests.support.faulty_proxy import Proxy
from tests.support.relay_server import ARelay, a_relay


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ARelay]:
    with a_relay(tmp_path_factory.mktemp("relay")) as made:
        yield made


def pinned(relay: ARelay, pin: str | None = None) -> Credential:
    return replace(relay.client_credential(), pin=pin or relay.facts["pin"])


async def dialled(url: str, credential: Credential) -> str:
    async with await dial(url, credential, 5) as connection:
        return connection.welcome.name


def test_dial_checks_the_pinned_certificate(relay: ARelay) -> None:
    assert asyncio.run(dialled(relay.url, pinned(relay))) == "alice"
    with pytest.raises(NotAdmitted, match="a different one"):
        asyncio.run(dialled(relay.url, pinned(relay, "00" * 32)))
    with pytest.raises(NotAdmitted, match="certificate"):
        asyncio.run(dialled(relay.url, replace(pinned(relay), pin=None)))


@pytest.mark.parametrize(("url", "kind"), [("wss://127.0.0.1:1", Unreachable), ("wss://", Usage), ("nonsense", Usage)])
def test_dial_of_an_unreachable_or_invalid_address(relay: ARelay, url: str, kind: type[CmdopError]) -> None:
    with pytest.raises(kind):
        asyncio.run(dialled(url, pinned(relay)))


def test_dial_of_a_server_that_is_not_a_relay(relay: ARelay, tmp_path: Path) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.write(b"220 hello\r\n"), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await dialled(f"ws://127.0.0.1:{port}", replace(pinned(relay), pin=None))

    with pytest.raises(Unreachable):
        asyncio.run(run())


async def ended_within(relay: ARelay, url: str, then: object) -> float:
    async with await dial(url, pinned(relay), 5) as connection:
        began = time.monotonic()
        assert callable(then)
        then()
        with pytest.raises(Lost):
            async with asyncio.timeout(20):
                await connection.receive()
        return time.monotonic() - began


def test_a_suspended_machine_dials_again(relay: ARelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for an answer on a connection that the relay has forgotten."""
    real = clock.boottime
    assert asyncio.run(
        ended_within(relay, relay.url, lambda: monkeypatch.setattr(clock, "boottime", lambda: real() + 3600))
    ) < 10  # fmt: skip


def test_a_relay_that_is_cut_off(relay: ARelay) -> None:
    with Proxy(relay.port) as proxy:
        assert asyncio.run(ended_within(relay, f"wss://127.0.0.1:{proxy.port}", proxy.block)) < 10
