"""Live TCP connections to the outside: found, named, and reset (regime 3).

The peer's kernel holds its half, so no restore can bring one back. What is
reset is told to the peer at once, and to the session when it wakes.
Connections with both ends inside the session are not touched.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from cmdop_migrate.errors import Blocked
from cmdop_migrate.session import cgroup

_CONNECTED = {
    psutil.CONN_ESTABLISHED,
    psutil.CONN_SYN_SENT,
    psutil.CONN_SYN_RECV,
    psutil.CONN_FIN_WAIT1,
    psutil.CONN_FIN_WAIT2,
    psutil.CONN_CLOSE_WAIT,
    psutil.CONN_LAST_ACK,
    psutil.CONN_CLOSING,
}


@dataclass(frozen=True)
class Connection:
    """One connection as the session sees it: whose it is, and its two ends."""

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
    """Connections of the session's processes whose other end is none of the session's own sockets. On the host's own
    network (not `private`) that may be a service behind the loopback."""
    found: list[Connection] = []
    listening: set[int] = set()
    for pid in cgroup.pids(group):
        try:
            process = psutil.Process(pid)
            name, connections = process.name(), process.net_connections("tcp")
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
        for one in connections:
            if one.status == psutil.CONN_LISTEN:
                listening.add(one.laddr.port)
            if one.status in _CONNECTED and one.raddr:
                found.append(Connection(pid, name, one.laddr.ip, one.laddr.port, one.raddr.ip, one.raddr.port))
    return outside(found, None if private else listening)


def outside(connections: Iterable[Connection], listening: set[int] | None = None) -> list[Connection]:
    """Pure: those whose two ends are not both there, one per pair of ends (a forked child shares its parent's).
    The other end of a loopback one is inside, though nobody may have accepted it yet; on a host's own network only
    if its port is one the session is `listening` on."""
    unique: dict[tuple[str, int, str, int], Connection] = {}
    for one in connections:
        unique.setdefault((_plain(one.local), one.local_port, _plain(one.remote), one.remote_port), one)
    return [
        one
        for (local, port, remote, remote_port), one in unique.items()
        if (remote, remote_port, local, port) not in unique
        and not (
            (ipaddress.ip_address(remote).is_loopback or remote == local)
            and (listening is None or remote_port in listening)
        )
    ]


def reset(pid: int, connections: Iterable[Connection]) -> None:
    """Ends them in the network namespace of `pid`, which may be frozen."""
    terms = [
        f"( src {_quoted(one.local)}:{one.local_port} and dst {_quoted(one.remote)}:{one.remote_port} )"
        for one in connections
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
    """::ffff:10.0.0.1 and 10.0.0.1 are one address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def _quoted(address: str) -> str:
    return f"[{address}]" if ":" in address else address
