"""What the tool itself says of a session: events as the command prints them, figures as the agent exports them."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.host import Host

Event = dict[str, Any]


def events(host: Host, session: str = "", *kinds: str) -> list[Event]:
    """Lines of `cmdop-migrate events`, of these kinds."""
    lines = host.ok("events", *([session] if session else [])).splitlines()
    return [one for one in map(json.loads, lines) if not kinds or one["event"] in kinds]


def one(host: Host, session: str, kind: str) -> Event:
    """The only one of its kind."""
    found = events(host, session, kind)
    assert len(found) == 1, found
    return found[0]


def refused(host: Host, *args: str, code: str) -> str:
    """What a command that is refused with this code says."""
    done = host.cm("--json", *args)
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["exit"]) == (code, done.returncode) and done.returncode, error
    return str(error["message"])


def figure(host: Host, name: str) -> float:
    text = (host.run / "metrics.prom").read_text()
    (found,) = re.findall(rf"^cmdop_migrate_{name} (\S+)$", text, re.M)
    return float(found)


def phases(*hosts: Host) -> dict[str, set[str]]:
    """Every phase on record, by the event that names it."""
    found: dict[str, set[str]] = {}
    for line in (line for host in hosts for line in events(host)):
        if "phases" in line:
            found.setdefault(line["event"], set()).update(line["phases"])
    return found
