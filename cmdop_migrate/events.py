"""Keep a host's event log: one JSON line for each thing that happened to a session.

Guarantees are checked against this log, so a line is written before the act is
reported as done. Each line is one write to an O_APPEND file: lines of several
processes never mix.
"""

from __future__ import annotations

import fcntl
import json
import os

from cmdop_migrate.clock import walltime

TYPE_CHECKING = False
if TYPE_CHECKING:  # the holder imports this module, and must stay small
    from collections.abc import Callable, Iterator
    from os import PathLike

ROTATE_AT = 8 << 20


class Events:
    """Append to STATE_DIR/events.jsonl, and read it; the file before it is kept as events.jsonl.1."""

    def __init__(self, state_dir: str | PathLike[str], host: str) -> None:
        self.path = os.path.join(state_dir, "events.jsonl")
        self.host = host

    def emit(self, event: str, session: str | None = None, **facts: object) -> None:
        """Append one line. `facts` must never hold a secret or what a user typed."""
        line = {"time": round(walltime(), 3), "event": event, "host": self.host}
        if session:
            line["session"] = session
        data = json.dumps({**line, **facts}, separators=(",", ":")).encode() + b"\n"
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data  # the line before was cut by a full disk
            os.write(fd, data)
            if size > ROTATE_AT:
                self._rotate(fd)
        finally:
            os.close(fd)

    def _rotate(self, fd: int) -> None:
        """Rotate the file unless another process has done so: a second rotation would discard the older file."""
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                os.replace(self.path, self.path + ".1")
        except FileNotFoundError:
            return

    def read(self, session: str | None = None) -> Iterator[dict[str, object]]:
        """Yield all kept lines, oldest first; a line cut short by a crash is skipped."""
        return self._read_on({}, session)

    def follow(self, session: str | None, pause: Callable[[], None]) -> Iterator[dict[str, object]]:
        """Yield all kept lines, then new ones as they are written, each once, also across a rotation. Call `pause` in
        between."""
        places: dict[int, int] = {}
        while True:
            yield from self._read_on(places, session)
            pause()

    def _read_on(self, places: dict[int, int], session: str | None) -> Iterator[dict[str, object]]:
        """Yield the lines after `places`, which has, by inode, the byte up to which a file was read, and is updated."""
        for path in (self.path + ".1", self.path):
            try:
                file = open(path, "rb")  # noqa: SIM115 - closed below
            except FileNotFoundError:
                continue
            with file:
                info = os.fstat(file.fileno())
                begin = places.get(info.st_ino, 0)
                file.seek(begin if begin <= info.st_size else 0)  # a new file may have an old one's number
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # still being written
                    places[info.st_ino] = file.tell()
                    event = _parsed(line)
                    if event is not None and (session is None or event.get("session") == session):
                        yield event


def _parsed(line: bytes) -> dict[str, object] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
