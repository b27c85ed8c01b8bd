"""Check the processes of a session for state that makes a dump fail or is not restored exactly, without side effects.

`checkpoint` and `plan` share these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cmdop_migrate.preflight.facts.processes import Tree
from cmdop_migrate.preflight.findings import Finding, Hit, Level, Rule, several
from cmdop_migrate.preflight.rules.obstacles import CHECKS, KINDS, Obstacle
from cmdop_migrate.units import show_size


def find(tree: Tree) -> list[Finding]:
    """Return the findings of every rule, in the order of the rules."""
    return [finding for rule in RULES for finding in rule.run(tree)]


def _users(tree: Tree) -> Iterable[Hit]:
    others = [process.command for process in tree.processes if process.uid != 0]
    if others and not tree.reads_limits:
        yield Hit(
            "block",
            f"session {tree.name!r} has processes of other users than root ({several(sorted(others))}), and root lacks"
            " CAP_SYS_RESOURCE on this machine: CRIU cannot read their limits",
        )


def _namespaces(tree: Tree) -> Iterable[Hit]:
    for process in tree.processes:
        if process.inner_namespace:
            yield Hit(
                "block",
                f"{process.shown} in session {tree.name!r} is in a pid namespace of its own (a container, or a"
                " sandboxed browser, inside the session), which CRIU cannot dump",
                passing=True,
            )


def _io_uring(tree: Tree) -> Iterable[Hit]:
    for process in tree.processes:
        if process.io_uring:
            yield Hit("block", f"{process.shown} in session {tree.name!r} uses io_uring, which CRIU cannot dump")


def _traced(tree: Tree) -> Iterable[Hit]:
    for process in tree.processes:
        if process.tracer:
            yield Hit(
                "block",
                f"{process.shown} in session {tree.name!r} is traced by pid {process.tracer} (a debugger, or strace):"
                " CRIU has to trace it itself, and a process has one tracer only",
                passing=True,
            )


def _devices(tree: Tree) -> Iterable[Hit]:
    for process in tree.processes:
        if process.devices:
            what = several(process.devices)
            yield Hit("block", f"{process.shown} in session {tree.name!r} has a device open that cannot move: {what}")


def _sockets(tree: Tree) -> Iterable[Hit]:
    for process in tree.processes:
        if process.sockets:
            what = several(process.sockets)
            yield Hit("block", f"{process.shown} in session {tree.name!r} has a socket CRIU cannot dump: {what}")


def _deleted(tree: Tree) -> Iterable[Hit]:
    for process in tree.processes:
        for path, size in process.deleted:
            if size > tree.deleted_limit:
                yield Hit(
                    "block",
                    f"{process.shown} in session {tree.name!r} has {path} open, which is deleted and takes"
                    f" {show_size(size)}: more than the {show_size(tree.deleted_limit)} that CRIU's images carry",
                )


def _semaphores(tree: Tree) -> Iterable[Hit]:
    for process in tree.processes:
        if process.semaphore:
            yield Hit("warn", f"{process.shown}: an eventfd created as a semaphore is a plain counter after a restore")


def obstacles(tree: Tree) -> Iterable[Obstacle]:
    """Yield the obstacles (preflight/rules/obstacles.py) that were found, with the process that has them."""
    for process in tree.processes:
        for kind, what in process.obstacles:
            yield Obstacle(kind, what, process.pid, process.command)
    yield from tree.obstacles


def _of_check(check: str) -> Callable[[Tree], Iterable[Hit]]:
    """Return a rule that reports every obstacle whose kind belongs to `check`."""

    def find_all(tree: Tree) -> Iterable[Hit]:
        for obstacle in obstacles(tree):
            kind = KINDS[obstacle.kind]
            if kind.check != check:
                continue
            session = f"session {tree.name!r}"
            owner = f"{obstacle.command} (pid {obstacle.pid}) in {session}" if obstacle.pid else session
            yield Hit(
                "block" if kind.blocks else "warn", f"{owner} {kind.text.format(obstacle.what)}", kind.fix, kind.passing
            )

    return find_all


def _levels(check: str) -> tuple[Level, ...]:
    blocks = {kind.blocks for kind in KINDS.values() if kind.check == check}
    return ("block", "warn") if len(blocks) > 1 else ("block",)


_FURTHER = tuple(Rule(name, _levels(name), about, fix, _of_check(name)) for name, about, fix in CHECKS)

RULES: tuple[Rule[Tree], ...] = (
    Rule(
        "other_users",
        ("block",),
        "processes of other users than root, where root lacks CAP_SYS_RESOURCE",
        "Give this machine CAP_SYS_RESOURCE, or run only root's processes in sessions that must move.",
        _users,
    ),
    Rule(
        "pid_namespace",
        ("block",),
        "a pid namespace inside the session (containers, browsers)",
        "End the inner container before the checkpoint.",
        _namespaces,
    ),
    Rule(
        "io_uring",
        ("block",),
        "a process that uses io_uring",
        "Run it without io_uring (node: UV_USE_IO_URING=0; many programs have a setting), or end it first.",
        _io_uring,
    ),
    Rule(
        "traced",
        ("block",),
        "a process under a debugger or strace",
        "Detach the debugger, or end it.",
        _traced,
    ),
    Rule(
        "devices",
        ("block",),
        "an open device other than terminals, memory devices such as /dev/null, and tun",
        "Close it, or end the process: the state of a device cannot move.",
        _devices,
    ),
    Rule(
        "sockets",
        ("block",),
        "sockets of a kind that CRIU does not support (vsock, MPTCP, SCTP, AF_ALG …)",
        "Close it, or end the process.",
        _sockets,
    ),
    Rule(
        "deleted_files",
        ("block",),
        "deleted files that are still open, and too large for CRIU's images",
        "Close it, or keep the file under a name: then it moves with the session's files.",
        _deleted,
    ),
    Rule(
        "semaphores",
        ("warn",),
        "an eventfd created with EFD_SEMAPHORE",
        "Restart the program after the move, if it depends on it.",
        _semaphores,
    ),
    *_FURTHER,
)
