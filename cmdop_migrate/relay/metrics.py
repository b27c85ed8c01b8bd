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
    """At most `most` lines a second of each kind; what is over is counted, and said with the next that passes."""

    def __init__(self, most: int = 10) -> None:
        self._most = most
        self._second = 0
        self._used: Counter[str] = Counter()
        self._passed_over: Counter[str] = Counter()

    def take(self, kind: str, now: float) -> int | None:
        """How many of this kind were passed over since the last line of it; None: this one is passed over too."""
        if int(now) != self._second:
            self._second = int(now)
            self._used.clear()
        if self._used[kind] >= self._most:
            self._passed_over[kind] += 1
            return None
        self._used[kind] += 1
        return self._passed_over.pop(kind, 0)
