"""The facts of a host that matter for a move, and what is asked of it. Values that cross between hosts as JSON.

The host that is asked answers about itself: it looks at its own files, users,
ports and services. Nothing in an answer is believed beyond what it is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from cmdop_migrate.preflight.facts.cpu import Cpu

T = TypeVar("T")
FORMAT = 1
FileDifference = Literal["missing", "different"]


@dataclass(frozen=True)
class Port:
    """A socket that listens, or is bound: `kind` is tcp or udp, `address` as the kernel tells it."""

    kind: str
    address: str
    port: int


@dataclass(frozen=True)
class HostQuery:
    """What one host asks another about itself, for one session. `files`: (path, size, mtime_ns, build-id,
    digest)."""

    session: str
    name: str
    files: tuple[tuple[str, int, int, str | None, str | None], ...] = ()
    uids: tuple[int, ...] = ()
    ports: tuple[Port, ...] = ()
    directories: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> HostQuery:
        """ValueError for anything `to_json` does not write."""
        known = _table(data)
        return cls(
            session=_text(known["session"]),
            name=_text(known["name"]),
            files=tuple(_file(row) for row in _rows(known["files"])),
            uids=tuple(_count(one) for one in _rows(known["uids"])),
            ports=tuple(_port(one) for one in _rows(known["ports"])),
            directories=tuple(_text(one) for one in _rows(known["directories"])),
            hooks=tuple(_text(one) for one in _rows(known["hooks"])),
        )


@dataclass(frozen=True)
class Service:
    """A store, lease store or relay as a host sees it: its address, what is wrong with it (empty: nothing), and for
    stores the id that is kept in them, which tells whether two hosts mean the same."""

    url: str
    trouble: str = ""
    id: str | None = None


@dataclass(frozen=True)
class LeaseFacts:
    """What the lease store tells of the session."""

    state: str
    host: str
    instance: str
    token: int


@dataclass(frozen=True)
class HostProblem:
    """What `doctor` says is not as it should be on that host."""

    name: str
    message: str
    fix: str
    fatal: bool


@dataclass(frozen=True)
class HostFacts:
    """`wanting`: of the files asked about, those it lacks or has otherwise; `users`: uid -> name, of those asked about;
    `listening`: taken on the ports asked about; `directories`, `hooks`: of those asked about, those there and
    usable; `keys`: fingerprints of all it has, `key` of the one it seals with; `name_taken`: another session there has
    the name."""

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
        data = asdict(self)
        data["cpu"]["flags"] = sorted(self.cpu.flags)
        for name in ("criu_features", "addresses", "directories", "hooks", "keys"):
            data[name] = sorted(data[name])
        data["users"] = {str(uid): name for uid, name in self.users.items()}
        return {"format": FORMAT, **data}

    @classmethod
    def from_json(cls, data: Any) -> HostFacts:
        """ValueError for anything `to_json` does not write."""
        known = _table(data)
        return cls(
            host=_text(known["host"]),
            instance=_text(known["instance"]),
            version=_text(known["version"]),
            protocol=_count(known["protocol"]),
            cpu=_cpu(known["cpu"]),
            kernel=_text(known["kernel"]),
            criu=_maybe(known["criu"], _text),
            criu_features=_texts(known["criu_features"]),
            memory_available=_count(known["memory_available"]),
            state_dir=_text(known["state_dir"]),
            disk_free=_count(known["disk_free"]),
            store=_service(known["store"]),
            lease=_service(known["lease"]),
            needs=tuple(_need(one) for one in _rows(known["needs"])),
            wanting={_text(path): _wanting(how) for path, how in _dict(known["wanting"]).items()},
            users={_number(uid): _text(name) for uid, name in _dict(known["users"]).items()},
            listening=tuple(_port(one) for one in _rows(known["listening"])),
            addresses=_texts(known["addresses"]),
            directories=_texts(known["directories"]),
            hooks=_texts(known["hooks"]),
            keys=_texts(known["keys"]),
            key=_maybe(known["key"], _text),
            standing=_maybe(known["standing"], _standing),
            relay=_maybe(known["relay"], _service),
            name_taken=_flag(known["name_taken"]),
        )


class _Known(dict[str, Any]):
    """A key that is not there is said as such, not as KeyError."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"no {key!r}")


def _table(data: Any) -> _Known:
    known = _Known(_dict(data))
    if known["format"] != FORMAT:
        raise ValueError(f"format {known['format']!r}, this version knows {FORMAT}")
    return known


def _dict(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"no object: {data!r:.80}")
    return data


def _rows(data: Any) -> list[Any]:
    if not isinstance(data, list | tuple):
        raise ValueError(f"no list: {data!r:.80}")
    return list(data)


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise ValueError(f"no text: {data!r:.80}")
    return data


def _texts(data: Any) -> frozenset[str]:
    return frozenset(_text(one) for one in _rows(data))


def _flag(data: Any) -> bool:
    if not isinstance(data, bool):
        raise ValueError(f"neither true nor false: {data!r:.80}")
    return data


def _count(data: Any) -> int:
    if isinstance(data, bool) or not isinstance(data, int) or data < 0:
        raise ValueError(f"no count: {data!r:.80}")
    return data


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"no number: {text!r:.80}")
    return int(text)


def _maybe(data: Any, read: Callable[[Any], T]) -> T | None:
    return None if data is None else read(data)


def _wanting(data: Any) -> FileDifference:
    if data == "missing":
        return "missing"
    if data == "different":
        return "different"
    raise ValueError(f"neither missing nor different: {data!r:.80}")


def _file(row: Any) -> tuple[str, int, int, str | None, str | None]:
    match row:
        case [str(path), int(size), int(mtime), str() | None as build_id, str() | None as digest]:
            return path, size, mtime, build_id, digest
    raise ValueError(f"no file: {row!r:.80}")


def _port(data: Any) -> Port:
    known = _Known(_dict(data))
    return Port(_text(known["kind"]), _text(known["address"]), _count(known["port"]))


def _cpu(data: Any) -> Cpu:
    known = _Known(_dict(data))
    return Cpu(
        _text(known["machine"]),
        _count(known["page_size"]),
        _texts(known["flags"]),
        _maybe(known["xfeatures"], _count),
        _maybe(known["frame"], _count),
    )


def _service(data: Any) -> Service:
    known = _Known(_dict(data))
    return Service(_text(known["url"]), _text(known["trouble"]), _maybe(known["id"], _text))


def _standing(data: Any) -> LeaseFacts:
    known = _Known(_dict(data))
    return LeaseFacts(_text(known["state"]), _text(known["host"]), _text(known["instance"]), _count(known["token"]))


def _need(data: Any) -> HostProblem:
    known = _Known(_dict(data))
    return HostProblem(_text(known["name"]), _text(known["message"]), _text(known["fix"]), _flag(known["fatal"]))
