"""Request, grant, release, seize and show the write turn of a session that several actors share."""

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
class TurnOptions:
    """Hold a request about the write turn. `admin`: a client of the holder itself is root on the host, and therefore an
    admin."""

    do: Do
    actor: str
    to: str | None = None
    timeout: float | None = None
    freeze: bool = False
    wait: float = 0.0
    admin: bool = True


def turn(this_host: Host, reference: str, options: TurnOptions) -> dict[str, Any]:
    """Send a request about the write turn. Return which actor has it afterwards, and the queue. With `wait`, raise
    TimedOut if the actor did not get it within that time: the actor then leaves the queue."""
    record, channel = talk.open_channel(this_host, reference)
    with channel:
        try:
            return over(channel, record.session, record.name, options)
        except HolderGone:
            raise talk.over(talk.after_loss(this_host, record)) from None


def over(channel: Channel, session: str, name: str, options: TurnOptions) -> dict[str, Any]:
    """Do the same over an open channel. Raise HolderGone if the holder hangs up."""
    facts: dict[str, Any] = {
        "do": options.do,
        "actor": options.actor,
        "to": options.to,
        "lasts": options.timeout,
        "freeze": options.freeze,
    }
    if options.do == "request" and options.wait:
        answer = _wait(name, channel, options, facts)
    else:
        answer = channel.ask(op="turn", admin=options.admin, **facts)
    code = answer.pop("error", None)
    answer.pop("re", None)
    if code == "checkpointing":
        raise Blocked(f"session {name!r} is being checkpointed; nothing was changed", "Try again in a moment.")
    if code == "not_admitted":
        raise NotAdmitted(f"this credential may only watch session {name!r}", "It takes the role execute.")
    if code is not None:
        hint = f"See which actor has it: cmdop-migrate turn {name} show"
        raise _KINDS.get(code, Blocked)(f"the turn of session {name!r}: {answer['why']}", hint)
    queue: list[str] = answer["queue"]
    own = {"granted": answer["holder"] == options.actor}
    if options.actor in queue:
        own["place"] = queue.index(options.actor) + 1
    return {"session": session, "name": name, **answer, **own}


def _wait(name: str, channel: Channel, options: TurnOptions, facts: dict[str, Any]) -> dict[str, Any]:
    try:
        return channel.ask(op="turn", admin=options.admin, timeout=options.wait, wait=True, **facts)
    except TimedOut:
        raise TimedOut(
            f"the turn of session {name!r} was not free within {options.wait:g} s",
            f"Wait longer with --wait, or see which actor has it: cmdop-migrate turn {name} show",
        ) from None
