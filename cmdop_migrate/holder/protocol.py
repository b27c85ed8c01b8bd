"""Define what a holder and its clients say to each other over a unix stream socket: frames, requests and exit reasons.

    kind (1 byte) | length (4 bytes, big-endian) | payload

    CONTROL   a JSON object
    OUTPUT    8 bytes: the sequence number of the first byte; then what the session printed
    INPUT     bytes typed by the actor named in `attach`

Both sides refuse a frame above MAX_PAYLOAD, except a holder's answer, which may
hold all input that waits. A holder parses each request once, here, into a
value with Final fields. These are plain classes: 12 dataclasses would add 15 ms
to the start of every session, as many named tuples 5 ms.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from cmdop_migrate.model import ExitKind

PROTOCOL = 1
CONTROL, OUTPUT, INPUT = 0, 1, 2
MAX_PAYLOAD = 1 << 20
MAX_ANSWER = 4 << 20  # in JSON a byte takes up to six
OUTPUT_STEP = 32 << 10
TURN_TIMEOUT = 300.0  # seconds that a write turn lasts without input, unless the request says otherwise
_HEADER = struct.Struct(">BI")
_SEQ = struct.Struct(">Q")
_TIMEVAL = struct.Struct("ll")
_MAX_SECONDS = 1e12


class ProtocolError(Exception):
    """Report bytes that are no frame or no message. The connection is unusable after it."""


def control(message: dict[str, object]) -> bytes:
    """Return a CONTROL frame."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(CONTROL, len(payload)) + payload


def output(seq: int, data: bytes | memoryview) -> bytes:
    """Return an OUTPUT frame; `seq` is the sequence number of the first byte of `data`."""
    return _HEADER.pack(OUTPUT, _SEQ.size + len(data)) + _SEQ.pack(seq) + data


def typed(data: bytes) -> bytes:
    """Return an INPUT frame."""
    return _HEADER.pack(INPUT, len(data)) + data


def parse_output(payload: bytes) -> tuple[int, bytes]:
    """Return the sequence number of the first byte, and the bytes."""
    return _SEQ.unpack_from(payload)[0], payload[_SEQ.size :]


def parse_control(payload: bytes) -> dict[str, object]:
    """Return the JSON object in a CONTROL frame. Raise ProtocolError if it holds another value."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("not a JSON object")
    return message


def seconds(value: object) -> float:
    """Return a time from a message. Raise ValueError for no number, and for one out of range: JSON may hold NaN and
    Infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a time: {value!r}")
    if not -_MAX_SECONDS < value < _MAX_SECONDS:
        raise ValueError(f"not a time: {value}")
    return float(value)


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


class Fields:
    """Read the fields of one request. Raise KeyError for one that is missing, ValueError for one of another type."""

    def __init__(self, message: dict[str, object]) -> None:
        self._message = message

    def text(self, name: str) -> str:
        value = self._message[name]
        if not isinstance(value, str):
            raise ValueError(f"{name}: not a text")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self._message.get(name) is None else self.text(name)

    def data(self, name: str) -> bytes:
        """Return bytes that the JSON holds as a text of one character each."""
        return self.text(name).encode("latin-1")

    def integer(self, name: str) -> int:
        value = self._message[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name}: not an integer")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._message.get(name) is None else self.integer(name)

    def seconds(self, name: str) -> float:
        return seconds(self._message[name])

    def optional_seconds(self, name: str) -> float | None:
        return None if self._message.get(name) is None else self.seconds(name)

    def flag(self, name: str) -> bool:
        return bool(self._message.get(name))

    def is_true(self, name: str) -> bool:
        """Return whether it is JSON's `true`, for a flag that gives a right: nothing else may pass for it."""
        return self._message.get(name) is True


class Empty:
    """Ask for something that needs no fields."""

    def __init__(self, _: Fields) -> None:
        return


class Size:
    """Set the terminal's size, in characters."""

    def __init__(self, fields: Fields) -> None:
        self.rows: Final = fields.integer("rows")
        self.cols: Final = fields.integer("cols")


class Attach:
    """Ask for output. `start`: from which byte; None: all that is kept. `token`: the fencing token of the incarnation
    that the client was last attached to. `stream`: the id of the client's numbered input."""

    def __init__(self, fields: Fields) -> None:
        self.actor: Final = fields.text("actor")
        self.read_only: Final = fields.flag("read_only")
        self.start: Final = fields.optional_integer("from")
        self.is_terminal: Final = fields.flag("terminal")
        self.size: Final = Size(fields) if fields.flag("rows") else None
        self.token: Final = fields.optional_integer("token")
        self.stream: Final = fields.optional_text("stream")


