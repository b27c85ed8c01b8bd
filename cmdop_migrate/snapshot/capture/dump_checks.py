"""Refuse what is known to make a dump or a restore fail, while the session still runs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.criu.request import GHOST_LIMIT
from cmdop_migrate.errors import Blocked
from cmdop_migrate.holder import cgroup
from cmdop_migrate.images.files.walk import Estimate
from cmdop_migrate.model import Record
from cmdop_migrate.preflight.facts import machine, processes
from cmdop_migrate.preflight.facts.processes import Process, Tree
from cmdop_migrate.preflight.findings import Finding, several
from cmdop_migrate.preflight.rules import dump
from cmdop_migrate.preflight.rules.obstacles import Obstacle
from cmdop_migrate.session.files_in_use import Touched
from cmdop_migrate.snapshot.capture import surroundings

# Of a program that starts another one, or reads /proc: over in milliseconds, on a busy machine in some more.
MOMENTARY, MOMENT = ("shared_memory", "thread_file"), 1.0
AGAIN = 0.05  # seconds between two looks
_log = log.get("checkpoint")


def tree(group: str, record: Record) -> Tree:
    """Read the session's processes and what surrounds them. Nothing is stopped for it, so what is found odd counts
    only if a second look finds it too, and a program that is just being started only if it stays so for MOMENT."""
    until = time.monotonic() + MOMENT
    before, found = None, _tree(group, record)
    while odd := set(dump.obstacles(found)):
        if before is not None:
            odd &= before
            if not any(one.kind in MOMENTARY for one in odd) or time.monotonic() > until:
                return _only(found, odd)
        before = odd
        time.sleep(AGAIN)
        found = _tree(group, record)
    return found


def _only(tree: Tree, odd: set[Obstacle]) -> Tree:
    """Return the tree with no other obstacles than these."""
    return replace(
        tree,
        processes=tuple(replace(one, obstacles=_of(one, odd)) for one in tree.processes),
        obstacles=tuple(one for one in tree.obstacles if one in odd),
    )


def _of(process: Process, odd: set[Obstacle]) -> tuple[tuple[str, str], ...]:
    return tuple(one for one in process.obstacles if Obstacle(*one, process.pid, process.command) in odd)


def _tree(group: str, record: Record) -> Tree:
    own = machine.parse_capabilities(Path("/proc/self/status").read_text(encoding="utf-8"))
    found = processes.read(cgroup.pids(group), record.pid, surroundings.has_huge_pages())
    around = tuple(surroundings.look(group, record, found))
    return Tree(record.name, found, "CAP_SYS_RESOURCE" in own, GHOST_LIMIT, around)


def blockers(group: str, record: Record) -> list[Finding]:
    """What blocks a checkpoint now, by the rules that `plan` has too."""
    return [one for one in dump.find(tree(group, record)) if one.level == "block"]


def check(group: str, record: Record) -> str | None:
    """Raise Blocked with the reason and the way round, or log what is only to be warned of. A blocker that stays is
    reported before one that may pass: no waiting helps against it. Returns why the checkpoint cannot be restored on
    trial, None if it can."""
    odd = tree(group, record)
    found = dump.find(odd)
    blocking = sorted((one for one in found if one.level == "block"), key=lambda one: one.passing)
    if blocking:
        raise blocked(blocking[0])
    for finding in found:
        _log.warning("%s", finding.message)
    service = next((one.what for one in dump.obstacles(odd) if one.kind == "host_service"), None)
    return None if service is None else f"it is connected to {service}, a service that a trial cannot reach"


def check_watches(found: Touched) -> Touched:
    """Return what was found, or raise Blocked where a process watches what CRIU would fail with or lose."""
    for lost in found.watched.lost:
        raise Blocked(str(lost), "The session goes on. Restart that program, or end it, then try again.")
    return found


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
            raise blocked(dump.find(Tree(record.name, (one,), True, GHOST_LIMIT))[0])
