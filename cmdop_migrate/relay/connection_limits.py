"""Limit connections before admission: in all and per address, and by the origins of web pages that may connect."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection

from cmdop_migrate.relay.throttle import Throttle, group

UNADMITTED = 512
UNADMITTED_PER_ADDRESS = 64


class ConnectionLimiter:
    """Count connections from the end of the TLS handshake until they are gone, and abort those over the limits."""

    def __init__(
        self, connections: int, unadmitted: int = UNADMITTED, per_address: int = UNADMITTED_PER_ADDRESS
    ) -> None:
        self.throttle = Throttle()
        self.count = 0
        self._most, self._unadmitted_most, self._per_address = connections, unadmitted, per_address
        self._unadmitted: dict[ServerConnection, str] = {}
        self._by_address: Counter[str] = Counter()

    def connection_type(self, on_refused: Callable[[str, str, str], None]) -> type[ServerConnection]:
        """Return the class of which the server makes its connections. `on_refused` gets (address, code, why)."""
        limiter = self

        class Guarded(ServerConnection):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                peer = transport.get_extra_info("peername")
                address = str(peer[0]) if isinstance(peer, tuple) else "unknown"
                full = limiter.arrived(self, address)
                if full:
                    on_refused(address, "full", full)
                    cast(asyncio.Transport, transport).abort()

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                address = limiter.gone(self)
                if address is not None and self.response is None:
                    on_refused(address, "handshake", "no valid HTTP request")

        return Guarded

    def arrived(self, connection: ServerConnection, address: str) -> str:
        """Count a new connection, and return why it exceeds a limit; empty if it does not."""
        self.count += 1
        key = group(address)
        full = ""
        if self.count > self._most:
            full = f"more than {self._most} connections"
        elif len(self._unadmitted) >= self._unadmitted_most:
            full = f"more than {self._unadmitted_most} that are not admitted"
        elif self._by_address[key] >= self._per_address:
            full = f"more than {self._per_address} from one address that are not admitted"
        if not full:
            self._unadmitted[connection] = key
            self._by_address[key] += 1
        return full

    def admitted(self, connection: ServerConnection) -> None:
        """Count a connection as admitted."""
        key = self._unadmitted.pop(connection, None)
        if key is not None:
            self._by_address[key] -= 1
            if not self._by_address[key]:
                del self._by_address[key]

    def gone(self, connection: ServerConnection) -> str | None:
        """Count a connection out, and return its address if it was not admitted."""
        self.count -= 1
        key = self._unadmitted.get(connection)
        self.admitted(connection)
        return key


def origin_allowed(origins: Sequence[str], host: str | None, allowed: Sequence[str]) -> bool:
    """Return whether a page of these origins may connect: the relay's own, or one that was configured. Clients that are
    not browsers send no origin."""
    if not origins:
        return True
    if len(origins) != 1:
        return False
    return origins[0] in allowed or (host is not None and urlsplit(origins[0]).netloc.lower() == host.lower())
