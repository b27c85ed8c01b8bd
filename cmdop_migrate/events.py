"""The record: one JSON line per thing that happened to a session, kept on its host.

Guarantees are checked from here, so a line is written before the act is
reported as done. One write per line to an O_APPEND file: lines of several
processes never mix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from cmdop_migrate.clock import walltime

ROTATE_AT = 8 << 20


class Events:
    """Appends to STATE_DIR/events.jsonl; the file before it is kept as events.jsonl.1."""

    def __init__(self, state_dir: Path, host: str) -> None:
        self.path = state_dir / "events.jsonl"
        self.host = host

    def emit(self, event: str, session: str | None = None, **facts: object) -> None:
        """Append one line. `facts` must never hold a secret or what a user typed."""
        line = {"time": round(walltime(), 3), "event": event, "host": self.host}
        if session:
            line["session"] = session
        data = json.dumps({**line, **facts}, separators=(",", ":")).encode() + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, data)
            if os.fstat(fd).st_size > ROTATE_AT:
                os.replace(self.path, self.path.with_suffix(".jsonl.1"))
        finally:
            os.close(fd)

    def read(self, session: str | None = None) -> Iterator[dict[str, object]]:
        """All kept lines, oldest first; a line cut short by a crash is passed over."""
        for path in (self.path.with_suffix(".jsonl.1"), self.path):
            if not path.exists():
                continue
            with path.open(encoding="utf-8") as lines:
                for text in lines:
                    try:
                        line = json.loads(text)
                    except ValueError:
                        continue
                    if session is None or line.get("session") == session:
                        yield line
