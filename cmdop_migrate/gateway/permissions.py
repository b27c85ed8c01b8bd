"""What a client of a relay may ask of a holder, by its role. Pure.

The holder believes whoever connects to its socket, which is root here; so what
comes from elsewhere is let through by name, and under the name of whoever it comes from.
"""

from __future__ import annotations

from typing import Any

from cmdop_migrate.relay.credentials import Role

_READ = frozenset({"attach", "status"})
_EXECUTE = _READ | {"type", "send", "resize", "turn"}
_ADMIN = _EXECUTE | {"kill"}
ALLOWED: dict[Role, frozenset[str]] = {"read": _READ, "execute": _EXECUTE, "admin": _ADMIN, "host": frozenset()}


def may_type(role: Role) -> bool:
    return "type" in ALLOWED[role]


def let_through(role: Role, actor: str, message: dict[str, Any]) -> dict[str, Any] | None:
    """The request as the holder is to get it; None: not from this one."""
    op = message.get("op")
    if not isinstance(op, str) or op not in ALLOWED[role]:
        return None
    if op == "attach" and role == "read":
        message = {key: value for key, value in message.items() if key not in ("stream", "rows", "cols")}
        message["read_only"] = True
    return {**message, "actor": actor, "admin": role == "admin"}


def refusal(message: dict[str, Any]) -> dict[str, Any]:
    """What it hears instead of an answer; of what was typed nobody waits for one."""
    if message.get("op") == "type":
        return {"event": "refused", "bytes": len(message.get("data", "")), "why": "not_admitted"}
    return {"re": message.get("op"), "error": "not_admitted"}
