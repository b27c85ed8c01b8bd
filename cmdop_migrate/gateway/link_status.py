"""Keep the link's status in a file: the link writes it, `doctor` reads it.

`link.json` in the run directory names the process that wrote it, so that the file of a link that was killed is not
taken for that of another.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from cmdop_migrate.config import Config
from cmdop_migrate.util import atomic


@dataclass(frozen=True)
class LinkStatus:
    """Represent the number of relays that a link is connected to, and of those behind the relay's name."""

    pid: int
    connected: int
    relays: int

    @property
    def is_up(self) -> bool:
        """Return whether the link is connected to every relay."""
        return 0 < self.relays == self.connected


def _file(config: Config) -> Path:
    return config.run_dir / "link.json"


def read(config: Config) -> LinkStatus | None:
    """Return the status that a link wrote last, or None if there is no readable one."""
    try:
        table = json.loads(_file(config).read_bytes())
        return LinkStatus(int(table["pid"]), int(table["connected"]), int(table["relays"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class StatusFile:
    """Represent the status file of the link in this process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._is_closed = False

    def write(self, connected: int, relays: int) -> None:
        """Replace the file. Failure is ignored: the status is for people."""
        if not self._is_closed:
            status = LinkStatus(os.getpid(), connected, relays)
            with contextlib.suppress(OSError):
                atomic.replace(str(_file(self._config)), json.dumps(asdict(status)).encode(), durable=False)

    def close(self) -> None:
        """Delete the file and write it no more: the link of the next agent may run already."""
        self._is_closed = True
        status = read(self._config)
        if status is not None and status.pid == os.getpid():
            _file(self._config).unlink(missing_ok=True)
