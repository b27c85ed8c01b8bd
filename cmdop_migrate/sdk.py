"""Sessions from a program: an operator of one's own, beside a person or instead of one.

    from cmdop_migrate import Session

    build = Session.attach("build", relay="wss://relay.example:7443", credential="~/relay.credential")
    build.send("make test")
    print(build.expect(r"\\d+ passed", timeout=600).text)

Here, as root, without a relay; through one from anywhere, as whom the credential
names, and the session may move meanwhile. Errors are those of `cmdop_migrate.errors`.
`AsyncSession` is the same for asyncio.
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
from cmdop_migrate.host.turn import Asked, Do
from cmdop_migrate.migration import migrate as migrate_flow
from cmdop_migrate.migration import peers
from cmdop_migrate.migration.migrate_options import MigrateOptions
from cmdop_migrate.session.requests import Output

SLICE = 1.0  # seconds that an AsyncSession that was cancelled still waits for in the background
__all__ = ["AsyncSession", "Match", "Output", "Session"]


@dataclass(frozen=True)
class Match:
    """What was found, and the number of the byte behind it."""

    text: str
    seq: int


class _Way(ABC):
    """How a session is reached."""

    actor: str

    @abstractmethod
    def send(self, session: str, data: bytes) -> dict[str, Any]: ...

    @abstractmethod
    def output(self, session: str, start: int | None) -> Output: ...

    @abstractmethod
    def wait(self, session: str, pattern: str | None, timeout: float, start: int | None) -> dict[str, Any]: ...

    @abstractmethod
    def turn(self, session: str, asked: Asked) -> dict[str, Any]: ...

    @abstractmethod
    def migrate(self, session: str, to: str, wanted: MigrateOptions) -> dict[str, Any]: ...


class _Here(_Way):
    def __init__(self, config: Config, actor: str) -> None:
        self.this_host, self.actor = Host(config), actor

    def send(self, session: str, data: bytes) -> dict[str, Any]:
        return talk.send(self.this_host, session, data, self.actor)

    def output(self, session: str, start: int | None) -> Output:
        return talk.output(self.this_host, session, start)

    def wait(self, session: str, pattern: str | None, timeout: float, start: int | None) -> dict[str, Any]:
        return talk.wait(self.this_host, session, pattern, timeout, start)

    def turn(self, session: str, asked: Asked) -> dict[str, Any]:
        return host_turn.turn(self.this_host, session, asked)

    def migrate(self, session: str, to: str, wanted: MigrateOptions) -> dict[str, Any]:
        migrate_flow.check(self.this_host, session, wanted)
        with peers.pool(self.this_host.config) as pool:
            peer = peers.checked_peer(self.this_host, pool, to)
            return migrate_flow.migrate(self.this_host, session, peer, wanted).to_json()


class _Afar(_Way):
    def __init__(self, place: client.Place) -> None:
        self.place, self.actor = place, place.credential.claims.name

    def send(self, session: str, data: bytes) -> dict[str, Any]:
        return client.send(self.place, session, data)

    def output(self, session: str, start: int | None) -> Output:
        return client.output(self.place, session, start)

    def wait(self, session: str, pattern: str | None, timeout: float, start: int | None) -> dict[str, Any]:
        return client.wait(self.place, session, pattern, timeout, start)

    def turn(self, session: str, asked: Asked) -> dict[str, Any]:
        return client.turn(self.place, session, asked)

    def migrate(self, session: str, to: str, wanted: MigrateOptions) -> dict[str, Any]:  # noqa: ARG002 - a _Way
        raise Usage("a relay moves nothing", f"On the host that has it: cmdop-migrate migrate {session[:12]} --to {to}")


class Session:
    """One session. `seq`: up to where its output was looked at; `expect` begins there. Nothing is kept open between
    calls, and to drop one of these ends nothing."""

    def __init__(self, way: _Way, session: str, name: str, seq: int) -> None:
        self._way, self.session, self.name, self.seq = way, session, name, seq

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
        """A session by name, id or the beginning of its id; `seq` is at the end of what it has printed so far.

        With `credential`, through a relay (`relay`, or the one the credential names); without, on this host. `config`,
        `environ`: where this host's settings are from, as for the command line.
        """
        way: _Way
        if credential is not None:
            place = client.place(relay, client.load(Path(credential).expanduser()))
            way, found = _Afar(place), client.find(place, reference)
            session, name = found.session, found.name
        elif relay is not None:
            raise Usage("a relay asks who you are", "Give a credential, too: relay token create --actor NAME")
        else:
            here = way = _Here(_config(config, environ), actor or getpass.getuser())
            record = here.this_host.find(reference)
            session, name = record.session, record.name
        return cls(way, session, name, way.output(session, None).end)

    @classmethod
    def run(
        cls,
        *command: str,
        name: str | None = None,
        actor: str | None = None,
        config: str | PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Self:
        """A new session on this host."""
        loaded = _config(config, environ)
        record, _ = run_flow.run(loaded, run_flow.Wish(command=command, name=name), environ)
        return cls(_Here(loaded, actor or getpass.getuser()), record.session, record.name, 0)

    @property
    def actor(self) -> str:
        """Under which name what is sent goes into the record."""
        return self._way.actor

    def send(self, text: str | bytes, enter: bool = True) -> int:
        """One discrete input, whole, once -> its number in the journal. NotAdmitted when another has the write turn,
        or the gate refuses it."""
        data = text.encode() if isinstance(text, str) else text
        return int(self._way.send(self.session, data + (b"\r" if enter else b""))["seq"])

    def expect(self, pattern: str, timeout: float = 30.0) -> Match:
        """Waits until it prints something that the regular expression finds, behind all that was found before.
        TimedOut; SessionExited when it ends before."""
        result = self._way.wait(self.session, pattern, timeout, self.seq)
        if "matched" not in result:
            raise SessionExited(f"session {self.name!r} ended before it printed {pattern!r}", str(result["reason"]))
        found = Match(str(result["matched"]), int(result["seq"]))
        self.seq = found.seq
        return found

    def read(self) -> str:
        """What it has printed since it was looked at last; bytes that are no text are replaced."""
        got = self._way.output(self.session, self.seq)
        self.seq = got.end
        return got.data.decode("utf-8", "replace")

    def output(self, start: int | None = None) -> Output:
        """All that is kept, or from a number on. Does not move `seq`."""
        return self._way.output(self.session, start)

    def wait(self, timeout: float = 30.0) -> int | None:
        """Waits for its end -> how it ended, as a shell would say it; None when it was not by itself. TimedOut."""
        result = self._way.wait(self.session, None, timeout, None)
        code = result["exited"]
        return None if code is None else int(code)

    def turn(
        self, do: Do, *, to: str | None = None, timeout: float | None = None, wait: float = 0.0, freeze: bool = False
    ) -> str | None:
        """The write turn: request, grant, release, seize, show -> who has it afterwards. With `wait`, TimedOut when a
        request was not granted within that time."""
        asked = Asked(do, self.actor, to=to, timeout=timeout, freeze=freeze, wait=wait)
        holder = self._way.turn(self.session, asked).get("holder")
        return None if holder is None else str(holder)

    def migrate(self, to: str, *, pre_ship: int = 0, lazy: bool = False) -> dict[str, Any]:
        """To another host, from the one it runs on -> what `migrate --json` answers. Who is attached through a relay
        goes on with it; one that was attached here has to attach there."""
        return self._way.migrate(self.session, to, MigrateOptions(pre_ship=pre_ship, lazy=lazy))


class AsyncSession:
    """`Session` for asyncio: the same, in threads. A cancelled `expect` is over within a second."""

    def __init__(self, session: Session) -> None:
        self.sync = session

    @classmethod
    async def attach(cls, reference: str, **options: Any) -> Self:
        """As Session.attach."""
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
