"""What is known beforehand to make a dump fail: said while the session runs, not after it stood frozen."""

from __future__ import annotations

from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu.request import GHOST_LIMIT
from cmdop_migrate.errors import Blocked
from cmdop_migrate.model import Record
from cmdop_migrate.preflight import dumps, facts, processes
from cmdop_migrate.preflight.processes import Tree
from cmdop_migrate.session import cgroup
from cmdop_migrate.session.touched import Touched

_log = log.get("checkpoint")


def tree(group: str, record: Record) -> Tree:
    """The session's processes as they are now."""
    own = facts.parse_capabilities(Path("/proc/self/status").read_text(encoding="utf-8"))
    found = processes.read(cgroup.pids(group), record.pid)
    return Tree(record.name, found, "CAP_SYS_RESOURCE" in own, GHOST_LIMIT)


def check(group: str, record: Record) -> None:
    """Blocked with the reason and the way out, or nothing. `plan` says the same, by the same rules."""
    for finding in dumps.find(tree(group, record)):
        if finding.level == "block":
            raise Blocked(finding.message, finding.fix)
        _log.warning("%s", finding.message)


def check_watches(found: Touched) -> Touched:
    """Return what was found, or raise Blocked where a process watches what CRIU would fail with or lose."""
    for lost in found.watched.lost:
        raise Blocked(str(lost), "The session goes on. Restart that program, or end it, then try again.")
    return found
