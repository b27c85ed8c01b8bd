"""Refuse a checkpoint that is known to fail in the dump or the restore, while the session still runs."""

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

# Obstacles of a program that just starts another one, or reads /proc: gone in milliseconds, later on a busy machine.
MOMENTARY = ("shared_memory", "thread_file")
MOMENTARY_SECONDS = 1.0
RETRY_INTERVAL = 0.05  # seconds between two reads
_log = log.get("checkpoint")


def read_tree(group: str, record: Record) -> Tree:
    """Read the session's processes and what surrounds them. The session runs meanwhile, so an obstacle counts only if
    a second read finds it too, and one of MOMENTARY only if it stays for MOMENTARY_SECONDS."""
    until = time.monotonic() + MOMENTARY_SECONDS
    before, tree = None, _read_once(group, record)
    while obstacles := set(dump.obstacles(tree)):
        if before is not None:
            obstacles &= before
            if not any(obstacle.kind in MOMENTARY for obstacle in obstacles) or time.monotonic() > until:
                return _with_obstacles(tree, obstacles)
        before = obstacles
        time.sleep(RETRY_INTERVAL)
        tree = _read_once(group, record)
    return tree


def _with_obstacles(tree: Tree, obstacles: set[Obstacle]) -> Tree:
    """Return the tree with no other obstacles than these."""
    return replace(
        tree,
        processes=tuple(replace(process, obstacles=_of(process, obstacles)) for process in tree.processes),
        obstacles=tuple(obstacle for obstacle in tree.obstacles if obstacle in obstacles),
    )


def _of(process: Process, obstacles: set[Obstacle]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in process.obstacles if Obstacle(*pair, process.pid, process.command) in obstacles)


def _read_once(group: str, record: Record) -> Tree:
    own = machine.parse_capabilities(Path("/proc/self/status").read_text(encoding="utf-8"))
    session_processes = processes.read(cgroup.pids(group), record.pid, surroundings.has_huge_pages())
    around = tuple(surroundings.look(group, record, session_processes))
    return Tree(record.name, session_processes, "CAP_SYS_RESOURCE" in own, GHOST_LIMIT, around)


def blockers(group: str, record: Record) -> list[Finding]:
    """Return the findings that block a checkpoint now, by the same rules as `plan`."""
    return [finding for finding in dump.find(read_tree(group, record)) if finding.level == "block"]


def check(group: str, record: Record) -> str | None:
    """Raise Blocked with the reason and the way round, or log the warnings. A permanent blocker is reported before one
    that may pass: waiting does not help against it. Return why the checkpoint cannot be restored on trial, None if it
    can."""
    tree = read_tree(group, record)
    findings = dump.find(tree)
    blocking = sorted(
        (finding for finding in findings if finding.level == "block"), key=lambda finding: finding.passing
    )
    if blocking:
        raise blocked(blocking[0])
    for finding in findings:
        _log.warning("%s", finding.message)
    service = next((obstacle.what for obstacle in dump.obstacles(tree) if obstacle.kind == "host_service"), None)
    return None if service is None else f"it is connected to {service}, a service that a trial cannot reach"


def check_watches(files: Touched) -> Touched:
    """Return `files`, or raise Blocked if a process watches a file whose watch CRIU fails to dump or would lose."""
    for lost in files.watched.lost:
        raise Blocked(str(lost), "The session keeps running. Restart that program, or end it, then try again.")
    return files


def blocked(finding: Finding) -> Blocked:
    """Return the error for a finding; `passing` tells whether waiting may help."""
    error = Blocked(finding.message, finding.fix)
    error.passing, error.check = finding.passing, finding.check
    return error


def device_nodes(record: Record, sizes: list[Estimate]) -> list[str]:
    """Return the paths of the device nodes that the session made in its layers."""
    pairs = zip(record.layers, sizes, strict=True)
    return [os.path.join(point, os.fsdecode(path)) for point, size in pairs for path in size.devices]


def warn_of_devices(record: Record, sizes: list[Estimate]) -> None:
    """Log that the session made device nodes: a restore makes them only with --allow-devices."""
    if nodes := device_nodes(record, sizes):
        _log.warning("session %r made device nodes (%s): restore it with --allow-devices", record.name, several(nodes))


def check_frozen(group: str, record: Record) -> None:
    """Raise Blocked if a process was frozen just as it started another one: until the child executes its program the
    two share their memory, and CRIU waits ten seconds for the parent before it fails."""
    pids = cgroup.pids(group)
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().rpartition(")")
            parent = int(rest.split()[1])
        except (OSError, IndexError):
            continue
        if parent in pids and not rest.startswith(" Z") and processes.shares_memory(pid, parent):
            child = processes.Process(pid, name.partition("(")[2], 0, obstacles=(("shared_memory", str(parent)),))
            raise blocked(dump.find(Tree(record.name, (child,), True, GHOST_LIMIT))[0])
