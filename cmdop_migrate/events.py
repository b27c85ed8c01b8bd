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
    from collections.abc import Iterator
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
        for path in (self.path + ".1", self.path):
            try:
                lines = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below, not here
            except FileNotFoundError:
                continue
            with lines:
                for text in lines:
                    try:
                        line = json.loads(text)
                    except ValueError:
                        continue
                    if isinstance(line, dict) and (session is None or line.get("session") == session):
                        yield line
