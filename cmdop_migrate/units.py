"""Parse and format durations (`90s`, `5m`, `24h`) and sizes (`64MiB`)."""

from __future__ import annotations

import re

from cmdop_migrate.errors import Usage

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
LONGEST = 100 * 365 * 86400.0  # longer means forever; 64 bits of nanoseconds hold 292 years
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def duration(text: str) -> float:
    """Return seconds: `90s` -> 90.0. A bare number is seconds; more than LONGEST becomes LONGEST. Raise Usage."""
    match = _NUMBER.fullmatch(text.strip())
    unit = (match[2] or "s") if match else ""
    if match is None or unit not in _SECONDS:
        raise Usage(f"not a duration: {text!r}", "Write it like 90s, 5m or 24h.")
    return min(LONGEST, float(match[1]) * _SECONDS[unit])


def size(text: str) -> int:
    """Return bytes: `64MiB` -> 67108864. A bare number is bytes. Raise Usage."""
    match = _NUMBER.fullmatch(text.strip())
    unit = (match[2] or "B") if match else ""
    if match is None or unit not in _BYTES or float(match[1]) * _BYTES[unit] >= 1 << 63:
        raise Usage(f"not a size: {text!r}", "Write it like 512KiB, 64MiB or 2GiB.")
    return int(float(match[1]) * _BYTES[unit])


def exact_duration(seconds: float) -> str:
    """Format a duration for programs, without an exponent: `duration` reads exactly the same value back."""
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def show_duration(seconds: float) -> str:
    """Format a duration for people: `12s`, `3m05s`, `2h07m`, `4d03h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def show_size(count: int) -> str:
    """Format a size for people: `17 B`, `3.2 MiB`."""
    value = float(count)
    for unit in _BYTES:
        if value < 1024 or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
