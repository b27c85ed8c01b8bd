"""The few rtnetlink requests that lay a cable between two network namespaces.

By hand, because loading a general library for them took longer than starting
a session does. OSError carries the kernel's own reason.
"""

from __future__ import annotations

import os
import socket
import struct
from types import TracebackType

from cmdop_migrate.session import syscalls

_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, dst, src, tos, table, protocol, scope, type, flags
_ATTRIBUTE = struct.Struct("=HH")
_NEWLINK, _GETLINK, _NEWADDR, _DELADDR, _NEWROUTE, _ERROR = 16, 18, 20, 21, 24, 2
_REQUEST, _ACK, _REPLACE, _EXCL, _CREATE = 1, 4, 0x100, 0x200, 0x400
_IFNAME, _LINKINFO, _NET_NS_PID, _INFO_KIND, _INFO_DATA, _VETH_PEER = 3, 18, 19, 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL, _RTA_GATEWAY = 1, 2, 5
_MAIN, _STATIC, _UNICAST, _UP = 254, 4, 1, 1
LOOPBACK = 1  # the index of `lo`, in every namespace


def attribute(kind: int, value: bytes) -> bytes:
    """Pure: one attribute, padded."""
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def veth_request(name: str, peer: str, pid: int) -> bytes:
    """Pure: a pair of interfaces, the second one in the network namespace of `pid`."""
    other = _LINK.pack(0, 0, 0, 0, 0) + attribute(_IFNAME, peer.encode() + b"\0")
    other += attribute(_NET_NS_PID, struct.pack("=I", pid))
    info = attribute(_INFO_KIND, b"veth") + attribute(_INFO_DATA, attribute(_VETH_PEER, other))
    return _LINK.pack(0, 0, 0, 0, 0) + attribute(_IFNAME, name.encode() + b"\0") + attribute(_LINKINFO, info)


class Netlink:
    """Requests to the network namespace of `pid`, or our own. Use as a context manager."""

    def __init__(self, pid: int | None = None) -> None:
        self._sock = _socket() if pid is None else _socket_inside(pid)
        self._number = 0

    def __enter__(self) -> Netlink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    def add_veth(self, name: str, peer: str, pid: int) -> None:
        """FileExistsError when the name is taken, ProcessLookupError when `pid` is gone."""
        self._ask(_NEWLINK, _CREATE | _EXCL, veth_request(name, peer, pid))

    def index(self, name: str) -> int:
        answer = self._ask(_GETLINK, 0, _LINK.pack(0, 0, 0, 0, 0) + attribute(_IFNAME, name.encode() + b"\0"))
        index: int = _LINK.unpack_from(answer)[2]
        return index

    def raise_link(self, index: int) -> None:
        self._ask(_NEWLINK, 0, _LINK.pack(0, 0, index, _UP, _UP))

    def add_address(self, index: int, address: str, prefix: int) -> None:
        """Also when it is there already."""
        self._ask(_NEWADDR, _CREATE | _REPLACE, _address(index, address, prefix))

    def remove_address(self, index: int, address: str, prefix: int) -> None:
        self._ask(_DELADDR, 0, _address(index, address, prefix))

    def set_default_route(self, gateway: str) -> None:
        body = _ROUTE.pack(socket.AF_INET, 0, 0, 0, _MAIN, _STATIC, 0, _UNICAST, 0)
        self._ask(_NEWROUTE, _CREATE | _REPLACE, body + attribute(_RTA_GATEWAY, socket.inet_aton(gateway)))

    def _ask(self, kind: int, flags: int, body: bytes) -> bytes:
        """What the kernel answers before it acknowledges; its refusal is raised."""
        self._number += 1
        header = _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | _ACK | flags, self._number, 0)
        self._sock.send(header + body)
        answer = b""
        while True:
            data = self._sock.recv(64 << 10)
            while data:
                length, got, _, number, _ = _HEADER.unpack_from(data)
                payload, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if number != self._number:
                    continue
                if got != _ERROR:
                    answer = payload
                    continue
                code = -struct.unpack_from("=i", payload)[0]
                if code:
                    raise OSError(code, os.strerror(code))
                return answer


def _address(index: int, address: str, prefix: int) -> bytes:
    packed = socket.inet_aton(address)
    body = _ADDRESS.pack(socket.AF_INET, prefix, 0, 0, index)
    return body + attribute(_IFA_LOCAL, packed) + attribute(_IFA_ADDRESS, packed)


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    sock.bind((0, 0))
    sock.settimeout(10)
    return sock


def _socket_inside(pid: int) -> socket.socket:
    """A socket belongs for ever to the namespace it was made in: go there, make it, come back."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.setns(there, syscalls.NEWNET)
        finally:
            os.close(there)
        try:
            return _socket()
        finally:
            syscalls.setns(here, syscalls.NEWNET)
    finally:
        os.close(here)
