"""Write the agent's metrics in the text format of Prometheus."""

from __future__ import annotations

from pathlib import Path

NAMES = {
    "sessions": ("gauge", "Live sessions of this host."),
    "sessions_unsure": ("gauge", "Live sessions whose lease could not be renewed at the last try."),
    "holders_silent": ("gauge", "Holders that did not acknowledge the last message of the agent."),
    "idle_seconds_max": ("gauge", "Idle time of the session that has been idle longest."),
    "renew_seconds": ("gauge", "Duration of the last round of renewals."),
    "renewals_total": ("counter", "Leases renewed."),
    "renewal_failures_total": ("counter", "Renewals without an answer, or without a lease in it."),
    "superseded_total": ("counter", "Incarnations killed because a newer one holds the lease."),
    "host_name_held": ("gauge", "Whether this installation holds its host name."),
    "round_failures_total": ("counter", "Rounds of the agent that ended in an error."),
}


class Metrics:
    """Hold the metrics and write them as a whole to a file that a collector reads. Every metric is there from the
    start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, float] = dict.fromkeys(NAMES, 0.0)

    def add(self, name: str, count: float = 1) -> None:
        self._values[name] += count

    def set(self, name: str, value: float) -> None:
        """Set a metric. Raise KeyError for a name that is not in NAMES."""
        if name not in NAMES:
            raise KeyError(name)
        self._values[name] = value

    def write(self) -> None:
        """Replace the file. Raise OSError."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(self.text(), encoding="ascii")
        temporary.replace(self._path)

    def text(self) -> str:
        lines = []
        for name, value in self._values.items():
            kind, words = NAMES[name]
            full = f"cmdop_migrate_{name}"
            lines += [f"# HELP {full} {words}", f"# TYPE {full} {kind}", f"{full} {value:g}"]
        return "\n".join(lines) + "\n"

    def remove(self) -> None:
        """Remove the file: a collector must not read metrics of an agent that has exited."""
        self._path.unlink(missing_ok=True)
