"""Define one host as configured: on the command line, in hosts.json, or in the config file. Pure.

Fields that are not given (None) are looked up in ~/.ssh/config when a connection is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cmdop_migrate.errors import Usage

# key -> (type in files, what docs/reference/settings.md says)
FIELDS: dict[str, tuple[type, str]] = {
    "address": (str, "address of its sshd: a name, an IPv4 or an IPv6 address"),
    "port": (int, "port of its sshd, a number; default 22"),
    "user": (str, "user to log in as"),
    "key": (str, "private key to log in with, an absolute path; keys of ssh-agent are tried too"),
    "jump": (str, "jump host: a host named here, or `[user@]address[:port]`"),
    "sudo": (bool, "`true`: run cmdop-migrate there with `sudo -n`"),
    "command": (str, "path of cmdop-migrate there; default: the one in its PATH"),
}
EXAMPLE = 'Write it like: [hosts.host-b] and below it address = "host-b.example"'

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:%[A-Za-z0-9._-]+)?")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63}")
_PORTED = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<plain>[^:]+))(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True)
class HostEntry:
    """Hold the configured fields of one host."""

    name: str
    address: str
    port: int | None = None
    user: str | None = None
    key: str | None = None
    jump: str | None = None
    sudo: bool = False
    command: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the given fields without the name, as hosts.json has them."""
        facts = asdict(self)
        return {key: facts[key] for key in FIELDS if facts[key] not in (None, False)}


def make(name: str, table: Mapping[str, Any]) -> HostEntry:
    """Return the entry after checking every field. Raise Usage, without a file or line: the caller adds them."""
    for key, value in table.items():
        check_field(key, value)
    if not _NAME.fullmatch(name):
        raise Usage(f"not a host name: {name!r}", "Use letters, digits, '.', '_' and '-', at most 63.")
    if not table.get("address"):
        raise Usage(f"host {name!r} has no address", EXAMPLE)
    return HostEntry(name, **table)


def check_field(key: str, value: object) -> None:
    """Raise Usage if the key is unknown or its value invalid."""
    if key not in FIELDS:
        raise Usage(f"unknown key {key!r} of a host", "Valid keys: " + ", ".join(FIELDS) + ".")
    kind = FIELDS[key][0]
    if type(value) is not kind:  # a bool is an int too
        words = {str: "a string, in quotes", int: "a number, without quotes", bool: "true or false, without quotes"}
        raise Usage(f"{key} must be {words[kind]}: {value!r}", EXAMPLE)
    if key == "port" and not 0 < int(str(value)) < 65536:
        raise Usage(f"not a port: {value}", "Between 1 and 65535; without it, 22.")
    text = str(value)
    if key == "address" and not _ADDRESS.fullmatch(text):
        raise Usage(f"not an address: {text!r}", "Write a name or an IP address; the port goes into `port`.")
    if key == "user" and not _USER.fullmatch(text):
        raise Usage(f"not a user: {text!r}", "Write the login name on that host.")
    if key in ("key", "command") and (not os.path.isabs(text) or "\0" in text or "\n" in text):
        raise Usage(f"{key}: not an absolute path: {text!r}", "Start it with '/'.")
    if key == "jump":
        for hop in text.split(","):
            split_login(hop)


def split_address(text: str) -> tuple[str, int | None]:
    """Return (address, port) of `host`, `host:2222`, `[::1]:2222` or `::1`. Raise Usage."""
    port: int | None
    if text.count(":") > 1 and not text.startswith("["):
        address, port = text, None
    else:
        match = _PORTED.fullmatch(text)
        if match is None:
            raise Usage(f"not an address: {text!r}", "Write it like host-b, 10.0.0.2:2222 or [fd00::2]:2222.")
        address, port = match["six"] or match["plain"], int(match["port"]) if match["port"] else None
    check_field("address", address)
    if port is not None:
        check_field("port", port)
    return address, port


def split_login(text: str) -> tuple[str | None, str, int | None]:
    """Return (user, address, port) of `[user@]address[:port]`. Raise Usage."""
    user, _, rest = text.strip().rpartition("@")
    if user:
        check_field("user", user)
    return user or None, *split_address(rest)
