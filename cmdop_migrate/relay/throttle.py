"""Limit failed attempts per address. Pure; the time is a parameter."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

FAILURES = 10.0
REFILL = 1 / 3  # per second
ADDRESSES = 4096


class Throttle:
    """Keep a token bucket of failures for each address. The table is bounded: addresses that failed least recently
    are dropped first."""

    def __init__(self, failures: float = FAILURES, refill: float = REFILL, addresses: int = ADDRESSES) -> None:
        self._most, self._refill, self._addresses = failures, refill, addresses
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allows(self, address: str, now: float) -> bool:
        """Return whether the address may try again."""
        return self._of(group(address), now) >= 1

    def failed(self, address: str, now: float) -> None:
        """Count a failure of the address."""
        key = group(address)
        self._left[key] = max(0.0, self._of(key, now) - 1), now
        self._left.move_to_end(key)
        while len(self._left) > self._addresses:
            self._left.popitem(last=False)

    def _of(self, key: str, now: float) -> float:
        left, at = self._left.get(key, (self._most, now))
        return min(self._most, left + max(0.0, now - at) * self._refill)


def group(address: str) -> str:
    """Return what counts as one address: for IPv6 the /64, because one customer has all of it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)
