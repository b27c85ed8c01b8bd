"""Another host, driven through its own command line with --json: the CLI is the API."""

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
    """One host. The connection is the pool's, and outlives this."""

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
        """The one object `cmdop-migrate --json WORDS…` answers with there; `on_line` hears its progress,
        `on_start` is given what writes to its stdin (SshPool.run).

        An error it answers with is raised as the same error here, with the host's name before its message. PeerLost:
        it was started, and nobody knows how it ended; it may still run. Any other PeerFailed: it was not started, or
        did not understand.
        """
        lines = _Lines(on_line)
        finished = self._pool.run(self.target, command_line(self.target, words), lines.feed, stdin, timeout, on_start)
        return self._answer(words, finished, lines)

    def hello(self) -> dict[str, Any]:
        """Who is there: version, protocol, host, host_id, store, lease, keys. Asked once; refuses another protocol."""
        if self._hello is None:
            try:
                found = self.call("version", "--places", timeout=120)
            except Usage as error:
                raise PeerDiffers(
                    f"{self.name}: its cmdop-migrate is too old to be driven from another host ({error.message})",
                    f"Install {__version__} there too.",
                ) from error
            if found.get("protocol") != PROTOCOL or not found.keys() >= _HELLO:
                raise PeerDiffers(
                    f"{self.name} runs cmdop-migrate {found.get('version')} (protocol {found.get('protocol')}), "
                    f"this host {__version__} (protocol {PROTOCOL})",
                    "Install the same version on both.",
                )
            if not found.get("host_id"):
                raise NotRoot(
                    f"{self.name}: cmdop-migrate does not run as root there",
                    f"Log in as root, or use sudo: cmdop-migrate hosts add {self.name} ADDRESS --sudo",
                )
            self._hello = found
        return self._hello

    def close(self) -> None:
        """Hang up."""
        self._pool.drop(self.target)

    def _answer(self, words: tuple[str, ...], finished: Finished, lines: _Lines) -> dict[str, Any]:
        answer = lines.last()
        if answer is None:
            raise self._no_answer(words, finished, lines.other)
        error = answer.get("error")
        if isinstance(error, dict):
            raise self._told(error)
        return answer

    def _told(self, error: dict[str, Any]) -> CmdopError:
        """What it says must not move this terminal's cursor."""
        said = (str(error.get(key) or "") for key in ("message", "hint"))
        message, hint = ("".join(char if char.isprintable() or char == "\n" else " " for char in text) for text in said)
        return errors.from_code(str(error.get("code")), f"{self.name}: {message}", hint)

    def _no_answer(self, words: tuple[str, ...], finished: Finished, other: str) -> PeerFailed:
        said = next((line for line in reversed((finished.stderr or other).splitlines()) if line.strip()), "").strip()
        if "sudo:" in said and finished.status == 1:
            hint = "Allow it in sudoers there: USER ALL=(root) NOPASSWD: " + self.target.command
            return PeerFailed(f"{self.name}: sudo does not let us: {said}", hint)
        if finished.status in (_NOT_FOUND, _NOT_EXECUTABLE) or (self.target.sudo and "command not found" in said):
            hint = "Install it there, or say where it is: cmdop-migrate hosts add … --command PATH"
            return PeerFailed(f"{self.name}: no {self.target.command} there: {said}", hint)
        if finished.status > 128:  # killed by the machine before it could answer
            return PeerLost(
                f"{self.name}: {words[0]} was killed there before it answered: status {finished.status} {said}",
                "It may have done all, some or nothing. See: cmdop-migrate resume",
            )
        return PeerFailed(
            f"{self.name}: what runs there is not cmdop-migrate: status {finished.status}, {said or 'no words'}",
            "Try it: ssh HOST cmdop-migrate version. Say where it is: cmdop-migrate hosts add … --command PATH",
        )


def command_line(target: SshTarget, words: tuple[str, ...]) -> bytes:
    """For the login shell there: every word arrives as it is. Pure."""
    argv = [*(["sudo", "-n", "--"] if target.sudo else []), target.command, "--json", *words]
    for word in argv:
        if "\0" in word:
            raise Usage(f"no command line can hold this: {word!r}", "Leave the NUL character out.")
    return shlex.join(argv).encode("utf-8", "surrogateescape")


class _Lines:
    """Bytes as they come, as JSON objects: progress goes on at once, the last other object is the answer."""

    def __init__(self, on_line: Callable[[dict[str, Any]], None] | None) -> None:
        self._on_line = on_line
        self._rest = b""
        self._last: dict[str, Any] | None = None
        self.other = ""  # the last line that is no object: a login script's, or an error's

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_MAX:
            self._rest = b""  # no answer of ours; the end says that there was none
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
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self.other = text.decode(errors="replace")
        elif "progress" in found:
            if self._on_line is not None:
                self._on_line(found)
        else:
            self._last = found
