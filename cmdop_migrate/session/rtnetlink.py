"""Interfaces, addresses and routes in our own or another network namespace: the one home of pyroute2.

The library takes longer to load than a session takes to start, so it is loaded
by `prepare`, while something else is waited for. OSError carries the kernel's
own reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

LOOPBACK = 1  # the index of `lo`, in every namespace


def prepare() -> None:
    """Loads what `Netlink` needs."""
    import pyroute2  # noqa: F401 - for its side effect: the next import of it is free


class Netlink:
    """Requests to the network namespace of `pid`, or our own. Use as a context manager."""

    def __init__(self, pid: int | None = None) -> None:
        from pyroute2 import IPRoute, NetNS

        self._link: Any = IPRoute() if pid is None else NetNS(f"/proc/{pid}/ns/net")

    def __enter__(self) -> Netlink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close()

    def add_veth(self, name: str, peer: str, pid: int) -> None:
        """FileExistsError when the name is taken, ProcessLookupError when `pid` is gone."""
        self._ask(self._link.link, "add", kind="veth", ifname=name, peer={"ifname": peer, "net_ns_pid": pid})

    def index(self, name: str) -> int:
        found: list[int] = self._link.link_lookup(ifname=name)
        if not found:
            raise FileNotFoundError(2, f"no interface {name}")
        return found[0]

    def raise_link(self, index: int) -> None:
        self._ask(self._link.link, "set", index=index, state="up")

    def add_address(self, index: int, address: str, prefix: int) -> None:
        """Also when it is there already."""
        self._ask(self._link.addr, "replace", index=index, address=address, prefixlen=prefix)

    def remove_address(self, index: int, address: str, prefix: int) -> None:
        self._ask(self._link.addr, "del", index=index, address=address, prefixlen=prefix)

    def set_default_route(self, gateway: str) -> None:
        self._ask(self._link.route, "replace", dst="default", gateway=gateway)

    @staticmethod
    def _ask(request: Callable[..., object], verb: str, **arguments: object) -> None:
        from pyroute2 import NetlinkError

        try:
            request(verb, **arguments)
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from error
