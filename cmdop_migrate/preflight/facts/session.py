"""Hold the facts of a running session that matter for a move, and the move itself: a session and two hosts.

`migration/gather_facts.py` gathers the facts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cmdop_migrate.preflight.facts.host import HostFacts, HostQuery, Port
from cmdop_migrate.preflight.facts.processes import Tree

Carry = Literal["none", "mapped", "opened"]


@dataclass(frozen=True)
class HeldFile:
    """Describe a file of the host that the session maps or has open, and has not changed itself."""

    path: str
    size: int
    mtime_ns: int
    build_id: str | None
    digest: str | None
    mapped: bool

    def row(self) -> tuple[str, int, int, str | None, str | None]:
        """Return the file as a row of `HostQuery.files`."""
        return self.path, self.size, self.mtime_ns, self.build_id, self.digest


@dataclass(frozen=True)
class PastCheckpoint:
    """Describe an earlier checkpoint: bytes of memory and files, bytes that were new to the store, seconds."""

    session: str
    memory: int
    files: int
    new: int
    frozen_s: float
    upload_s: float


@dataclass(frozen=True)
class Estimate:
    """Describe the expected cost of the next checkpoint. `own`: estimated from the session's own last one."""

    frozen_s: float
    new: int
    upload_s: float
    own: bool


@dataclass(frozen=True)
class SessionFacts:
    """Describe a session. `memory`: bytes to dump, approximately; `files`: bytes of changed files; `outside`:
    connections to a peer outside, as text; `unseen`: processes that watch files which were not found; `nodes`: device
    nodes that the session made; `databases`: SQLite databases that are open for writing and not in WAL mode."""

    session: str
    name: str
    host: str
    token: int
    state: str
    private_net: bool
    tree: Tree
    memory: int
    files: int
    held: tuple[HeldFile, ...] = ()
    outside: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    layers: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    databases: tuple[str, ...] = ()
    measured: tuple[PastCheckpoint, ...] = ()

    @property
    def uids(self) -> tuple[int, ...]:
        """Return the users of its processes."""
        return tuple(sorted({process.uid for process in self.tree.processes}))

    def ask(self) -> HostQuery:
        """Return the query to a host to which this session may move."""
        return HostQuery(
            session=self.session,
            name=self.name,
            files=tuple(file.row() for file in self.held),
            uids=self.uids,
            ports=self.ports,
            directories=(*self.layers, *self.shares),
            hooks=self.hooks,
        )


@dataclass(frozen=True)
class Move:
    """Describe a session, the host it is on, and the host it is to move to. `source` and `target` are the same host
    when the session is to be restored where it is."""

    session: SessionFacts
    source: HostFacts
    target: HostFacts
    carry: Carry = "mapped"

    @property
    def stays(self) -> bool:
        """Tell whether source and target are the same host."""
        return self.source.instance == self.target.instance


def estimate(memory: int, files: int, measured: Sequence[PastCheckpoint], session: str) -> Estimate | None:
    """Estimate the cost of the next checkpoint from the session's own last one, else from that of the session nearest
    in size on this host. Scale it up with the size, never down: part of the time is fixed. Return None if nothing was
    measured yet."""
    size = max(1, memory + files)
    own = [checkpoint for checkpoint in measured if checkpoint.session == session]
    if not measured:
        return None
    nearest = own[-1] if own else min(reversed(measured), key=lambda past: abs(math.log(size / _size(past))))
    growth = max(1.0, size / _size(nearest))
    return Estimate(nearest.frozen_s * growth, int(nearest.new * growth), nearest.upload_s * growth, own=bool(own))


def _size(past: PastCheckpoint) -> int:
    return max(1, past.memory + past.files)
