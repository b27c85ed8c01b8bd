"""What a session has that is not all its own: files, connections, ports, users, directories of its host. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cmdop_migrate.preflight.facts.host import Port
from cmdop_migrate.preflight.facts.session import estimate
from cmdop_migrate.preflight.findings import Rule, Said, several
from cmdop_migrate.preflight.move import Move
from cmdop_migrate.units import show_size

_ANY = ("0.0.0.0", "[::]", "::")  # noqa: S104 - compared with, not bound to


def _files(move: Move) -> Iterable[Said]:
    """As snapshot/host_files.py does it: what is carried goes into the session's own layer there, the rest is there."""
    wanting = {one for one in move.session.held if one.path in move.target.wanting}
    carried = {one for one in wanting if move.carry == "opened" or (move.carry == "mapped" and one.mapped)}
    lost = sorted(f"{one.path} ({move.target.wanting[one.path]})" for one in wanting - carried)
    if lost:
        yield Said("block", f"files the session needs are missing or different on {move.target.host}: {several(lost)}")
    if carried:
        paths = sorted(f"{one.path} ({move.target.wanting[one.path]})" for one in carried)
        size = show_size(sum(one.size for one in carried))
        yield Said(
            "warn",
            f"{len(carried)} files that are missing or different on {move.target.host} will be carried, {size}:"
            f" {several(paths)}. They stand in front of that host's own there, also for programs started later",
        )


def _connections(move: Move) -> Iterable[Said]:
    if move.session.outside:
        count = len(move.session.outside)
        yield Said("warn", f"{count} connections to the outside will be reset: {several(move.session.outside)}")


def _ports(move: Move) -> Iterable[Said]:
    if move.stays:
        return
    for own in move.session.ports:
        if any(_clash(own, other) for other in move.target.listening):
            where = f"{own.kind} port {own.port}"
            yield Said("block", f"{where} is taken on {move.target.host}, and the session is on its host's network")


def _addresses(move: Move) -> Iterable[Said]:
    if move.stays:
        return
    bound = {one.address for one in move.session.ports} - set(_ANY)
    for address in sorted(
        one for one in bound if not _is_loopback(one) and one.strip("[]") not in move.target.addresses
    ):
        yield Said("block", f"the session is bound to {address}, which {move.target.host} does not have")


def _clash(one: Port, other: Port) -> bool:
    same = one.address == other.address or one.address in _ANY or other.address in _ANY
    return one.kind == other.kind and one.port == other.port and same


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address.strip("[]") == "::1"


def _uids(move: Move) -> Iterable[Said]:
    for uid in move.session.uids:
        here, there = move.source.users.get(uid), move.target.users.get(uid)
        if there is not None and here != there:
            mean = f"{here} here" if here else "nobody's here"
            yield Said(
                "block", f"uid {uid} is {mean} and {there} on {move.target.host}: the session could do what {there} can"
            )
        elif here is not None and there is None:
            yield Said(
                "warn", f"uid {uid} ({here}) has no name on {move.target.host}: programs that look it up will fail"
            )


def _directories(move: Move) -> Iterable[Said]:
    there = move.target.directories
    for path in move.session.shares:
        if path not in there:
            yield Said("block", f"shared directory {path} does not exist on {move.target.host}")
    for path in move.session.layers:
        if path not in there:
            said = f"{move.target.host} has no {path}, another file system here: only what the session changed is there"
            yield Said("warn", said)


def _hooks(move: Move) -> Iterable[Said]:
    for path in move.session.hooks:
        if path not in move.target.hooks:
            yield Said("warn", f"{path}, a hook or gate, cannot be run on {move.target.host}: it is not told there")


def _name(move: Move) -> Iterable[Said]:
    if move.target.name_taken:
        yield Said("block", f"{move.target.host} has another session named {move.session.name!r}")


def _watches(move: Move) -> Iterable[Said]:
    if move.session.unseen:
        yield Said("block", f"a watch cannot be carried: {several(move.session.unseen)}")


def _nodes(move: Move) -> Iterable[Said]:
    """A restore here can be told to make them; a move to another host cannot."""
    if move.session.nodes:
        which = several(move.session.nodes)
        yield Said(
            "warn" if move.stays else "block",
            f"session {move.session.name!r} made device nodes, which a restore without --allow-devices refuses: "
            + which,
        )


def _databases(move: Move) -> Iterable[Said]:
    if move.session.databases:
        which = several(move.session.databases)
        yield Said(
            "warn",
            f"SQLite databases are open with a rollback journal: {which}. What is under way goes on, but the first"
            " write after the next BEGIN fails until the program opens them anew",
        )


def _expected(move: Move) -> Iterable[Said]:
    session = move.session
    sizes = f"memory {show_size(session.memory)}, changed files {show_size(session.files)}"
    guess = estimate(session.memory, session.files, session.measured, session.session)
    if guess is None:
        yield Said("info", f"{sizes}; frozen time and bytes to send: not measured yet on {move.source.host}")
        return
    after = "after its own last checkpoint" if guess.own else f"after other sessions' on {move.source.host}"
    said = f"frozen about {guess.frozen_s:.2f} s, {show_size(guess.new)} to send in {guess.upload_s:.1f} s, {after}"
    yield Said("info", f"{sizes}; {said}")


RULES: tuple[Rule[Move], ...] = (
    Rule(
        "files",
        ("block", "warn"),
        "files of this host that the session maps or has open, missing or different there",
        "Install the same packages there, or carry them along: --carry opened.",
        _files,
    ),
    Rule(
        "connections",
        ("warn",),
        "connections to the outside",
        "Their programs must connect again; a hook after the restore can tell them.",
        _connections,
    ),
    Rule(
        "ports",
        ("block",),
        "ports it listens on, with --net host",
        "Free the port there, or choose another host.",
        _ports,
    ),
    Rule(
        "addresses",
        ("block",),
        "addresses it is bound to, with --net host",
        "Bind to 0.0.0.0, or give that host the address.",
        _addresses,
    ),
    Rule(
        "uids",
        ("block", "warn"),
        "users of its processes that are someone else there",
        "Give the user the same number on both hosts.",
        _uids,
    ),
    Rule(
        "directories",
        ("block", "warn"),
        "directories it shares, and mount points it has views of",
        "Make or mount it there.",
        _directories,
    ),
    Rule(
        "hooks",
        ("warn",),
        "executables it wants told, as `run --hook` named them",
        "Put it there: an executable that root owns and nobody else may write.",
        _hooks,
    ),
    Rule("name", ("block",), "another session there of the same name", "End or rename that one first.", _name),
    Rule(
        "watches",
        ("block",),
        "watches (inotify, fanotify) on files that are deleted or cannot be found, or on whole file systems",
        "Restart the program, or end it first.",
        _watches,
    ),
    Rule(
        "device_nodes",
        ("block", "warn"),
        "device nodes the session made",
        "Remove them, or park the session and restore it with --allow-devices.",
        _nodes,
    ),
    Rule(
        "databases",
        ("warn",),
        "SQLite databases open for writing, with a rollback journal",
        "Use PRAGMA journal_mode=WAL, or open them anew after the move; a hook after the restore can tell the program.",
        _databases,
    ),
    Rule("expected", ("info",), "frozen time and bytes, from recent checkpoints", "Nothing to do.", _expected),
)