class Typed:
    """Deliver numbered input: `at` is the number of its first byte in the client's stream."""

    def __init__(self, fields: Fields) -> None:
        self.at: Final = fields.integer("at")
        self.data: Final = fields.data("data")


class Send:
    """Deliver one whole input, which is answered. `stream`: an id; sent again under it, it is applied once."""

    def __init__(self, fields: Fields) -> None:
        self.actor: Final = fields.text("actor")
        self.data: Final = fields.data("data")
        self.stream: Final = fields.optional_text("stream")


class TurnRequest:
    """Ask for the write turn, or about it. The process that admits the client says who it is, and whether as admin."""

    def __init__(self, fields: Fields) -> None:
        self.do: Final = fields.text("do")
        self.actor: Final = fields.text("actor")
        self.is_admin: Final = fields.is_true("admin")
        self.timeout: Final = fields.optional_seconds("lasts") or TURN_TIMEOUT
        self.to: Final = fields.optional_text("to")
        self.waits: Final = fields.flag("wait")
        self.freeze: Final = fields.flag("freeze")


class Renewal:
    """Say that the lease is held under `token` until `until`, by a request to the lease store that began at `since`."""

    def __init__(self, fields: Fields) -> None:
        self.token: Final = fields.integer("token")
        self.until: Final = fields.seconds("until")
        self.since: Final = fields.seconds("since")


class Superseded:
    """Say that an incarnation with a higher fencing token runs on another host."""

    def __init__(self, fields: Fields) -> None:
        self.token: Final = fields.integer("token")
        self.host: Final = fields.text("host")


class Checkpoint:
    """Name a checkpoint of this session."""

    def __init__(self, fields: Fields) -> None:
        self.checkpoint: Final = fields.text("checkpoint")


class Freeze:
    """Ask to freeze the session; `only_idle`: only if it was idle for so many seconds."""

    def __init__(self, fields: Fields) -> None:
        self.only_idle: Final = fields.optional_seconds("only_idle")


class Moved:
    """Say that the session runs elsewhere; `to` and `token` are absent in a request of an older version."""

    def __init__(self, fields: Fields) -> None:
        self.why: Final = fields.text("why")
        self.to: Final = fields.optional_text("to")
        self.token: Final = fields.optional_integer("token")


class Kill:
    """Ask to end the session."""

    def __init__(self, fields: Fields) -> None:
        self.signal: Final = fields.integer("signal")
        self.grace: Final = fields.seconds("grace")
        self.only_idle: Final = fields.optional_seconds("only_idle")
        if self.signal not in signal.valid_signals():
            raise ValueError(f"no such signal: {self.signal}")


class Decoder:
    """Cut a stream of bytes into frames."""

    def __init__(self, limit: int = MAX_PAYLOAD) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames that `data` completes: kind and payload. Raise ProtocolError for what is no frame."""
        self._buffer += data
        frames: list[tuple[int, bytes]] = []
        position = 0
        while len(self._buffer) - position >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer, position)
            if kind > INPUT or length > self._limit or (kind == OUTPUT and length < _SEQ.size):
                raise ProtocolError(f"frame of kind {kind}, {length} bytes")
            end = position + _HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[position + _HEADER.size : end])))
            position = end
        del self._buffer[:position]
        return frames


class Edges:
    """Find where another frame may be inserted into a stream of frames."""

    def __init__(self) -> None:
        self._left = 0  # bytes missing of the frame that has begun
        self._header = b""

    def feed(self, data: bytes) -> bool:
        """Return whether the stream, up to and including `data`, ends with a whole frame."""
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
    """Return a socket that listens at `path`, also if that is longer than the 107 bytes that sun_path holds."""
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        sock.listen(64)
        return sock
    finally:
        os.close(directory)


def connect(path: str, timeout: float = 10.0) -> socket.socket:
    """Return a connection to the listener at `path`. Raise FileNotFoundError or ConnectionRefusedError without
    one, BlockingIOError if it does not accept within `timeout`, which also bounds each later send."""
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock = socket.socket(socket.AF_UNIX)
        # Not settimeout(): a unix socket that does not block fails immediately when the listener's queue is full.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(timeout), int(timeout % 1 * 1e6)))
        sock.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        return sock
    finally:
        os.close(directory)
