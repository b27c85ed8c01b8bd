"""Create interfaces, addresses and routes in this or another network namespace by rtnetlink(7).

The six requests that a session's start needs are written by hand. pyroute2 has all of netlink, but loading it and
entering another namespace takes longer than all the rest of a session's start (docs/decisions/0001-dependencies.md,
`scripts/bench netlink`); the tests use it to read back what these requests did. An OSError has the kernel's reason.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from types import TracebackType

from cmdop_migrate.holder import syscalls

LOOPBACK = 1  # the index of `lo`, in every namespace
TIMEOUT = 10.0
_ERROR = 2
_NEW_LINK, _GET_LINK, _NEW_ADDRESS, _DEL_ADDRESS, _NEW_ROUTE = 16, 18, 20, 21, 24
_REQUEST, _ACK, _REPLACE, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x100, 0x200, 0x400
_IFNAME, _LINK_INFO, _NET_NS_PID = 3, 18, 19
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_ADDRESS, _LOCAL = 1, 2
_GATEWAY = 5
_MAIN_TABLE, _STATIC, _UNICAST = 254, 4, 1
_UP = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, which flags
_ADDR = struct.Struct("=BBBBI")  # family, prefix, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, to, from, tos, table, protocol, scope, type, flags


def attribute(kind: int, data: bytes) -> bytes:
    """Encode one attribute, padded to four bytes for the next one."""
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


class Netlink:
    """Send requests to the network namespace of `pid`, or to our own. Use as a context manager."""

    def __init__(self, pid: int | None = None) -> None:
        self._socket = _open(socket.NETLINK_ROUTE) if pid is None else open_in(pid, socket.NETLINK_ROUTE)
        self._number = 0

    def __enter__(self) -> Netlink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def add_veth(self, name: str, peer: str, pid: int) -> None:
        """Create a veth pair: `name` here, `peer` in the namespace of `pid`. Raise FileExistsError when the name is
        taken, ProcessLookupError when `pid` has ended."""
        other = _LINK.pack(0, 0, 0, 0, 0) + _name(peer) + attribute(_NET_NS_PID, struct.pack("=I", pid))
        kind = attribute(_INFO_KIND, b"veth\0") + attribute(_INFO_DATA, attribute(_VETH_PEER, other))
        self._ask(
            _NEW_LINK,
            _CREATE | _EXCLUSIVE,
            _LINK.pack(0, 0, 0, 0, 0) + _name(name) + attribute(_LINK_INFO, kind),
        )

    def index(self, name: str) -> int:
        """Return the index of an interface. Raise FileNotFoundError."""
        try:
            answer = self._ask(_GET_LINK, 0, _LINK.pack(0, 0, 0, 0, 0) + _name(name))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            raise FileNotFoundError(errno.ENOENT, f"no interface {name}") from error
        number: int = _LINK.unpack_from(answer)[2]
        return number

    def raise_link(self, index: int) -> None:
        """Bring an interface up."""
        self._ask(_NEW_LINK, 0, _LINK.pack(0, 0, index, _UP, _UP))

    def add_address(self, index: int, address: str, prefix: int) -> None:
        """Add an address, or replace it if it exists already."""
        self._ask(_NEW_ADDRESS, _CREATE | _REPLACE, _address(index, address, prefix))

    def remove_address(self, index: int, address: str, prefix: int) -> None:
        """Remove an address. Raise OSError if it does not exist."""
        self._ask(_DEL_ADDRESS, 0, _address(index, address, prefix))

    def set_default_route(self, gateway: str) -> None:
        """Set or replace the default route."""
        route = _ROUTE.pack(socket.AF_INET, 0, 0, 0, _MAIN_TABLE, _STATIC, 0, _UNICAST, 0)
        self._ask(_NEW_ROUTE, _CREATE | _REPLACE, route + attribute(_GATEWAY, socket.inet_aton(gateway)))

    def _ask(self, kind: int, flags: int, body: bytes) -> bytes:
        """Send a request; return the kernel's answer besides its acknowledgement. Raise OSError when it refuses."""
        self._number += 1
        header = _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | _ACK | flags, self._number, 0)
        self._socket.send(header + body)
        answer = b""
        while True:
            data = self._socket.recv(64 << 10)
            while data:
                length, got, _, number, _ = _HEADER.unpack_from(data)
                payload, data = data[_HEADER.size : length], data[length + -length % 4 :]
                if number != self._number:
                    continue
                if got != _ERROR:
                    answer = payload
                    continue
                code = -struct.unpack_from("=i", payload)[0]
                if code:
                    raise OSError(code, os.strerror(code))
                return answer


def _name(name: str) -> bytes:
    return attribute(_IFNAME, name.encode() + b"\0")


def _address(index: int, address: str, prefix: int) -> bytes:
    packed = socket.inet_aton(address)
    body = _ADDR.pack(socket.AF_INET, prefix, 0, 0, index)
    return body + attribute(_LOCAL, packed) + attribute(_ADDRESS, packed)


def _open(protocol: int) -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    sock.settimeout(TIMEOUT)
    return sock


def open_in(pid: int, protocol: int) -> socket.socket:
    """Return a netlink socket in the network namespace of `pid`. A socket always belongs to the namespace in which it
    is created, so a thread enters the namespace, creates the socket and ends. Raise OSError."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                syscalls.setns(there, syscalls.NEWNET)
                made.append(_open(protocol))
            finally:
                os.close(there)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make, name="netns")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
