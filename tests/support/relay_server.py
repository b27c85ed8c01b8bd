"""Run a real relay, and hosts and clients that speak its protocol by hand, frame by frame.

with a_relay(tmp_path) as relay:
    host = relay.dial(relay.host_credential("host-a"))
    relay.hold(SESSION, "host-a", token=3)       # what the lease store says
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from cmdop_migrate.config import Config, load
from cmdop_migrate.gateway import credentials
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.register import Swap
from cmdop_migrate.lease.registry import open_register
from cmdop_migrate.relay.credentials import Credential, parse, unb64
from cmdop_migrate.relay.frames import Frame, Kind, decode, encode, with_table
from tests.support.host import Host, until
from tests.support.patience import bound

SESSION = "5e" * 12
PLACE = "127.0.0.1"
T = TypeVar("T")


def insecure() -> ssl.SSLContext:
    """Return a TLS context that accepts the relay's self-signed certificate; tests of pinning use another."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Loop:
    """Run an event loop in a thread, so that tests read from top to bottom."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], within: float) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, within), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


class Dialer:
    """Speak the protocol over one WebSocket by hand."""

    def __init__(self, socket: ClientConnection, loop: Loop) -> None:
        self.socket, self._loop = socket, loop

    def send(self, frame: Frame) -> None:
        self.send_raw(encode(frame))

    def send_raw(self, message: bytes | str) -> None:
        self._loop.run(self.socket.send(message), 10)

    def say(self, kind: Kind, table: dict[str, Any], session: str = "", token: int = 0, channel: int = 0) -> None:
        self.send(with_table(kind, table, session, token, channel))

    def data(self, channel: int, seq: int, payload: bytes, session: str = SESSION, token: int = 0) -> None:
        self.send(Frame(Kind.DATA, session, token, seq, channel, payload))

    def next(self, within: float = 10.0) -> Frame:
        """Return the next frame that is not a heartbeat."""
        end = time.monotonic() + bound(within)
        while True:
            message = self._loop.run(self.socket.recv(), max(0.01, end - time.monotonic()))
            assert isinstance(message, bytes)
            frame = decode(message)
            if frame.kind is not Kind.BEAT:
                return frame

    def expect(self, kind: Kind, within: float = 10.0) -> Frame:
        frame = self.next(within)
        assert frame.kind is kind, frame
        return frame

    def is_quiet(self, seconds: float = 0.3) -> bool:
        try:
            self.next(seconds)
        except TimeoutError:
            return True
        return False

    def refused(self, within: float = 10.0) -> dict[str, Any]:
        """Return the code with which the relay refuses this connection, and assert that nothing follows it."""
        table: dict[str, Any] = {}
        end = time.monotonic() + bound(within)
        try:
            while True:
                frame = self.next(max(0.01, end - time.monotonic()))
                if frame.kind is Kind.REFUSED:
                    table = frame.table()
        except ConnectionClosed:
            return table

    def register(self, session: str = SESSION, token: int = 1, name: str = "work", **more: Any) -> Frame:
        self.say(Kind.REGISTER, {"name": name, "state": "running", **more}, session, token)
        return self.next()

    def open(self, session: str = SESSION, channel: int = 1) -> None:
        self.say(Kind.OPEN, {"handshake": "aGVsbG8"}, session, 0, channel)

    def close(self) -> None:
        self._loop.run(self.socket.close(), 5)


@dataclass
class ARelay:
    at: Host
    port: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    dialers: list[Dialer] = field(default_factory=list)
    loop: Loop = field(default_factory=Loop)

    @property
    def config(self) -> Config:
        return load(environ={key: value for key, value in self.at.env().items() if key.startswith("CMDOP_")})

    @property
    def url(self) -> str:
        return f"wss://{PLACE}:{self.port}"

    def start(self, *options: str) -> None:
        """Start the relay, on the same port as before if it had one."""
        where = ("relay", "serve", "--json", "--listen", f"{PLACE}:{self.port}")
        self.process = subprocess.Popen(
            self.at.argv(*where, *options), env=self.at.env(), stdout=subprocess.PIPE, cwd="/"
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the relay did not start: {self.process.wait(5)}"
        self.facts = json.loads(line)
        self.port = int(self.facts["port"])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None and self.process.stdout is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.send_signal(signal.SIGCONT)
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.process.stdout.close()

    def host_credential(self, name: str) -> Credential:
        return credentials.create_host(self.config, name, None)

    def client_credential(
        self, actor: str = "alice", sessions: str = "*", seconds: float | None = 600, role: Any = "execute"
    ) -> Credential:
        return credentials.create_client(self.config, actor, role, sessions, seconds)

    def knock(self, source: str = PLACE, **options: Any) -> Dialer:
        """Open a connection that has not sent its HELLO yet."""
        opened = self.loop.run(self._connect(source, options), 10)
        self.dialers.append(Dialer(opened, self.loop))
        return self.dialers[-1]

    async def _connect(self, source: str, options: dict[str, Any]) -> ClientConnection:
        return await connect(
            self.url, ssl=insecure(), compression=None, ping_interval=None, proxy=None, max_size=1 << 21,
            close_timeout=1, local_addr=(source, 0), **options,
        )  # fmt: skip

    def hello(self, credential: Credential, source: str = PLACE, **changed: str) -> Dialer:
        """Send a HELLO, with the fields in `changed` replaced."""
        dialer = self.knock(source)
        nonce = unb64(dialer.expect(Kind.CHALLENGE).text("nonce"), 32)
        dialer.say(Kind.HELLO, {**credential.hello(nonce), **changed})
        return dialer

    def dial(self, credential: Credential, source: str = PLACE) -> Dialer:
        """Open a connection, and assert that it is admitted."""
        dialer = self.hello(credential, source)
        dialer.expect(Kind.WELCOME)
        return dialer

    def redial(self, credential: Credential, within: float = 15.0) -> Dialer:
        """Dial until it succeeds: the relay may not be back yet."""

        def attempt() -> Dialer | None:
            try:
                return self.dial(credential)
            except (OSError, ConnectionClosed, TimeoutError):
                return None

        return until(attempt, within, "the relay is back")

    def hold(self, session: str, host: str, token: int, ttl: float = 15.0, state: Any = "held") -> None:
        """Set what the lease store says of a session from now on."""
        register = open_register(self.config.lease)
        checkpoint = "c1" if state == "parked" else None
        record = LeaseRecord(session, token, state, host, "i" * 8, ttl, 0, checkpoint, os.urandom(16).hex())
        before = register.read(session)
        assert register.write(Swap(session, record.to_bytes(), before.version if before else None))
        register.close()

    def events(self, event: str, code: str | None = None) -> list[dict[str, Any]]:
        return [one for one in self.at.events() if one["event"] == event and code in (None, one.get("code"))]

    def logged(self, code: str) -> dict[str, Any]:
        """Return the event of a refusal, which is recorded before or soon after it."""
        return until(lambda: self.events("relay_refused", code), 5, f"{code} is recorded")[-1]


def again(credential: Credential) -> Credential:
    """Return a credential as its bearer has it: parsed again from its text."""
    return parse(credential.text())


@contextlib.contextmanager
def a_relay(place: Path, **settings: str) -> Iterator[ARelay]:
    relay = ARelay(Host(place, name="host-r", subnet="100.64.0.0/24", extra=settings))
    relay.at.ok("relay", "identity")
    relay.start()
    try:
        yield relay
    finally:
        for one in relay.dialers:
            with contextlib.suppress(OSError, ConnectionClosed, TimeoutError):
                one.close()
        relay.loop.close()
        relay.stop()
