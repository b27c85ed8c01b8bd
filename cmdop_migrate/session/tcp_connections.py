"""Find the live TCP connections of a session to the outside, and reset them.

The peer's kernel holds its half of such a connection, so no restore can restore it. The peer is notified of the reset
immediately, the session when it runs again. Connections with both ends inside the session are not touched.

Connections are reset with `ss -K` of iproute2, which reports errors. pyroute2 has no call for it, and its socket
diagnosis drops the kernel's error messages (docs/decisions/0001-dependencies.md).
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

# States as /proc/net/tcp numbers them: all except CLOSE, TIME_WAIT and LISTEN, which have no waiting peer.
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
        """Return the connection for checkpoint results and events."""
        return {
            "pid": self.pid,
            "command": self.command,
            "local": f"{self.local}:{self.local_port}",
            "remote": f"{self.remote}:{self.remote_port}",
        }


def external(group: str, private: bool = True) -> list[Connection]:
    """Return the connections of the session's processes whose other end is not a socket of the session. On the host's
    own network (not `private`) the other end may be a service on the loopback interface."""
    found: list[Connection] = []
    listening: set[int] = set()
    tables: dict[int, list[_Row]] = {}  # by network: listing one takes the kernel 10 ms, while the session is frozen
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
    """Yield the TCP sockets of the network namespace of `pid`."""
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
    """Return 127.0.0.1, 8080 for 0100007F:1F90. The kernel prints words of 32 bits in the byte order of this host."""
    packed, _, port = text.partition(":")
    words = [int(packed[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(packed), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def outside(connections: Iterable[Connection], listening: set[int] | None = None) -> list[Connection]:
    """Return the connections whose two ends are not both in `connections`, one for each pair of ends (a forked child
    shares its parent's). The other end of a loopback connection is inside, although it may not have been accepted yet;
    on a host's own network only if the session is `listening` on its port."""
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
    """Reset these connections in the network namespace of `pid`, which may be frozen. Raise Blocked."""
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
    """Return 10.0.0.1 for ::ffff:10.0.0.1, which is the same address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def _quoted(address: str) -> str:
    return f"[{address}]" if ":" in address else address
