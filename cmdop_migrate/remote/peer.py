"""Drive another host through its own command line with --json: the CLI is the API."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from cmdop_migrate import __version__, errors
from cmdop_migrate.errors import CmdopError, NotRoot, PeerDiffers, PeerFailed, PeerLost, Usage
from cmdop_migrate.model import PROTOCOL
from cmdop_migrate.remote.inventory import SshTarget
from cmdop_migrate.remote.ssh import Finished, OnStart, SshPool

__all__ = ["Lost", "Peer"]

Lost = PeerLost

_HELLO = {"version", "host", "host_id", "store", "lease", "keys"}
_LINE_MAX = 64 << 20
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class Peer:
    """Call commands on one host. The connection belongs to the pool, and outlives this."""

    def __init__(self, target: SshTarget, pool: SshPool) -> None:
        self.name = target.name
        self.target = target
        self._pool = pool
        self._hello: dict[str, Any] | None = None

    def call(
        self,
        *words: str,
        timeout: float | None = None,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        stdin: bytes | None = None,
        on_start: OnStart | None = None,
    ) -> dict[str, Any]:
        """Run `cmdop-migrate --json WORDS…` there and return the one object it answers with. `on_line` gets its
        progress, `on_start` a function that writes to its stdin (SshPool.run).

        An error it answers with is raised as the same error here, with the host's name before its message. Raise
        PeerLost if it was started and its end is unknown; it may still run. Raise another PeerFailed if it was not
        started, or its answer is invalid.
        """
        lines = _Lines(on_line)
        finished = self._pool.run(self.target, command_line(self.target, words), lines.feed, stdin, timeout, on_start)
        return self._answer(words, finished, lines)

    def hello(self) -> dict[str, Any]:
        """Return version, protocol, host, host_id, store, lease and keys of the host. Asked once; raise PeerDiffers for
        another protocol."""
        if self._hello is None:
            try:
                hello = self.call("version", "--places", timeout=120)
            except Usage as error:
                raise PeerDiffers(
                    f"{self.name}: its cmdop-migrate is too old to be driven from another host ({error.message})",
                    f"Install {__version__} there too.",
                ) from error
            if hello.get("protocol") != PROTOCOL or not hello.keys() >= _HELLO:
                raise PeerDiffers(
                    f"{self.name} runs cmdop-migrate {hello.get('version')} (protocol {hello.get('protocol')}), "
                    f"this host {__version__} (protocol {PROTOCOL})",
                    "Install the same version on both.",
                )
            if not hello.get("host_id"):
                raise NotRoot(
                    f"{self.name}: cmdop-migrate does not run as root there",
                    f"Log in as root, or use sudo: cmdop-migrate hosts add {self.name} ADDRESS --sudo",
                )
            self._hello = hello
        return self._hello

    def close(self) -> None:
        """Close the connection to the host."""
        self._pool.drop(self.target)

    def _answer(self, words: tuple[str, ...], finished: Finished, lines: _Lines) -> dict[str, Any]:
        answer = lines.last()
        if answer is None:
            raise self._no_answer(words, finished, lines.other)
        error = answer.get("error")
        if isinstance(error, dict):
            raise self._remote_error(error)
        return answer

    def _remote_error(self, error: dict[str, Any]) -> CmdopError:
        """Return the error of the host, without control characters that could move this terminal's cursor."""
        texts = (str(error.get(key) or "") for key in ("message", "hint"))
        message, hint = (
            "".join(char if char.isprintable() or char == "\n" else " " for char in text) for text in texts
        )
        return errors.from_code(str(error.get("code")), f"{self.name}: {message}", hint)

    def _no_answer(self, words: tuple[str, ...], finished: Finished, other: str) -> PeerFailed:
        last_line = next(
            (line for line in reversed((finished.stderr or other).splitlines()) if line.strip()), ""
        ).strip()
        if "sudo:" in last_line and finished.status == 1:
            hint = "Allow it in sudoers there: USER ALL=(root) NOPASSWD: " + self.target.command
            return PeerFailed(f"{self.name}: sudo refused: {last_line}", hint)
        if finished.status in (_NOT_FOUND, _NOT_EXECUTABLE) or (self.target.sudo and "command not found" in last_line):
            hint = "Install it there, or name its path: cmdop-migrate hosts add … --command PATH"
            return PeerFailed(f"{self.name}: {self.target.command} not found there: {last_line}", hint)
        if finished.status > 128:  # killed by a signal before it could answer
            return PeerLost(
                f"{self.name}: {words[0]} was killed there before it answered: status {finished.status} {last_line}",
                "It may have done all, some or nothing. See: cmdop-migrate resume",
            )
        return PeerFailed(
            f"{self.name}: no valid reply (exit status {finished.status}, {last_line or 'no output'})",
            "Try: ssh HOST cmdop-migrate version. Name its path: cmdop-migrate hosts add … --command PATH",
        )


def command_line(target: SshTarget, words: tuple[str, ...]) -> bytes:
    """Return the command line for the login shell there, quoted so that every word arrives unchanged. Pure."""
    argv = [*(["sudo", "-n", "--"] if target.sudo else []), target.command, "--json", *words]
    for word in argv:
        if "\0" in word:
            raise Usage(f"a command line cannot contain {word!r}", "Leave the NUL character out.")
    return shlex.join(argv).encode("utf-8", "surrogateescape")


class _Lines:
    """Parse output as it arrives into JSON objects: pass on progress immediately, keep the last other object as the
    answer."""

    def __init__(self, on_line: Callable[[dict[str, Any]], None] | None) -> None:
        self._on_line = on_line
        self._rest = b""
        self._last: dict[str, Any] | None = None
        self.other = ""  # the last line that is not an object: of a login script, or an error

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_MAX:
            self._rest = b""  # not an answer of cmdop-migrate; the caller reports that there was none
        for line in whole:
            self._take(line)

    def last(self) -> dict[str, Any] | None:
        rest, self._rest = self._rest, b""
        self._take(rest)
        return self._last

    def _take(self, line: bytes) -> None:
        text = line.strip()
        if not text:
            return
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            self.other = text.decode(errors="replace")
        elif "progress" in value:
            if self._on_line is not None:
                self._on_line(value)
        else:
            self._last = value
