"""Hold the facts of a running session that matter for a move. `migration/gather_session_facts.py` reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cmdop_migrate.preflight.facts.host import HostQuery, Port
from cmdop_migrate.preflight.facts.processes import Tree

Carry = Literal["none", "mapped", "opened"]


@dataclass(frozen=True)
class HeldFile:
    """A file of the host that the session maps or has open, and has not changed itself."""

    path: str
    size: int
    mtime_ns: int
    build_id: str | None
    digest: str | None
    mapped: bool

    def row(self) -> tuple[str, int, int, str | None, str | None]:
        return self.path, self.size, self.mtime_ns, self.build_id, self.digest


@dataclass(frozen=True)
class PastCheckpoint:
    """One checkpoint of the past: bytes of memory and files, those that were new to the store, seconds."""

    session: str
    memory: int
    files: int
    new: int
    frozen_s: float
    upload_s: float


@dataclass(frozen=True)
class Estimate:
    """What the next checkpoint will cost, from what earlier ones did."""

    frozen_s: float
    new: int
    upload_s: float
    own: bool


@dataclass(frozen=True)
class SessionFacts:
    """`memory`: bytes to dump, about; `files`: bytes it changed; `outside`: connections with a peer elsewhere, as text;
    `unseen`: processes that watch files which were not found; `nodes`: device nodes it made; `databases`: of SQLite,
    open for writing, not in WAL mode."""

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
        return tuple(sorted({one.uid for one in self.tree.processes}))

    def ask(self) -> HostQuery:
        """What a host must be asked about itself before this session moves there."""
        return HostQuery(
            session=self.session,
            name=self.name,
            files=tuple(one.row() for one in self.held),
            uids=self.uids,
            ports=self.ports,
            directories=(*self.layers, *self.shares),
            hooks=self.hooks,
        )


def estimate(memory: int, files: int, measured: Sequence[PastCheckpoint], session: str) -> Estimate | None:
    """From the session's own last checkpoint; else from that of another session here that is nearest in size. Grown
    with the size, never shrunk: part of the time is fixed. None: nothing was measured yet."""
    size = max(1, memory + files)
    own = [one for one in measured if one.session == session]
    if not measured:
        return None
    nearest = own[-1] if own else min(reversed(measured), key=lambda one: abs(math.log(size / _size(one))))
    growth = max(1.0, size / _size(nearest))
    return Estimate(nearest.frozen_s * growth, int(nearest.new * growth), nearest.upload_s * growth, own=bool(own))


def _size(one: PastCheckpoint) -> int:
    return max(1, one.memory + one.files)
