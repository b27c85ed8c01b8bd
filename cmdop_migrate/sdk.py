"""Use sessions from a program: an operator beside a person, or instead of one.

    from cmdop_migrate import Session

    build = Session.attach("build", relay="wss://relay.example:7443", credential="~/relay.credential")
    build.send("make test")
    print(build.expect(r"\\d+ passed", timeout=600).text)

Without a relay, a program must run as root on the session's host. Through a relay it
runs anywhere, acts as the actor that its credential names, and the session may move
meanwhile. Errors are those of `cmdop_migrate.errors`. In a coroutine, use `AsyncSession`.
"""

from __future__ import annotations

import asyncio
import getpass
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

from cmdop_migrate import config as settings
from cmdop_migrate.config import Config
from cmdop_migrate.errors import SessionExited, TimedOut, Usage
from cmdop_migrate.gateway import client
from cmdop_migrate.host import run as run_flow
from cmdop_migrate.host import talk
from cmdop_migrate.host import turn as host_turn
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.turn import Do, TurnOptions
from cmdop_migrate.migration import migrate as migrate_flow
from cmdop_migrate.migration import peers
from cmdop_migrate.migration.migrate_options import MigrateOptions
from cmdop_migrate.session import requests
from cmdop_migrate.session.requests import Output

SLICE = 1.0  # seconds for which the thread of a cancelled AsyncSession call may still wait in the background
__all__ = ["AsyncSession", "Match", "Output", "Session"]


@dataclass(frozen=True)
class Match:
    """Represent the text that matched, and the number of the byte after it."""

    text: str
    seq: int


class _Access(ABC):
    """Access to a session, on this host or through a relay."""

    actor: str

    @abstractmethod
    def send(self, session: str, data: bytes) -> dict[str, Any]: ...

    @abstractmethod
    def output(self, session: str, start: int | None) -> Output: ...

    @abstractmethod
    def wait(self, session: str, pattern: str | None, timeout: float, start: int | None) -> dict[str, Any]: ...

    @abstractmethod
    def turn(self, session: str, asked: TurnOptions) -> dict[str, Any]: ...

    @abstractmethod
    def migrate(self, session: str, to: str, wanted: MigrateOptions) -> dict[str, Any]: ...


class _LocalAccess(_Access):
    """Reach a session on this host. Output of sessions that have ended is read from disk."""

    def __init__(self, config: Config, actor: str) -> None:
        self.this_host, self.actor = Host(config), actor

    def send(self, session: str, data: bytes) -> dict[str, Any]:
        return talk.send(self.this_host, session, data, self.actor)

    def output(self, session: str, start: int | None) -> Output:
        return talk.output(self.this_host, session, start)

    def wait(self, session: str, pattern: str | None, timeout: float, start: int | None) -> dict[str, Any]:
        return talk.wait(self.this_host, session, pattern, timeout, start)

    def turn(self, session: str, asked: TurnOptions) -> dict[str, Any]:
        return host_turn.turn(self.this_host, session, asked)

    def migrate(self, session: str, to: str, wanted: MigrateOptions) -> dict[str, Any]:
        migrate_flow.check(self.this_host, session, wanted)
        with peers.pool(self.this_host.config) as pool:
            peer = peers.checked_peer(self.this_host, pool, to)
            return migrate_flow.migrate(self.this_host, session, peer, wanted).to_json()


class _RelayAccess(_Access):
    """Reach a session through a relay."""

    def __init__(self, relay: client.RelayAccess) -> None:
        self.relay, self.actor = relay, relay.credential.claims.name

    def send(self, session: str, data: bytes) -> dict[str, Any]:
        return client.send(self.relay, session, data)

    def output(self, session: str, start: int | None) -> Output:
        return client.output(self.relay, session, start)

    def wait(self, session: str, pattern: str | None, timeout: float, start: int | None) -> dict[str, Any]:
        return client.wait(self.relay, session, pattern, timeout, start)

    def turn(self, session: str, asked: TurnOptions) -> dict[str, Any]:
        return client.turn(self.relay, session, asked)

    def migrate(self, session: str, to: str, wanted: MigrateOptions) -> dict[str, Any]:  # noqa: ARG002 - an _Access
        hint = f"On the host that has it: cmdop-migrate migrate {session[:12]} --to {to}"
        raise Usage("a session cannot be migrated through a relay", hint)


