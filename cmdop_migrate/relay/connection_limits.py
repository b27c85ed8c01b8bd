"""Before admission: how many strangers may stand at the door, in all and from one address; whose pages may knock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection

from cmdop_migrate.relay.throttle import Throttle, group

STRANGERS = 512
STRANGERS_PER_ADDRESS = 64


class Door:
    """Counts connections from the moment TLS is up until they are gone. Whoever is too many is cut off at once."""

    def __init__(self, connections: int, strangers: int = STRANGERS, per_address: int = STRANGERS_PER_ADDRESS) -> None:
        self.throttle = Throttle()
        self.count = 0
        self._most, self._strangers_most, self._per_address = connections, strangers, per_address
        self._strangers: dict[ServerConnection, str] = {}
        self._by_address: Counter[str] = Counter()

    def connection_type(self, turned_away: Callable[[str, str, str], None]) -> type[ServerConnection]:
        """What the server makes its connections of. `turned_away` hears (address, code, why)."""
        door = self

        class Guarded(ServerConnection):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                peer = transport.get_extra_info("peername")
                address = str(peer[0]) if isinstance(peer, tuple) else "unknown"
                full = door.arrived(self, address)
                if full:
                    turned_away(address, "full", full)
                    cast(asyncio.Transport, transport).abort()

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                address = door.gone(self)
                if address is not None and self.response is None:
                    turned_away(address, "handshake", "no request that makes sense")

        return Guarded

    def arrived(self, connection: ServerConnection, address: str) -> str:
        """Why it cannot stay; empty when it can."""
        self.count += 1
        key = group(address)
        full = ""
        if self.count > self._most:
            full = f"more than {self._most} connections"
        elif len(self._strangers) >= self._strangers_most:
            full = f"more than {self._strangers_most} that did not say who they are"
        elif self._by_address[key] >= self._per_address:
            full = f"more than {self._per_address} from one address that did not say who they are"
        if not full:
            self._strangers[connection] = key
            self._by_address[key] += 1
        return full

    def admitted(self, connection: ServerConnection) -> None:
        key = self._strangers.pop(connection, None)
        if key is not None:
            self._by_address[key] -= 1
            if not self._by_address[key]:
                del self._by_address[key]

    def gone(self, connection: ServerConnection) -> str | None:
        """The address of one that left before it was admitted."""
        self.count -= 1
        key = self._strangers.get(connection)
        self.admitted(connection)
        return key


def origin_allowed(origins: Sequence[str], host: str | None, allowed: Sequence[str]) -> bool:
    """Browsers say which page they come from: it must be our own, or one that was named. Others say nothing."""
    if not origins:
        return True
    if len(origins) != 1:
        return False
    return origins[0] in allowed or (host is not None and urlsplit(origins[0]).netloc.lower() == host.lower())
