"""A router under test, and the frames it sent, by connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cmdop_migrate.relay.credentials import Claims
from cmdop_migrate.relay.frames import Frame, Kind, with_table
from cmdop_migrate.relay.router.router import Router
from cmdop_migrate.relay.router.router_events import (
    Action,
    Answer,
    Answered,
    Ask,
    End,
    Joined,
    LeaseStatus,
    Left,
    Limits,
    Received,
    Send,
)

S1, S2 = "a1" * 12, "b2" * 12


def claims(kind: Any = "client", name: str = "alice", sessions: str = "*", ident: str = "") -> Claims:
    role: Any = "host" if kind == "host" else "execute"
    return Claims(ident or f"{kind}-{name}", kind, name, role, sessions, None, "")


def held(host: str = "host-a", token: int = 1, ttl: float = 15.0, name: str | None = None) -> LeaseStatus:
    return LeaseStatus(token, "held", host, ttl, name=name)


@dataclass
class Board:
    limits: Limits = field(default_factory=Limits)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.board = Router(self.limits)
        self.count = 0

    def do(self, event: Any) -> list[Action]:
        return self.board.handle(event, self.now)

    def host(self, name: str = "host-a") -> int:
        self.count += 1
        self.do(Joined(self.count, claims("host", name)))
        return self.count

    def client(self, name: str = "alice", sessions: str = "*") -> int:
        self.count += 1
        self.do(Joined(self.count, claims("client", name, sessions)))
        return self.count

    def hear(self, conn: int, frame: Frame) -> list[Action]:
        return self.do(Received(conn, frame))

    def register(self, conn: int, session: str = S1, token: int = 1, name: str = "work", **more: Any) -> list[Action]:
        return self.hear(conn, with_table(Kind.REGISTER, {"name": name, "state": "running", **more}, session, token))

    def routed(
        self, conn: int, host: str = "host-a", session: str = S1, token: int = 1, name: str = "work"
    ) -> list[Action]:
        """Registered and confirmed."""
        assert [type(one) for one in self.register(conn, session, token, name)] == [Ask]
        return self.answer(session, held(host, token))

    def open(self, conn: int, session: str = S1, channel: int = 1) -> list[Action]:
        return self.hear(conn, with_table(Kind.OPEN, {"handshake": "x"}, session, 0, channel))

    def answer(self, session: str, answer: Answer) -> list[Action]:
        return self.do(Answered(session, answer))

    def leave(self, conn: int, state: str, session: str = S1, token: int = 1, to: str = "") -> list[Action]:
        return self.hear(conn, with_table(Kind.LEAVE, {"state": state, "to": to}, session, token))

    def gone(self, conn: int) -> list[Action]:
        return self.do(Left(conn))


def said(actions: list[Action], conn: int) -> list[tuple[str, str]]:
    """What goes to a connection: (kind, the word that matters)."""
    found = []
    for one in actions:
        if isinstance(one, Send) and one.conn == conn:
            table = one.frame.table() if one.frame.kind in (Kind.REFUSED, Kind.CLOSE, Kind.STATUS) else {}
            found.append((one.frame.kind.name, str(table.get("code") or table.get("state") or "")))
        elif isinstance(one, End) and one.conn == conn:
            found.append(("END", one.code))
    return found


def frames(actions: list[Action], conn: int, kind: Kind) -> list[Frame]:
    return [one.frame for one in actions if isinstance(one, Send) and one.conn == conn and one.frame.kind is kind]
