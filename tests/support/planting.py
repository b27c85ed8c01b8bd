"""Plant one thing in a session, and find out whether it can be parked and restored.

with Planted(host, "ping_socket") as planted:
    planted.plan()          # what `plan --json` answers
    planted.force()         # what happens when nothing is checked before the freeze
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cmdop_migrate.errors import CmdopError
from cmdop_migrate.snapshot import checkpoint
from cmdop_migrate.snapshot.capture import dump_checks
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions
from tests.support.host import PROJECT, Host, until
from tests.support.plan_session import Unfrozen
from tests.support.program_session import Program

WITHIN = 60.0


class Planted(Program):
    """Run a session whose only program is one of tests/plantings. The test is skipped where this machine does not support
    it."""

    def __init__(self, host: Host, planting: str, options: tuple[str, ...] = ()) -> None:
        given = ("--env", f"PYTHONPATH={PROJECT}", *options)
        super().__init__(host, sys.executable, "-m", "tests.plantings", planting, name=planting, options=given)
        self.unfrozen: Unfrozen | None = None
        if "from_outside" in planting:
            directory = next(one for one in options if one.startswith("SHARED=")).removeprefix("SHARED=")
            self._connect(Path(directory), closes="closed" in planting)

    def __enter__(self) -> Planted:
        try:
            said = self.see(r"(?m)^planted|^cannot plant: .*", WITHIN)
            if said != "planted":
                pytest.skip(f"{said.strip()} on this machine")
        except BaseException:
            self.__exit__()
            raise
        self.unfrozen = Unfrozen(self.host.group(self.session))
        return self

    def __exit__(self, *error: object) -> None:
        if self.unfrozen is not None:
            self.unfrozen.close()
        super().__exit__(*error)

    def _connect(self, directory: Path, closes: bool) -> None:
        """Connect to the session's listener, as a process of the host does."""
        self.client = socket.socket(socket.AF_UNIX)
        until(lambda: _tried(lambda: self.client.connect(str(directory / "inside"))), WITHIN, "it listens")
        self.client.send(b"hello")
        if closes:
            self.client.close()
        (directory / "connected").touch()

    def was_frozen(self) -> bool:
        """Return whether it was frozen since it was planted."""
        assert self.unfrozen is not None
        return self.unfrozen.changed()

    def plan(self, *options: str) -> dict[str, Any]:
        """Return what `plan` answers."""
        answer: dict[str, Any] = json.loads(self.host.cm("--json", "plan", self.name, *options).stdout)
        assert "error" not in answer, answer
        return answer

    def blockers(self, *options: str) -> list[tuple[str, str]]:
        """Return the check and the message of each finding that blocks."""
        found = self.plan(*options)["findings"]
        return [(one["check"], one["message"]) for one in found if one["level"] == "block"]

    def still_works(self) -> str:
        """Let the program look at what it has: `ok`, or what is wrong."""
        self.type("\n")
        return self.see(r"(?m)^ok|^bad: .*", WITHIN).strip()

    def force(self) -> str:
        """Park and restore it with nothing checked before the freeze. Return what failed; empty when all of it
        works."""
        nothing = mock.Mock(return_value=None)
        with mock.patch.object(dump_checks, "check", nothing), mock.patch.object(dump_checks, "check_frozen", nothing):
            try:
                checkpoint.checkpoint(self.records, self.name, CheckpointOptions())
            except CmdopError as error:
                return f"checkpoint: {error.message}"
        try:
            done = self.host.cm("restore", self.name)
        except subprocess.TimeoutExpired:
            return "restore: hangs"
        if done.returncode:
            return f"restore: {done.stderr.decode()}"
        found = self.still_works()
        return "" if found == "ok" else f"restored, but {found}"


def _tried(work: Callable[[], None]) -> bool:
    try:
        work()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def outside() -> Iterator[Path]:
    """Make a directory with the listeners that tests/plantings/outside.py connects to."""
    directory = Path(tempfile.mkdtemp(prefix="cm-"))  # a short name: that of a socket has 108 bytes
    made: list[socket.socket] = []

    def listen(name: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, kind)
        sock.bind(str(directory / name))
        if kind != socket.SOCK_DGRAM:
            sock.listen()
        made.append(sock)
        return sock

    def serve(listener: socket.socket, keeps: bool) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                if keeps:
                    client.send(b"hello")
                    made.append(client)
                else:
                    client.close()

    for name, keeps in (("keeps", True), ("closes", False)):
        threading.Thread(target=serve, args=(listen(name), keeps), daemon=True).start()
    listen("ignores")
    listen("letters", socket.SOCK_DGRAM)
    try:
        yield directory
    finally:
        for one in made:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        shutil.rmtree(directory)
