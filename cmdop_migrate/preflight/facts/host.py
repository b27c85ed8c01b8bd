"""Hold the facts of a host that matter for a move, and the query for them. Both are sent between hosts as JSON.

The queried host answers about itself: its own files, users, ports and services. An answer is trusted for nothing
beyond the findings made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cmdop_migrate.preflight.facts.cpu import Cpu
from cmdop_migrate.preflight.facts.strict_json import Signed, decode

FORMAT = 1
FileDifference = Literal["missing", "different"]


@dataclass(frozen=True)
class Port:
    """Describe a listening or bound socket: `kind` is tcp or udp, `address` as the kernel prints it."""

    kind: str
    address: str
    port: int


@dataclass(frozen=True)
class HostQuery:
    """Describe what one host needs to know about another before a session moves there. `files`: (path, size, mtime_ns,
    build-id, digest)."""

    session: str
    name: str
    files: tuple[tuple[str, int, Signed, str | None, str | None], ...] = ()
    uids: tuple[int, ...] = ()
    ports: tuple[Port, ...] = ()
    directories: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a value that can be encoded as JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> HostQuery:
        """Return the query that `to_json` has encoded. Raise ValueError for anything else."""
        return decode(cls, _checked_format(data))


@dataclass(frozen=True)
class Service:
    """Describe a store, lease store or relay as a host sees it: its address, its problem (empty: none), and for stores
    the id that is kept in them, by which two hosts know that they use the same one."""

    url: str
    trouble: str = ""
    id: str | None = None


@dataclass(frozen=True)
class LeaseFacts:
    """Describe the lease record of the session: its state, its holder and its fencing token."""

    state: str
    host: str
    instance: str
    token: int


@dataclass(frozen=True)
class HostProblem:
    """Describe a problem that `doctor` found on that host."""

    name: str
    message: str
    fix: str
    fatal: bool


@dataclass(frozen=True)
class HostFacts:
    """Describe a host. `wanting`: of the files in the query, those that are missing or different there; `users`: uid ->
    name, of the users in the query; `listening`: sockets on the ports in the query; `directories`, `hooks`: those in
    the query that exist and are usable; `keys`: fingerprints of all its keys, `key`: of the one it seals with;
    `name_taken`: another session there has the name."""

    host: str
    instance: str
    version: str
    protocol: int
    cpu: Cpu
    kernel: str
    criu: str | None
    criu_features: frozenset[str]
    memory_available: int
    state_dir: str
    disk_free: int
    store: Service
    lease: Service
    needs: tuple[HostProblem, ...] = ()
    wanting: Mapping[str, FileDifference] = field(default_factory=dict)
    users: Mapping[int, str] = field(default_factory=dict)
    listening: tuple[Port, ...] = ()
    addresses: frozenset[str] = frozenset()
    directories: frozenset[str] = frozenset()
    hooks: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    key: str | None = None
    standing: LeaseFacts | None = None
    relay: Service | None = None
    name_taken: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a value that can be encoded as JSON."""
        data = asdict(self)
        data["cpu"]["flags"] = sorted(self.cpu.flags)
        for name in ("criu_features", "addresses", "directories", "hooks", "keys"):
            data[name] = sorted(data[name])
        data["users"] = {str(uid): name for uid, name in self.users.items()}
        return {"format": FORMAT, **data}

    @classmethod
    def from_json(cls, data: Any) -> HostFacts:
        """Return the facts that `to_json` has encoded. Raise ValueError for anything else."""
        return decode(cls, _checked_format(data))


def _checked_format(data: Any) -> Any:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"expected an object of format {FORMAT}: {data!r:.80}")
    return data
