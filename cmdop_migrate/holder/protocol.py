"""Frames between a holder and whoever talks to it, over a unix stream socket.

    kind (1 byte) | length (4 bytes, big-endian) | payload

    CONTROL   a JSON object
    OUTPUT    8 bytes sequence number of the first byte, then what the session printed
    INPUT     bytes typed by the actor named in `attach`

Both sides refuse a frame above MAX_PAYLOAD; but for a holder's answer, which
may hold all input that waits. Stdlib only: the holder loads this.
"""

from __future__ import annotations

import json
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cmdop_migrate.model import ExitKind

PROTOCOL = 1
CONTROL, OUTPUT, INPUT = 0, 1, 2
MAX_PAYLOAD = 1 << 20
MAX_ANSWER = 4 << 20  # in JSON a byte takes up to six
OUTPUT_STEP = 32 << 10
_HEADER = struct.Struct(">BI")
_SEQ = struct.Struct(">Q")
_TIMEVAL = struct.Struct("ll")
_NEVER = 1e12  # seconds


def exit_reason(kind: ExitKind, *, code: int = 0, signal: str = "", to: object = None, token: object = None) -> str:
    """Return the sentence that tells people how a session ended (`model.Exit.reason`). Programs compare the kind."""
    if kind == "killed":
        return f"killed by {signal}" if signal else "killed"
    return {
        "exited": f"exited {code}",
        "moved": f"moved to {to} (token {token})",
        "superseded": f"superseded by token {token} on {to}",
        "holder_died": "its holder died",
        "parking_unknown": "it ended while it was being parked",
        "not_parked": "it ended before it was parked",
        "kill_pending": "killed; its lease is still to be ended",
    }[kind]


class ProtocolError(Exception):
    """The other side sent what no frame looks like. The connection is not usable any more."""


def control(message: dict[str, object]) -> bytes:
    payload = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(CONTROL, len(payload)) + payload


def output(seq: int, data: bytes | memoryview) -> bytes:
    return _HEADER.pack(OUTPUT, _SEQ.size + len(data)) + _SEQ.pack(seq) + data


def typed(data: bytes) -> bytes:
    return _HEADER.pack(INPUT, len(data)) + data


def parse_output(payload: bytes) -> tuple[int, bytes]:
    return _SEQ.unpack_from(payload)[0], payload[_SEQ.size :]


def parse_control(payload: bytes) -> dict[str, object]:
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("not a JSON object")
    return message


def seconds(value: object) -> float:
    """A time out of a message. ValueError for one that never comes: JSON may say NaN and Infinity."""
    found = float(str(value))
    if not -_NEVER < found < _NEVER:
        raise ValueError(f"not a time: {found}")
    return found


class Decoder:
    """Bytes in, whole frames out."""

    def __init__(self, most: int = MAX_PAYLOAD) -> None:
        self._buffer = bytearray()
        self._most = most

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        self._buffer += data
        frames: list[tuple[int, bytes]] = []
        position = 0
        while len(self._buffer) - position >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer, position)
            if kind > INPUT or length > self._most or (kind == OUTPUT and length < _SEQ.size):
                raise ProtocolError(f"frame of kind {kind}, {length} bytes")
            end = position + _HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[position + _HEADER.size : end])))
            position = end
        del self._buffer[:position]
        return frames


class Edges:
    """Where in a stream of frames one may put a frame of one's own: bytes in, and whether they end with a whole one."""

    def __init__(self) -> None:
        self._left = 0  # of the frame that is under way
        self._header = b""

    def feed(self, data: bytes) -> bool:
        position = 0
        while position < len(data):
            if self._left:
                step = min(self._left, len(data) - position)
                self._left -= step
            else:
                step = min(_HEADER.size - len(self._header), len(data) - position)
                self._header += data[position : position + step]
                if len(self._header) == _HEADER.size:
                    self._left = _HEADER.unpack(self._header)[1]
                    self._header = b""
            position += step
        return not self._left and not self._header


def listen(path: str) -> socket.socket:
    """A listening socket at `path`, however long the path is (sun_path holds only 107 bytes)."""
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        sock.listen(64)
        return sock
    finally:
        os.close(directory)


def connect(path: str, timeout: float = 10.0) -> socket.socket:
    """Raises FileNotFoundError or ConnectionRefusedError when nobody is there, BlockingIOError when whoever is
    there does not accept within `timeout`, which also bounds each later send."""
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock = socket.socket(socket.AF_UNIX)
        # Not settimeout(): a unix socket that does not block gives up at once when the listener's queue is full.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(timeout), int(timeout % 1 * 1e6)))
        sock.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        return sock
    finally:
        os.close(directory)
