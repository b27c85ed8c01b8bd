"""Define what the lease store holds for one session, and its one encoding. Pure.

A record is never deleted: `free` keeps the fencing token, so tokens never decrease.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from cmdop_migrate.errors import LeaseNewer, LeaseUnreadable, Usage
from cmdop_migrate.lease.margins import TTL_MAX, TTL_MIN

VERSION = 1
SIZE_MAX = 4096
TOKEN_MAX = 2**63 - 1

State = Literal["held", "parked", "free"]
STATES: tuple[State, ...] = ("held", "parked", "free")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_INSTANCE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,199}")
_NONCE = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Say which host may run a session.

    `token` is the fencing token. `instance` is the random id of the host's installation: two hosts with one name differ
    in it. `renewals` grows with each renewal under one token. `checkpoint` is the last one committed. `nonce` is new
    with every write, so that no two records are the same bytes, and a writer recognises its own.
    """

    session: str
    token: int
    state: State
    host: str
    instance: str
    ttl: float
    renewals: int
    checkpoint: str | None
    nonce: str
    version: int = VERSION

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


_KEYS = {field.name for field in fields(LeaseRecord)}


def parse(data: bytes, session: str) -> LeaseRecord:
    """Parse the record of `session`. Raise LeaseNewer if a newer version wrote it, LeaseUnreadable if it is not a valid
    record."""
    table = _table(data, session)
    version: Any = table.get("version")
    if _is_int(version) and version > VERSION:
        raise LeaseNewer(
            f"the lease of {session} was written by a newer cmdop-migrate (record version {version}, known: {VERSION})",
            "Upgrade cmdop-migrate on this host; an old one must not touch this lease.",
        )
    problem = _problem(table, session)
    if problem:
        raise _unreadable(session, problem)
    return LeaseRecord(**{**table, "ttl": float(table["ttl"])})


def can_name_lease(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def check_session(session: str) -> str:
    """Return the id if it can name a lease, else raise Usage. Every operation begins with this."""
    if not can_name_lease(session):
        raise Usage(f"not a session id: {session!r}", "Use letters, digits, '.', '_' and '-', at most 127.")
    return session


def check_instance(instance: str) -> str:
    if not _INSTANCE.fullmatch(instance):
        raise Usage(f"not an instance id: {instance!r}", "Use letters, digits, '_' and '-', at most 64.")
    return instance


def check_checkpoint(checkpoint: str) -> str:
    if not _CHECKPOINT.fullmatch(checkpoint):
        raise Usage(f"not a checkpoint id: {checkpoint!r}", "`cmdop-migrate checkpoints ls` shows their ids.")
    return checkpoint


def _table(data: bytes, session: str) -> dict[str, Any]:
    if len(data) > SIZE_MAX:
        raise _unreadable(session, f"{len(data)} bytes")
    try:
        table = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(session, str(error)) from error
    if not isinstance(table, dict):
        raise _unreadable(session, f"a {type(table).__name__}")
    return table


def _problem(table: dict[str, Any], session: str) -> str:
    """Return what is wrong with the record; empty if nothing is."""
    if table.keys() != _KEYS:
        return f"fields {sorted(table.keys() ^ _KEYS)} missing or unknown"
    checks = {
        "version": table["version"] == VERSION and _is_int(table["version"]),
        "session": table["session"] == session,
        "token": _is_int(table["token"]) and 1 <= table["token"] <= TOKEN_MAX,
        "state": table["state"] in STATES if isinstance(table["state"], str) else False,
        "host": _matches(_NAME, table["host"]),
        "instance": _matches(_INSTANCE, table["instance"]),
        "ttl": _is_number(table["ttl"]) and TTL_MIN <= table["ttl"] <= TTL_MAX,
        "renewals": _is_int(table["renewals"]) and 0 <= table["renewals"] <= TOKEN_MAX,
        "checkpoint": table["checkpoint"] is None or _matches(_CHECKPOINT, table["checkpoint"]),
        "nonce": _matches(_NONCE, table["nonce"]),
    }
    wrong = [name for name, good in checks.items() if not good]
    if not wrong and table["state"] == "parked" and table["checkpoint"] is None:
        wrong = ["checkpoint"]
    return f"bad value of {', '.join(wrong)}" if wrong else ""


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unreadable(session: str, why: str) -> LeaseUnreadable:
    return LeaseUnreadable(
        f"the lease store holds no valid lease record for {session}: {why}",
        "Another program wrote there. Find out which; then `cmdop-migrate lease break` can write a new record.",
    )
