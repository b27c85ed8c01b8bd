"""Encode and parse frames, one binary WebSocket message each (docs/internals/relay-protocol.md)."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

VERSION = 1
PAYLOAD_MAX = 64 << 10
_HEADER = struct.Struct(">BBI12sQQ")
HEADER_SIZE = _HEADER.size
FRAME_MAX = HEADER_SIZE + PAYLOAD_MAX
CHANNEL_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
_CREDIT = struct.Struct(">I")
_NO_SESSION = bytes(12)


class FrameError(ValueError):
    """Report that a message is not a valid frame, or not valid for its kind: the peer does not speak this protocol."""


class Kind(IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    REGISTER = 5
    REGISTERED = 6
    LEAVE = 7
    LIST = 8
    LISTING = 9
    OPEN = 10
    DATA = 11
    CREDIT = 12
    CLOSE = 13
    STATUS = 14
    BEAT = 15
    MOVED = 16


@dataclass(frozen=True, slots=True)
class Frame:
    """Represent a frame. `session` is 24 hex digits, or empty. Numbers are unsigned: channel 32 bits, token and seq
    64."""

    kind: Kind
    session: str = ""
    token: int = 0
    seq: int = 0
    channel: int = 0
    payload: bytes = b""

    def table(self) -> dict[str, Any]:
        """Return the payload as a JSON object; an empty payload is an empty object. Raise FrameError if it is not, and
        also for a payload that can be read but not encoded again: it would fail at the peer it is forwarded to."""
        if not self.payload:
            return {}
        try:
            table = json.loads(self.payload.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
            if b"\\u" in self.payload:
                json.dumps(table, ensure_ascii=False).encode()  # fails for a lone surrogate
        except (ValueError, RecursionError):
            raise FrameError(f"the payload of {self.kind.name} is not JSON") from None
        if not isinstance(table, dict):
            raise FrameError(f"the payload of {self.kind.name} is not a JSON object")
        return table

    def text(self, field: str, default: str | None = None) -> str:
        """Return a text field of the payload. Raise FrameError if it is missing (without `default`) or not a text."""
        value = self.table().get(field, default)
        if not isinstance(value, str):
            raise FrameError(f"{self.kind.name} has no text {field!r}")
        return value

    def credit(self) -> int:
        """Return the bytes that a CREDIT grants. Raise FrameError."""
        if len(self.payload) != _CREDIT.size:
            raise FrameError("a credit is four bytes")
        (count,) = _CREDIT.unpack(self.payload)
        return int(count)


def with_table(
    kind: Kind, table: dict[str, Any], session: str = "", token: int = 0, channel: int = 0, seq: int = 0
) -> Frame:
    """Return a frame whose payload is this JSON object."""
    payload = json.dumps(table, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return Frame(kind, session, token, seq, channel, payload)


def with_credit(channel: int, count: int, session: str = "", token: int = 0) -> Frame:
    """Return a CREDIT frame for `count` bytes."""
    return Frame(Kind.CREDIT, session, token, 0, channel, _CREDIT.pack(count))


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame. Raise FrameError if its payload is too long or a number out of range."""
    if len(frame.payload) > PAYLOAD_MAX:
        raise FrameError(f"a payload of {len(frame.payload)} bytes; at most {PAYLOAD_MAX}")
    numbers = ((frame.channel, CHANNEL_MAX), (frame.token, _U64_MAX), (frame.seq, _U64_MAX))
    if any(not 0 <= value <= most for value, most in numbers):
        raise FrameError("a number out of range")
    header = _HEADER.pack(VERSION, frame.kind, frame.channel, _session_bytes(frame.session), frame.token, frame.seq)
    return header + frame.payload


def decode(data: bytes) -> Frame:
    """Return the frame in a message. Raise FrameError if it is invalid."""
    if not HEADER_SIZE <= len(data) <= FRAME_MAX:
        raise FrameError(f"a message of {len(data)} bytes")
    version, kind, channel, session, token, seq = _HEADER.unpack_from(data)
    if version != VERSION:
        raise FrameError(f"version {version}; this program knows {VERSION}")
    try:
        known = Kind(kind)
    except ValueError:
        raise FrameError(f"unknown kind {kind}") from None
    name = "" if session == _NO_SESSION else session.hex()
    return Frame(known, name, token, seq, channel, bytes(data[HEADER_SIZE:]))


def session_bytes(session: str) -> bytes:
    """Return the 12 bytes of a session id, as they are signed. Raise FrameError if it is invalid."""
    if not session:
        raise FrameError("no session id")
    return _session_bytes(session)


def _session_bytes(session: str) -> bytes:
    if not session:
        return _NO_SESSION
    if len(session) != 24 or any(digit not in "0123456789abcdef" for digit in session):
        raise FrameError(f"not a session id: {session[:40]!r}")
    return bytes.fromhex(session)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _no_constant(text: str) -> None:
    raise ValueError(text)
