"""The relay's figures, in Prometheus' text form, and how many lines a flood may write."""

from __future__ import annotations

from collections import Counter

NAMES = {
    "hosts": ("gauge", "Hosts connected."),
    "clients": ("gauge", "Clients connected."),
    "connections": ("gauge", "Connections, admitted or not yet."),
    "routes": ("gauge", "Sessions that can be reached."),
    "channels": ("gauge", "Channels between clients and sessions."),
    "waiting": ("gauge", "Channels whose session cannot be reached just now."),
    "queued_bytes": ("gauge", "Bytes under way to connections that do not take them."),
    "frames_total": ("counter", "Frames received."),
    "bytes_total": ("counter", "Bytes of frames received."),
    "admitted_total": ("counter", "Connections admitted."),
    "asked_total": ("counter", "Questions to the lease store."),
    "silent_total": ("counter", "Questions that the lease store did not answer."),
}


class Figures:
    """Every figure is there from the start; refusals by their reason."""

    def __init__(self) -> None:
        self._values: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        self._refused: Counter[str] = Counter()

    def add(self, name: str, count: float = 1) -> None:
        self._values[name] += count

    def set(self, name: str, value: float) -> None:
        self._values[name] = value

    def refused(self, code: str) -> None:
        self._refused[code] += 1

    def text(self) -> str:
        lines = []
        for name, value in self._values.items():
            kind, words = NAMES[name]
            full = f"cmdop_migrate_relay_{name}"
            lines += [f"# HELP {full} {words}", f"# TYPE {full} {kind}", f"{full} {value:.10g}"]
        full = "cmdop_migrate_relay_refused_total"
        lines += [f"# HELP {full} What was refused, by reason.", f"# TYPE {full} counter"]
        lines += [f'{full}{{code="{code}"}} {count}' for code, count in sorted(self._refused.items())]
        return "\n".join(lines) + "\n"


class LineBudget:
    """At most `most` lines a second; what is over is counted, and said with the next that passes."""

    def __init__(self, most: int = 20) -> None:
        self._most = most
        self._second = 0
        self._used = 0
        self._passed_over = 0

    def take(self, now: float) -> int | None:
        """How many were passed over since the last line that was written; None: this one is passed over too."""
        if int(now) != self._second:
            self._second, self._used = int(now), 0
        if self._used >= self._most:
            self._passed_over += 1
            return None
        self._used += 1
        count, self._passed_over = self._passed_over, 0
        return count
