"""Spawn a holder process and follow its start, from the command that starts or restores a session."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import cmdop_migrate
from cmdop_migrate.errors import CmdopError, Unexpected, from_code

START_TIMEOUT = 60.0
_SO_SNDBUFFORCE = 32
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from cmdop_migrate.holder.process import main; main()"


class Starter:
    """Start one holder. The socket ties both together: if this process is killed, the holder undoes the start."""

    def __init__(self, order: dict[str, Any], lock: int, log_file: Path, *more: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(cmdop_migrate.__file__).parent.parent)
        log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with log_file.open("ab") as errors, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, package, str(theirs.fileno()), str(lock)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(), lock, *more),
                start_new_session=True,
                cwd="/",
            )
        self.control = ours
        ours.settimeout(START_TIMEOUT)
        payload = json.dumps(order).encode()
        # FORCE: the order holds the whole environment, which may be more than the system's default allows.
        ours.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, len(payload) + 65536)
        ours.send(payload)

    def expect(self) -> dict[str, Any]:
        """Return the holder's next message. Raise the error that it reports, or Unexpected."""
        try:
            data = self.control.recv(64 << 10)
        except TimeoutError as error:
            raise Unexpected(f"the holder did not answer within {START_TIMEOUT:.0f} s", "See its log.") from error
        if not data:
            raise Unexpected("the holder died while starting", "See the log; run the command again.")
        message: dict[str, Any] = json.loads(data)
        if message.get("ok") is False:
            raise failure(message)
        return message

    def check(self, within: float = 1.0) -> None:
        """Raise the error that the holder reports, if it does so within that time."""
        if select.select([self.control], [], [], within)[0]:
            self.expect()

    def go(self) -> None:
        """Tell the holder that the network is ready."""
        self.control.send(b"go")

    def close(self) -> None:
        """Close the connection to the holder."""
        self.control.close()

    def abandon(self) -> None:
        """Close the connection and wait until the holder has cleaned up; one that hangs is killed."""
        self.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def failure(message: dict[str, Any]) -> CmdopError:
    """Return the error that a holder reported."""
    return from_code(message["code"], message["message"] or "the session could not start", message["hint"])


def overlays(points: list[str]) -> list[dict[str, str]]:
    """Return what the sandbox mounts; `store` is the directory below the session's that holds upper and work. Pure."""
    return [{"point": point, "store": f"layers/{number}"} for number, point in enumerate(points)]


def make_stores(directory: Path, layers: list[dict[str, str]]) -> None:
    """Create empty upper and work directories; the top of an upper takes the owner and mode of what it covers."""
    for layer in layers:
        store = directory / layer["store"]
        (store / "work").mkdir(mode=0o700, parents=True)
        (store / "upper").mkdir()
        if os.path.isdir(layer["point"]):
            info = os.stat(layer["point"])
            os.chown(store / "upper", info.st_uid, info.st_gid)
            os.chmod(store / "upper", info.st_mode & 0o7777)
    for name in ("root", "host"):
        (directory / name).mkdir(mode=0o700)
