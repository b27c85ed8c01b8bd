"""The record: one JSON line per thing that happened to a session, kept on its host.

Guarantees are checked from here, so a line is written before the act is
reported as done. One write per line to an O_APPEND file: lines of several
processes never mix.
"""

from __future__ import annotations

import fcntl
import json
import os

from cmdop_migrate.clock import walltime

TYPE_CHECKING = False
if TYPE_CHECKING:  # the holder loads this module: it pays for no more than it needs
    from collections.abc import Callable, Iterator
    from os import PathLike

ROTATE_AT = 8 << 20


class Events:
    """Appends to STATE_DIR/events.jsonl; the file before it is kept as events.jsonl.1."""

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
        """Once, by whoever comes first: a second rotation would throw the older file away."""
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                os.replace(self.path, self.path + ".1")
        except FileNotFoundError:
            return

    def read(self, session: str | None = None) -> Iterator[dict[str, object]]:
        """All kept lines, oldest first; a line cut short by a crash is passed over."""
        return self._read_on({}, session)

    def follow(self, session: str | None, pause: Callable[[], None]) -> Iterator[dict[str, object]]:
        """All kept lines, then new ones as they come, each once, also across a rotation; `pause` is called between."""
        places: dict[int, int] = {}
        while True:
            yield from self._read_on(places, session)
            pause()

    def _read_on(self, places: dict[int, int], session: str | None) -> Iterator[dict[str, object]]:
        """What lies behind `places`: by inode, the byte up to which a file was read. They move along."""
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
