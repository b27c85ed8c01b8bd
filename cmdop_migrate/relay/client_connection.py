"""Connect to a relay, as hosts and clients do: dialled, admitted, and kept alive by heartbeats."""

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
FIRST_TIMEOUT = 2.5  # a lost first packet is sent again after 1 s, then 3 s, then 7 s: a new attempt is sooner
SILENT_BEATS = 3
UNACKNOWLEDGED = 5.0  # seconds
HEARTBEAT_CHECK_EVERY = 1.0
_HINT = "Is it up? Check --relay, or the setting relay."


class Lost(Exception):
    """Report that the connection has ended: cut, silent for too long, or closed by the relay. Dial again."""


@dataclass(frozen=True)
class Welcome:
    """Represent the relay's WELCOME: whom it has admitted, and the limits of the connection."""

    name: str
    role: str
    window: int
    beat: float


class Connection:
    """Send and receive frames. Use as an async context manager, which closes the connection at its end."""

    def __init__(self, opened: ClientConnection, welcome: Welcome) -> None:
        self._socket, self.welcome = opened, welcome
        self._received_at = self._sent_at = clock.boottime()
        self._beating = asyncio.create_task(self._beat(), name="beat")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the heartbeat and close the connection."""
        self._beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._beating
        await self._socket.close()

    async def send(self, frame: Frame) -> None:
        """Send a frame; wait while the network takes no more. Raise Lost."""
        self._sent_at = clock.boottime()
        try:
            await self._socket.send(frames.encode(frame))
        except WebSocketException as error:
            raise Lost(str(error)) from error

    async def receive(self) -> Frame:
        """Return the next frame that is not a heartbeat. Raise Lost."""
        while True:
            frame = await _receive(self._socket)
            self._received_at = clock.boottime()
            if frame.kind is not Kind.BEAT:
                return frame

    async def _beat(self) -> None:
        """Send heartbeats, and abort the connection if the relay is silent. CLOCK_BOOTTIME counts while the machine is
        suspended: after that the connection is usually gone, and no packet reports it."""
        beat = self.welcome.beat
        while True:
            await asyncio.sleep(min(HEARTBEAT_CHECK_EVERY, beat / 2))
            if clock.boottime() - self._received_at > SILENT_BEATS * beat:
                self._socket.transport.abort()
                return
            if clock.boottime() - self._sent_at >= beat / 2:
                with contextlib.suppress(Lost):
                    await self.send(Frame(Kind.BEAT))


async def addresses(url: str) -> list[str]:
    """Return all addresses of the relay's name: several relays may share one. Raise Unreachable if it has none."""
    try:
        parsed = parse_uri(url)
        resolved = await asyncio.get_running_loop().getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    except InvalidURI as error:
        raise _no_address(url) from error
    except OSError as error:
        raise Unreachable(f"the relay at {url} cannot be reached: {error.strerror or error}", _HINT) from error
    return sorted({str(entry[4][0]) for entry in resolved})


async def dial(
    url: str, credential: Credential, timeout: float = OPEN_TIMEOUT, address: str | None = None
) -> Connection:
    """Return an admitted connection to the relay, at one `address` of its name or at any.

    Raise NotAdmitted if the relay refuses the credential, or its certificate is not the pinned one; Unreachable if it
    does not answer, or not as a relay does.
    """
    fixed: dict[str, Any] = {"host": address} if address is not None else {}
    try:
        async with asyncio.timeout(timeout):
            opened = await connect(
                url,
                ssl=_tls(credential.pin) if url.startswith("wss:") else None,
                max_size=frames.FRAME_MAX,
                compression=None,  # encrypted data does not compress
                ping_interval=None,  # the protocol has its own heartbeats
                open_timeout=None,
                close_timeout=1.0,
                **fixed,
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
            f"the relay's certificate is not valid: {error.verify_message}",
            "For a self-signed certificate, use a credential with its pin: relay token create --pin",
        ) from error
    except (OSError, TimeoutError, InvalidHandshake, Lost) as error:
        why = str(error) or f"no answer within {timeout:g} s"
        raise Unreachable(f"the relay at {url} cannot be reached: {why}", _HINT) from error


def _no_address(url: str) -> Usage:
    return Usage(f"not the address of a relay: {url!r}", "Write it like wss://relay.example:7443")


def _notice_dead(connection: ClientConnection) -> None:
    """End the connection if sent data is not acknowledged within seconds: no packet reports a change of networks."""
    tcp = connection.transport.get_extra_info("socket")
    if tcp is not None and tcp.family in (socket.AF_INET, socket.AF_INET6):
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED * 1000))


def _tls(pin: str | None) -> ssl.SSLContext:
    if pin is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the system's authorities, which take long to load
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # `_admitted` checks the pin
    return context


async def _admitted(opened: ClientConnection, credential: Credential) -> Connection:
    if credential.pin is not None:
        tls = opened.transport.get_extra_info("ssl_object")
        digest = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest() if tls else ""
        if not hmac.compare_digest(digest, credential.pin):
            raise NotAdmitted(
                "this is not the relay that the credential is for: its certificate is a different one",
                "If the relay has a new certificate, ask for a new credential: relay token create",
            )
    challenge = await _expect(opened, Kind.CHALLENGE)
    try:
        nonce = credentials.unb64(challenge.text("nonce"), credentials.NONCE_SIZE)
        await opened.send(frames.encode(frames.with_table(Kind.HELLO, credential.hello(nonce))))
        welcome = (await _expect(opened, Kind.WELCOME)).table()
        window, beat = int(welcome["window"]), float(welcome["beat"])
        if window < 1 or not beat > 0:
            raise ValueError("invalid window or heartbeat interval")
        return Connection(opened, Welcome(str(welcome["name"]), str(welcome["role"]), window, beat))
    except (WebSocketException, ValueError, KeyError, TypeError) as error:
        raise Lost(f"protocol error from the relay: {error}") from error


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
    return Lost(f"the relay refuses for now: {why}")


async def _receive(opened: ClientConnection) -> Frame:
    try:
        data = await opened.recv()
    except WebSocketException as error:
        raise Lost(str(error)) from error
    if isinstance(data, str):
        raise Lost("a text message: this is not a relay")
    try:
        return frames.decode(data)
    except frames.FrameError as error:
        raise Lost(str(error)) from error
