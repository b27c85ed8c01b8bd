"""A connection to a relay, as hosts and clients make it: dialled, admitted, and known to be alive."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidURI, WebSocketException
from websockets.uri import parse_uri

from cmdop_migrate import clock
from cmdop_migrate.errors import NotAdmitted, Unreachable, Usage
from cmdop_migrate.relay import credentials, frames
from cmdop_migrate.relay.credentials import Credential
from cmdop_migrate.relay.frames import Frame, Kind

OPEN_TIMEOUT = 10.0
FIRST_TIMEOUT = 2.5  # a lost first packet is sent again after 1 s, then 3 s, then 7 s: a new try is sooner
SILENT_BEATS = 3
UNACKNOWLEDGED = 5.0
LOOK_EVERY = 1.0
_HINT = "Is it up? Check --relay, or the setting relay."


class Lost(Exception):
    """The connection is over: cut, silent for too long, or closed by the relay. Dial again."""


@dataclass(frozen=True)
class Welcome:
    name: str
    role: str
    window: int
    beat: float


class Connection:
    """Frames to and from the relay. Use as an async context manager; leaving it closes."""

    def __init__(self, opened: ClientConnection, welcome: Welcome) -> None:
        self._socket, self.welcome = opened, welcome
        self._heard = self._said = clock.boottime()
        self._beating = asyncio.create_task(self._beat(), name="beat")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._beating
        await self._socket.close()

    async def send(self, frame: Frame) -> None:
        """Waits while the network takes no more. Lost."""
        self._said = clock.boottime()
        try:
            await self._socket.send(frames.encode(frame))
        except WebSocketException as error:
            raise Lost(str(error)) from error

    async def receive(self) -> Frame:
        """The next frame that says something. Lost."""
        while True:
            frame = await _receive(self._socket)
            self._heard = clock.boottime()
            if frame.kind is not Kind.BEAT:
                return frame

    async def _beat(self) -> None:
        """Says that we are here, and ends what is silent. By the clock that goes on while the machine sleeps: after
        that the connection is gone as a rule, and nobody will say so."""
        beat = self.welcome.beat
        while True:
            await asyncio.sleep(min(LOOK_EVERY, beat / 2))
            if clock.boottime() - self._heard > SILENT_BEATS * beat:
                self._socket.transport.abort()
                return
            if clock.boottime() - self._said >= beat / 2:
                with contextlib.suppress(Lost):
                    await self.send(Frame(Kind.BEAT))


async def addresses(url: str) -> list[str]:
    """All that the relay's name stands for: several relays may run behind one. Unreachable: for none."""
    try:
        parsed = parse_uri(url)
        found = await asyncio.get_running_loop().getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    except InvalidURI as error:
        raise _no_address(url) from error
    except OSError as error:
        raise Unreachable(f"the relay at {url} cannot be reached: {error.strerror or error}", _HINT) from error
    return sorted({str(one[4][0]) for one in found})


async def dial(
    url: str, credential: Credential, timeout: float = OPEN_TIMEOUT, address: str | None = None
) -> Connection:
    """An admitted connection, to one `address` of the name or any. NotAdmitted: the relay does not want us, or is not
    the one we were told of. Unreachable: it does not answer, or not as a relay does."""
    elsewhere: dict[str, Any] = {"host": address} if address is not None else {}
    try:
        async with asyncio.timeout(timeout):
            opened = await connect(
                url,
                ssl=_tls(credential.pin) if url.startswith("wss:") else None,
                max_size=frames.FRAME_MAX,
                compression=None,  # what is sealed does not get smaller
                ping_interval=None,  # frames of our own do that
                open_timeout=None,
                close_timeout=1.0,
                **elsewhere,
            )
            try:
                _notice_dead(opened)
                return await _admitted(opened, credential)
            except BaseException:
                opened.transport.abort()
                raise
    except InvalidURI as error:
        raise _no_address(url) from error
    except ssl.SSLCertVerificationError as error:
        raise NotAdmitted(
            f"the relay's certificate is not good: {error.verify_message}",
            "For one that it signed itself, use a credential with its pin: relay token create --pin",
        ) from error
    except (OSError, TimeoutError, InvalidHandshake, Lost) as error:
        words = str(error) or f"no answer within {timeout:g} s"
        raise Unreachable(f"the relay at {url} cannot be reached: {words}", _HINT) from error


def _no_address(url: str) -> Usage:
    return Usage(f"not the address of a relay: {url!r}", "Write it like wss://relay.example:7443")


def _notice_dead(connection: ClientConnection) -> None:
    """Who changes networks is told by nobody: what was sent and is not acknowledged within seconds ends it."""
    tcp = connection.transport.get_extra_info("socket")
    if tcp is not None and tcp.family in (socket.AF_INET, socket.AF_INET6):
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED * 1000))


def _tls(pin: str | None) -> ssl.SSLContext:
    if pin is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the machine's authorities, which take long to read
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # `_admitted` looks at the pin
    return context


async def _admitted(opened: ClientConnection, credential: Credential) -> Connection:
    if credential.pin is not None:
        tls = opened.transport.get_extra_info("ssl_object")
        found = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest() if tls else ""
        if not hmac.compare_digest(found, credential.pin):
            raise NotAdmitted(
                "this is not the relay that the credential is for: its certificate is another",
                "If the relay has a new one, ask for a new credential: relay token create",
            )
    challenge = await _expect(opened, Kind.CHALLENGE)
    try:
        nonce = credentials.unb64(challenge.text("nonce"), credentials.NONCE_SIZE)
        await opened.send(frames.encode(frames.with_table(Kind.HELLO, credential.hello(nonce))))
        said = (await _expect(opened, Kind.WELCOME)).table()
        window, beat = int(said["window"]), float(said["beat"])
        if window < 1 or not beat > 0:
            raise ValueError("figures that make no sense")
        return Connection(opened, Welcome(str(said["name"]), str(said["role"]), window, beat))
    except (WebSocketException, ValueError, KeyError, TypeError) as error:
        raise Lost(f"it does not speak as a relay does: {error}") from error


async def _expect(opened: ClientConnection, kind: Kind) -> Frame:
    frame = await _receive(opened)
    if frame.kind is Kind.REFUSED:
        raise _refused(frame)
    if frame.kind is not kind:
        raise Lost(f"{frame.kind.name} where {kind.name} was expected")
    return frame


def _refused(frame: Frame) -> NotAdmitted | Lost:
    try:
        code, why = frame.text("code", ""), frame.text("why", "")
    except frames.FrameError:
        code, why = "", "without a reason"
    if code == "not_admitted":
        return NotAdmitted(f"the relay does not admit us: {why}", "See, on a host: cmdop-migrate relay token ls --all")
    return Lost(f"it refuses for now: {why}")


async def _receive(opened: ClientConnection) -> Frame:
    try:
        data = await opened.recv()
    except WebSocketException as error:
        raise Lost(str(error)) from error
    if isinstance(data, str):
        raise Lost("a text message: this is no relay")
    try:
        return frames.decode(data)
    except frames.FrameError as error:
        raise Lost(str(error)) from error
