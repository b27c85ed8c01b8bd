"""Many actors on one session: the write turn, and the journal of what went in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cmdop_migrate.errors import Blocked, CmdopError, NotAdmitted, TimedOut, Usage
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.session.holder_client import Channel, HolderGone

Do = Literal["request", "grant", "release", "seize", "show"]
_KINDS: dict[str, type[CmdopError]] = {
    "not_yours": NotAdmitted,
    "not_admin": NotAdmitted,
    "full": Blocked,
    "no_waiter": Blocked,
    "name": Usage,
    "timeout": Usage,
}


@dataclass(frozen=True)
class Asked:
    """What is asked about the turn. `admin`: whoever reaches the holder itself is root on the host, and is one."""

    do: Do
    actor: str
    to: str | None = None
    timeout: float | None = None
    freeze: bool = False
    wait: float = 0.0
    admin: bool = True


def turn(this_host: Host, reference: str, asked: Asked) -> dict[str, Any]:
    """Who has the turn afterwards, and more. With `wait`, TimedOut when it was not theirs within that time: they then
    wait no longer."""
    record, channel = talk.open_channel(this_host, reference)
    with channel:
        try:
            return over(channel, record.session, record.name, asked)
        except HolderGone:
            raise talk.over(talk.after_loss(this_host, record)) from None


def over(channel: Channel, session: str, name: str, asked: Asked) -> dict[str, Any]:
    """The same over a channel to it. HolderGone."""
    facts: dict[str, Any] = {
        "do": asked.do,
        "actor": asked.actor,
        "to": asked.to,
        "lasts": asked.timeout,
        "freeze": asked.freeze,
    }
    if asked.do == "request" and asked.wait:
        answer = _wait(name, channel, asked, facts)
    else:
        answer = channel.ask(op="turn", admin=asked.admin, **facts)
    code = answer.pop("error", None)
    answer.pop("re", None)
    if code == "checkpointing":
        raise Blocked(f"session {name!r} is being checkpointed; nothing was changed", "Try again in a moment.")
    if code == "not_admitted":
        raise NotAdmitted(f"this credential may only watch session {name!r}", "It takes the role execute.")
    if code is not None:
        hint = f"See who has it: cmdop-migrate turn {name} show"
        raise _KINDS.get(code, Blocked)(f"the turn of session {name!r}: {answer['why']}", hint)
    queue: list[str] = answer["queue"]
    mine = {"granted": answer["holder"] == asked.actor}
    if asked.actor in queue:
        mine["place"] = queue.index(asked.actor) + 1
    return {"session": session, "name": name, **answer, **mine}


def _wait(name: str, channel: Channel, asked: Asked, facts: dict[str, Any]) -> dict[str, Any]:
    try:
        return channel.ask(op="turn", admin=asked.admin, timeout=asked.wait, wait=True, **facts)
    except TimedOut:
        raise TimedOut(
            f"the turn of session {name!r} was not free within {asked.wait:g} s",
            f"Wait longer with --wait, or see who has it: cmdop-migrate turn {name} show",
        ) from None
