"""Refuse what is known to make a dump or a restore fail, while the session still runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu.request import GHOST_LIMIT
from cmdop_migrate.errors import Blocked
from cmdop_migrate.flows import surroundings
from cmdop_migrate.images.filetree import Estimate
from cmdop_migrate.model import Record
from cmdop_migrate.preflight import dumps, facts, processes
from cmdop_migrate.preflight.findings import Finding, several
from cmdop_migrate.preflight.processes import Tree
from cmdop_migrate.session import cgroup

# A program that starts another one shares its memory with it for milliseconds; one that reads /proc is done as soon.
MOMENTARY, MOMENT = ("shared_memory", "thread_file"), 1.0
_log = log.get("checkpoint")


def tree(group: str, record: Record) -> Tree:
    """The session's processes as they are now, and what surrounds them. What lasts for a moment only is looked at
    again until it is over, or was there for too long to be that."""
    until = time.monotonic() + MOMENT
    while True:
        found = _tree(group, record)
        brief = any(kind in MOMENTARY for one in found.processes for kind, _ in one.obstacles)
        if not brief or time.monotonic() > until:
            return found
        time.sleep(0.02)


def _tree(group: str, record: Record) -> Tree:
    own = facts.parse_capabilities(Path("/proc/self/status").read_text(encoding="utf-8"))
    found = processes.read(cgroup.pids(group), record.pid, surroundings.has_huge_pages())
    around = tuple(surroundings.look(group, record, found))
    return Tree(record.name, found, "CAP_SYS_RESOURCE" in own, GHOST_LIMIT, around)


def blockers(group: str, record: Record) -> list[Finding]:
    """What blocks a checkpoint now, by the rules that `plan` has too."""
    return [one for one in dumps.find(tree(group, record)) if one.level == "block"]


def check(group: str, record: Record) -> None:
    """Raise Blocked with the reason and the way round, or log what is only to be warned of. A blocker that stays is
    reported before one that may pass: no waiting helps against it."""
    found = dumps.find(tree(group, record))
    blocking = sorted((one for one in found if one.level == "block"), key=lambda one: one.passing)
    if blocking:
        raise blocked(blocking[0])
    for finding in found:
        _log.warning("%s", finding.message)


def blocked(finding: Finding) -> Blocked:
    """The error for a finding; it tells whether to wait may help."""
    error = Blocked(finding.message, finding.fix)
    error.passing, error.check = finding.passing, finding.check
    return error


def device_nodes(record: Record, sizes: list[Estimate]) -> list[str]:
    """Return the paths of the device nodes that the session made in its layers."""
    pairs = zip(record.layers, sizes, strict=True)
    return [os.path.join(point, os.fsdecode(path)) for point, one in pairs for path in one.devices]


def warn_of_devices(record: Record, sizes: list[Estimate]) -> None:
    """Log that the session made device nodes: a restore has to be told to make them again."""
    if nodes := device_nodes(record, sizes):
        _log.warning("session %r made device nodes (%s): restore it with --allow-devices", record.name, several(nodes))


def check_frozen(group: str, record: Record) -> None:
    """Raise Blocked when a process was frozen just as it started another one: until that has executed its program the
    two share their memory, and CRIU waits ten seconds for the parent before it gives up."""
    pids = cgroup.pids(group)
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().rpartition(")")
            parent = int(rest.split()[1])
        except (OSError, IndexError):
            continue
        if parent in pids and not rest.startswith(" Z") and processes.shares_memory(pid, parent):
            one = processes.Process(pid, name.partition("(")[2], 0, obstacles=(("shared_memory", str(parent)),))
            raise blocked(dumps.find(Tree(record.name, (one,), True, GHOST_LIMIT))[0])