class Session:
    """Represent one session. `seq` is the number of the first byte of output that `expect` has not seen.
    No connection stays open between calls, and the session does not end with this object."""

    def __init__(self, access: _Access, session: str, name: str, seq: int) -> None:
        self._access, self.session, self.name, self.seq = access, session, name, seq

    @classmethod
    def attach(
        cls,
        reference: str,
        *,
        relay: str | None = None,
        credential: str | PathLike[str] | None = None,
        actor: str | None = None,
        config: str | PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Return a session by name, id or unique prefix of its id; `seq` is at the end of its output so far.

        With `credential`, use a relay (`relay`, or the one that the credential names); without, this host. `config` and
        `environ` are the sources of this host's settings, as for the command line. Raise SessionNotFound, NotAdmitted,
        Unreachable or Usage.
        """
        if credential is not None:
            through = client.access(relay, client.load(Path(credential).expanduser()))
            with client.connected(through, reference) as (ref, channel):
                return cls(_RelayAccess(through), ref.session, ref.name, requests.output(channel, None).end)
        if relay is not None:
            raise Usage("a relay needs a credential", "Give one: relay token create --actor NAME")
        local = _LocalAccess(_config(config, environ), actor or getpass.getuser())
        record = local.this_host.find(reference)
        return cls(local, record.session, record.name, local.output(record.session, None).end)

    @classmethod
    def run(
        cls,
        *command: str,
        name: str | None = None,
        actor: str | None = None,
        config: str | PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a session on this host."""
        loaded = _config(config, environ)
        record, _ = run_flow.run(loaded, run_flow.RunOptions(command=command, name=name), environ)
        return cls(_LocalAccess(loaded, actor or getpass.getuser()), record.session, record.name, 0)

    @property
    def actor(self) -> str:
        """Return the actor under whose name inputs are recorded."""
        return self._access.actor

    def send(self, text: str | bytes, enter: bool = True) -> int:
        """Send one input, whole and once, and return its number in the journal. Raise NotAdmitted if another actor has
        the write turn, or if the gate refuses the input."""
        data = text.encode() if isinstance(text, str) else text
        return int(self._access.send(self.session, data + (b"\r" if enter else b""))["seq"])

    def expect(self, pattern: str, timeout: float = 30.0) -> Match:
        """Wait until the session prints text that matches the regular expression, after all earlier matches. Raise
        TimedOut, or SessionExited if it ends first."""
        result = self._access.wait(self.session, pattern, timeout, self.seq)
        if "matched" not in result:
            raise SessionExited(f"session {self.name!r} ended before it printed {pattern!r}", str(result["reason"]))
        match = Match(str(result["matched"]), int(result["seq"]))
        self.seq = match.seq
        return match

    def read(self) -> str:
        """Return the output since `seq`, and move `seq` behind it. Invalid UTF-8 is replaced."""
        got = self._access.output(self.session, self.seq)
        self.seq = got.end
        return got.data.decode("utf-8", "replace")

    def output(self, start: int | None = None) -> Output:
        """Return all output that is kept, or from byte `start`. Does not move `seq`."""
        return self._access.output(self.session, start)

    def wait(self, timeout: float = 30.0) -> int | None:
        """Wait for the session's end and return its exit code as a shell reports it, or None if it did not exit by
        itself. Raise TimedOut."""
        result = self._access.wait(self.session, None, timeout, None)
        code = result["exited"]
        return None if code is None else int(code)

    def turn(
        self, do: Do, *, to: str | None = None, timeout: float | None = None, wait: float = 0.0, freeze: bool = False
    ) -> str | None:
        """Request, grant, release, seize or show the write turn, and return the actor who has it afterwards. With
        `wait`, raise TimedOut if a request was not granted within that time."""
        asked = TurnOptions(do, self.actor, to=to, timeout=timeout, freeze=freeze, wait=wait)
        holder = self._access.turn(self.session, asked).get("holder")
        return None if holder is None else str(holder)

    def migrate(self, to: str, *, pre_ship: int = 0, lazy: bool = False) -> dict[str, Any]:
        """Migrate the session from this host to another, and return the fields of `migrate --json`. Clients attached
        through a relay stay attached; local ones have to attach on the other host."""
        return self._access.migrate(self.session, to, MigrateOptions(pre_ship=pre_ship, lazy=lazy))


class AsyncSession:
    """Represent `Session` for asyncio: each call runs in a thread. A cancelled `expect` ends within a second."""

    def __init__(self, session: Session) -> None:
        self.sync = session

    @classmethod
    async def attach(cls, reference: str, **options: Any) -> Self:
        """Return a session as Session.attach does."""
        return cls(await asyncio.to_thread(Session.attach, reference, **options))

    @property
    def name(self) -> str:
        return self.sync.name

    @property
    def seq(self) -> int:
        return self.sync.seq

    async def send(self, text: str | bytes, enter: bool = True) -> int:
        return await asyncio.to_thread(self.sync.send, text, enter)

    async def expect(self, pattern: str, timeout: float = 30.0) -> Match:
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            try:
                return await asyncio.to_thread(self.sync.expect, pattern, max(0.0, min(SLICE, left)))
            except TimedOut:
                if left <= SLICE:
                    raise

    async def read(self) -> str:
        return await asyncio.to_thread(self.sync.read)

    async def output(self, start: int | None = None) -> Output:
        return await asyncio.to_thread(self.sync.output, start)

    async def wait(self, timeout: float = 30.0) -> int | None:
        return await asyncio.to_thread(self.sync.wait, timeout)

    async def turn(self, do: Do, **options: Any) -> str | None:
        return await asyncio.to_thread(lambda: self.sync.turn(do, **options))

    async def migrate(self, to: str, *, pre_ship: int = 0, lazy: bool = False) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: self.sync.migrate(to, pre_ship=pre_ship, lazy=lazy))


def _config(file: str | PathLike[str] | None, environ: Mapping[str, str] | None) -> Config:
    return settings.load(str(file) if file is not None else None, environ=environ)
