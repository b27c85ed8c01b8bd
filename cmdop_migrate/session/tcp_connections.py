"""Find TCP connections of a session to the outside, and reset them (regime 3).

The peer's kernel holds its half, so no restore can re-establish one. The peer
learns of a reset immediately, the session when it resumes. Connections with both
ends inside the session are not touched.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate.errors import Blocked
from cmdop_migrate.holder import cgroup

# As /proc/net/tcp numbers them: all but CLOSE, TIME_WAIT and LISTEN, which have no waiting peer.
_CONNECTED = frozenset((1, 2, 3, 4, 5, 8, 9, 11))
_LISTEN = 10


@dataclass(frozen=True)
class Connection:
    """Describe one connection as the session sees it: its process, and its two ends."""

    pid: int
    command: str
    local: str
    local_port: int
    remote: str
    remote_port: int

    def to_json(self) -> dict[str, object]:
        return {
            "pid": self.pid,
            "command": self.command,
            "local": f"{self.local}:{self.local_port}",
            "remote": f"{self.remote}:{self.remote_port}",
        }


def external(group: str, private: bool = True) -> list[Connection]:
    """Return the connections of the session's processes whose other end is not one of the session's own sockets. On the
    host's own network (not `private`) that may be a service behind the loopback."""
    found: list[Connection] = []
    listening: set[int] = set()
    tables: dict[int, list[_Row]] = {}  # by network: the kernel takes 10 ms to list one, while the session is frozen
    for pid in cgroup.pids(group):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            inodes = _socket_inodes(pid)
            if not inodes:
                continue
            network = os.stat(f"/proc/{pid}/ns/net").st_ino
            if network not in tables:
                tables[network] = list(_rows(pid))
            rows = [row for row in tables[network] if row.inode in inodes]
        except (FileNotFoundError, ProcessLookupError):
            continue
        listening |= {row.local[1] for row in rows if row.state == _LISTEN}
        found += [Connection(pid, name, *row.local, *row.remote) for row in rows if row.state in _CONNECTED]
    return outside(found, None if private else listening)


@dataclass(frozen=True)
class _Row:
    local: tuple[str, int]
    remote: tuple[str, int]
    state: int
    inode: str


def _rows(pid: int) -> Iterator[_Row]:
    """Yield the TCP sockets of the network that `pid` is in, which is not ours."""
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        for line in lines:
            words = line.split()
            yield _Row(_address(words[1]), _address(words[2]), int(words[3], 16), words[9])


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            kind, _, number = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")
        except FileNotFoundError:
            continue
        if kind == "socket":
            found.add(number.rstrip("]"))
    return found


def _address(text: str) -> tuple[str, int]:
    """Return 127.0.0.1, 8080 for 0100007F:1F90: the kernel prints words of 32 bits in this machine's byte order.
    Pure."""
    packed, _, port = text.partition(":")
    words = [int(packed[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(packed), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def outside(connections: Iterable[Connection], listening: set[int] | None = None) -> list[Connection]:
    """Return the connections of which not both ends are listed, one per pair of ends (a forked child shares its
    parent's). Pure. The other end of a loopback connection is inside, also before it is accepted; on a host's own
    network only if its port is one that the session is `listening` on."""
    unique: dict[tuple[str, int, str, int], Connection] = {}
    for connection in connections:
        ends = (_plain(connection.local), connection.local_port, _plain(connection.remote), connection.remote_port)
        unique.setdefault(ends, connection)
    return [
        connection
        for (local, port, remote, remote_port), connection in unique.items()
        if (remote, remote_port, local, port) not in unique
        and not (
            (ipaddress.ip_address(remote).is_loopback or remote == local)
            and (listening is None or remote_port in listening)
        )
    ]


def reset(pid: int, connections: Iterable[Connection]) -> None:
    """Reset the connections in the network namespace of `pid`, which may be frozen. Raise Blocked."""
    terms = [
        f"( src {_quoted(end.local)}:{end.local_port} and dst {_quoted(end.remote)}:{end.remote_port} )"
        for end in connections
    ]
    if not terms:
        return
    ss = shutil.which("ss", path="/usr/bin:/bin:/usr/sbin:/sbin")
    if ss is None:
        raise Blocked("ss is not installed: connections to the outside cannot be reset", "Install iproute2.")
    for start in range(0, len(terms), 50):
        expression = " or ".join(terms[start : start + 50])
        command = ["nsenter", "-t", str(pid), "-n", ss, "-K", "-H", "-t", "-n", expression]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        if done.returncode != 0:
            raise Blocked(
                f"cannot reset connections: {done.stderr.strip()}", "Close them in the session, and try again."
            )


def _plain(address: str) -> str:
    """Return one form for ::ffff:10.0.0.1 and 10.0.0.1, which are the same address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def _quoted(address: str) -> str:
    return f"[{address}]" if ":" in address else address
