"""Check what a session uses of its host: files, connections, ports, users, directories; no side effects."""

from __future__ import annotations

from collections.abc import Iterable

from cmdop_migrate.preflight.facts.host import Port
from cmdop_migrate.preflight.facts.session import Move, estimate
from cmdop_migrate.preflight.findings import Hit, Rule, several
from cmdop_migrate.units import show_size

_ANY = ("0.0.0.0", "[::]", "::")  # noqa: S104 - compared with, not bound to


def _files(move: Move) -> Iterable[Hit]:
    """Check the files of the host, as snapshot/host_files.py handles them: carried files are put into the session's own
    layer, all others must exist there."""
    wanting = {file for file in move.session.held if file.path in move.target.wanting}
    carried = {file for file in wanting if move.carry == "opened" or (move.carry == "mapped" and file.mapped)}
    lost = sorted(f"{file.path} ({move.target.wanting[file.path]})" for file in wanting - carried)
    if lost:
        yield Hit("block", f"files the session needs are missing or different on {move.target.host}: {several(lost)}")
    if carried:
        paths = sorted(f"{file.path} ({move.target.wanting[file.path]})" for file in carried)
        size = show_size(sum(file.size for file in carried))
        yield Hit(
            "warn",
            f"{len(carried)} files that are missing or different on {move.target.host} will be carried, {size}:"
            f" {several(paths)}. They hide that host's own files in the session, also for programs started later",
        )


def _connections(move: Move) -> Iterable[Hit]:
    if move.session.outside:
        count = len(move.session.outside)
        yield Hit("warn", f"{count} connections to the outside will be reset: {several(move.session.outside)}")


def _ports(move: Move) -> Iterable[Hit]:
    if move.stays:
        return
    for own in move.session.ports:
        if any(_clash(own, other) for other in move.target.listening):
            where = f"{own.kind} port {own.port}"
            yield Hit("block", f"{where} is taken on {move.target.host}, and the session is on its host's network")


def _addresses(move: Move) -> Iterable[Hit]:
    if move.stays:
        return
    bound = {port.address for port in move.session.ports} - set(_ANY)
    for address in sorted(filter(lambda address: _is_missing(address, move), bound)):
        yield Hit("block", f"the session is bound to {address}, which {move.target.host} does not have")


def _is_missing(address: str, move: Move) -> bool:
    return not _is_loopback(address) and address.strip("[]") not in move.target.addresses


def _clash(own: Port, other: Port) -> bool:
    same = own.address == other.address or own.address in _ANY or other.address in _ANY
    return own.kind == other.kind and own.port == other.port and same


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address.strip("[]") == "::1"


def _uids(move: Move) -> Iterable[Hit]:
    for uid in move.session.uids:
        here, there = move.source.users.get(uid), move.target.users.get(uid)
        if there is not None and here != there:
            meaning = f"{here} here" if here else "unused here"
            yield Hit(
                "block",
                f"uid {uid} is {meaning} and {there} on {move.target.host}: the session could do what {there} can",
            )
        elif here is not None and there is None:
            yield Hit(
                "warn", f"uid {uid} ({here}) has no name on {move.target.host}: programs that look it up will fail"
            )


def _directories(move: Move) -> Iterable[Hit]:
    there = move.target.directories
    for path in move.session.shares:
        if path not in there:
            yield Hit("block", f"shared directory {path} does not exist on {move.target.host}")
    for path in move.session.layers:
        if path not in there:
            message = f"{move.target.host} has no {path}, a separate file system here: only changed files will be there"
            yield Hit("warn", message)


def _hooks(move: Move) -> Iterable[Hit]:
    for path in move.session.hooks:
        if path not in move.target.hooks:
            yield Hit("warn", f"{path}, a hook or gate, cannot be run on {move.target.host}: it is not called there")


def _name(move: Move) -> Iterable[Hit]:
    if move.target.name_taken:
        yield Hit("block", f"{move.target.host} has another session named {move.session.name!r}")


def _watches(move: Move) -> Iterable[Hit]:
    if move.session.unseen:
        yield Hit("block", f"a watch cannot be restored: {several(move.session.unseen)}")


def _nodes(move: Move) -> Iterable[Hit]:
    """Check device nodes: a restore here has an option that creates them; a move to another host has none."""
    if move.session.nodes:
        which = several(move.session.nodes)
        yield Hit(
            "warn" if move.stays else "block",
            f"session {move.session.name!r} created device nodes, which a restore without --allow-devices refuses: "
            + which,
        )


def _databases(move: Move) -> Iterable[Hit]:
    if move.session.databases:
        which = several(move.session.databases)
        yield Hit(
            "warn",
            f"SQLite databases are open with a rollback journal: {which}. A transaction in progress continues, but the"
            " first write after the next BEGIN fails until the program opens them again",
        )


def _expected(move: Move) -> Iterable[Hit]:
    session = move.session
    sizes = f"memory {show_size(session.memory)}, changed files {show_size(session.files)}"
    guess = estimate(session.memory, session.files, session.measured, session.session)
    if guess is None:
        yield Hit("info", f"{sizes}; frozen time and bytes to send: not measured yet on {move.source.host}")
        return
    after = "after its own last checkpoint" if guess.own else f"after other sessions' on {move.source.host}"
    cost = f"frozen about {guess.frozen_s:.2f} s, {show_size(guess.new)} to send in {guess.upload_s:.1f} s, {after}"
    yield Hit("info", f"{sizes}; {cost}")


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
        "Their programs must connect again; a hook after the restore can notify them.",
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
        "users of its processes that are other users there",
        "Give the user the same number on both hosts.",
        _uids,
    ),
    Rule(
        "directories",
        ("block", "warn"),
        "directories that it shares, and file systems of the host that it sees",
        "Create or mount it there.",
        _directories,
    ),
    Rule(
        "hooks",
        ("warn",),
        "hooks of the session (`run --hook`) that do not exist there",
        "Install it there: an executable that root owns and only root may write.",
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
        "device nodes that the session created",
        "Remove them, or park the session and restore it with --allow-devices.",
        _nodes,
    ),
    Rule(
        "databases",
        ("warn",),
        "SQLite databases open for writing, with a rollback journal",
        "Use PRAGMA journal_mode=WAL, or open them again after the move; a hook can notify the program.",
        _databases,
    ),
    Rule("expected", ("info",), "frozen time and bytes, from recent checkpoints", "Nothing to do.", _expected),
)
