"""The stream through a relay, while there is no relay: waiting, giving up, interrupts."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cmdop_migrate.errors import Unreachable, Usage
from cmdop_migrate.gateway import relay_channel
from cmdop_migrate.gateway.relay_channel import RelayStream
from cmdop_migrate.gateway.resend import KEPT
from cmdop_migrate.relay import credentials
from cmdop_migrate.session.holder_client import HolderGone

NO_RELAY = "ws://127.0.0.1:1"
CREDENTIAL = credentials.issue(Ed25519PrivateKey.generate(), "client", "ann", "execute", "*", None)


@pytest.fixture
def stream() -> Iterator[RelayStream]:
    with RelayStream(NO_RELAY, CREDENTIAL, "5e" * 12) as made:
        yield made


def test_wait_returns_after_its_timeout_or_when_a_descriptor_is_readable(stream: RelayStream) -> None:
    reader, writer = os.pipe()
    try:
        begin = time.monotonic()
        assert stream.wait(0.2, [reader]).readable == frozenset()
        assert 0.15 < time.monotonic() - begin < 5
        os.write(writer, b"x")
        assert stream.wait(None, [reader]).readable == {reader}
        assert stream.wait(0, [reader]).readable == {reader}, "also without blocking"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_relay_that_does_not_answer_ends_the_stream(stream: RelayStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_channel, "FIRST_CONTACT", 0.2)
    with pytest.raises(HolderGone):
        stream.channel.ask(op="status", timeout=30)
    assert isinstance(stream.failure, Unreachable) and "cannot be reached" in stream.failure.message
    with pytest.raises(HolderGone):
        stream.type(b"x")


def test_room_is_bounded_by_unapplied_input(stream: RelayStream) -> None:
    assert stream.has_room() and stream.wait(None, for_room=True).room
    stream.type(b"x" * KEPT)
    assert not stream.has_room() and not stream.wait(0.1, for_room=True).room


def test_listing_of_an_unreachable_relay_is_an_error() -> None:
    with RelayStream(NO_RELAY, CREDENTIAL) as made, pytest.raises(Unreachable):
        made.sessions()


def test_a_stream_inside_an_event_loop_is_refused_with_a_hint() -> None:
    async def inside() -> None:
        RelayStream(NO_RELAY, CREDENTIAL)

    with pytest.raises(Usage, match="event loop"):
        asyncio.run(inside())


def test_an_interrupted_wait_leaves_no_task_behind(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), RelayStream(NO_RELAY, CREDENTIAL, "5e" * 12) as made:
            made._loop.call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
            made.wait(10)
    finally:
        signal.signal(signal.SIGINT, before)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"], caplog.text
