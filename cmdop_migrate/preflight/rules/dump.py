"""What is known beforehand to make a dump fail, or to come back otherwise. Pure; `checkpoint` and `plan` share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cmdop_migrate.preflight.facts.processes import Tree
from cmdop_migrate.preflight.findings import Finding, Level, Rule, Said, several
from cmdop_migrate.preflight.rules.obstacles import CHECKS, KINDS, Obstacle
from cmdop_migrate.units import show_size


def find(tree: Tree) -> list[Finding]:
    """Every rule's findings, in the rules' order."""
    return [finding for rule in RULES for finding in rule.run(tree)]


def _users(tree: Tree) -> Iterable[Said]:
    others = [one.command for one in tree.processes if one.uid != 0]
    if others and not tree.reads_limits:
        yield Said(
            "block",
            f"session {tree.name!r} has processes of other users than root ({several(sorted(others))}), and root lacks"
            " CAP_SYS_RESOURCE on this machine: CRIU cannot read their limits",
        )


def _namespaces(tree: Tree) -> Iterable[Said]:
    for one in tree.processes:
        if one.inner_namespace:
            yield Said(
                "block",
                f"{one.shown} in session {tree.name!r} is in a pid namespace of its own (a container, or a sandboxed"
                " browser, inside the session), which CRIU cannot dump",
                passing=True,
            )


def _io_uring(tree: Tree) -> Iterable[Said]:
    for one in tree.processes:
        if one.io_uring:
            yield Said("block", f"{one.shown} in session {tree.name!r} uses io_uring, which CRIU cannot dump")


def _traced(tree: Tree) -> Iterable[Said]:
    for one in tree.processes:
        if one.tracer:
            yield Said(
                "block",
                f"{one.shown} in session {tree.name!r} is traced by pid {one.tracer} (a debugger, or strace): CRIU has"
                " to trace it itself, and a process has one tracer only",
                passing=True,
            )


def _devices(tree: Tree) -> Iterable[Said]:
    for one in tree.processes:
        if one.devices:
            what = several(one.devices)
            yield Said("block", f"{one.shown} in session {tree.name!r} has a device open that cannot move: {what}")


def _sockets(tree: Tree) -> Iterable[Said]:
    for one in tree.processes:
        if one.sockets:
            what = several(one.sockets)
            yield Said("block", f"{one.shown} in session {tree.name!r} has a socket CRIU cannot dump: {what}")


def _deleted(tree: Tree) -> Iterable[Said]:
    for one in tree.processes:
        for path, size in one.deleted:
            if size > tree.deleted_limit:
                yield Said(
                    "block",
                    f"{one.shown} in session {tree.name!r} has {path} open, which is deleted and takes"
                    f" {show_size(size)}: more than the {show_size(tree.deleted_limit)} that CRIU's images carry",
                )


def _semaphores(tree: Tree) -> Iterable[Said]:
    for one in tree.processes:
        if one.semaphore:
            yield Said("warn", f"{one.shown}: an eventfd made as a semaphore will not be one after a restore")


def obstacles(tree: Tree) -> Iterable[Obstacle]:
    """What was found of preflight/rules/obstacles.py, with the process that has it."""
    for one in tree.processes:
        for kind, what in one.obstacles:
            yield Obstacle(kind, what, one.pid, one.command)
    yield from tree.obstacles


def _of_check(check: str) -> Callable[[Tree], Iterable[Said]]:
    """The rule that reports every obstacle whose kind belongs to `check`."""

    def find_all(tree: Tree) -> Iterable[Said]:
        for one in obstacles(tree):
            kind = KINDS[one.kind]
            if kind.check != check:
                continue
            session = f"session {tree.name!r}"
            who = f"{one.command} (pid {one.pid}) in {session}" if one.pid else session
            yield Said(
                "block" if kind.blocks else "warn", f"{who} {kind.says.format(one.what)}", kind.fix, kind.passing
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
        "Run it without: many programs have a switch (node: UV_USE_IO_URING=0), or end it first.",
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
        "an open device other than terminals, /dev/null and its kin, and tun",
        "Close it, or end the process: the device's state is the machine's.",
        _devices,
    ),
    Rule(
        "sockets",
        ("block",),
        "sockets of a kind CRIU does not know (vsock, MPTCP, SCTP, AF_ALG …)",
        "Close it, or end the process.",
        _sockets,
    ),
    Rule(
        "deleted_files",
        ("block",),
        "deleted files that are still open, and too large for CRIU's images",
        "Close it, or let the program keep it under a name: then it travels with the session's files.",
        _deleted,
    ),
    Rule(
        "semaphores",
        ("warn",),
        "an eventfd made with EFD_SEMAPHORE",
        "Restart the program after the move, if it depends on it.",
        _semaphores,
    ),
    *_FURTHER,
)
