"""List the requests that a client of the relay may make of a holder, by the role in its credential. Pure.

The holder trusts every process that can connect to its socket, which is root only. So
requests from a relay pass by an allow list, and carry the actor of the client's credential.
"""

from __future__ import annotations

from typing import Any

from cmdop_migrate.relay.credentials import Role

_READ = frozenset({"attach", "status"})
_EXECUTE = _READ | {"type", "send", "resize", "turn"}
_ADMIN = _EXECUTE | {"kill"}
ALLOWED: dict[Role, frozenset[str]] = {"read": _READ, "execute": _EXECUTE, "admin": _ADMIN, "host": frozenset()}


def may_type(role: Role) -> bool:
    """Return whether the role allows typing."""
    return "type" in ALLOWED[role]


def allowed_request(role: Role, actor: str, message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request as the holder is to get it, or None if the role does not allow it."""
    op = message.get("op")
    if not isinstance(op, str) or op not in ALLOWED[role]:
        return None
    if op == "attach" and role == "read":
        message = {key: value for key, value in message.items() if key not in ("stream", "rows", "cols")}
        message["read_only"] = True
    return {**message, "actor": actor, "admin": role == "admin"}


def refusal(message: dict[str, Any]) -> dict[str, Any]:
    """Return the client's reply to a request that is not allowed; for typed bytes, which have no reply, an event."""
    if message.get("op") == "type":
        return {"event": "refused", "bytes": len(message.get("data", "")), "why": "not_admitted"}
    return {"re": message.get("op"), "error": "not_admitted"}
