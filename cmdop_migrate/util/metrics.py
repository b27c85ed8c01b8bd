"""The agent's figures, in Prometheus' text form."""

from __future__ import annotations

from pathlib import Path

NAMES = {
    "sessions": ("gauge", "Live sessions of this host."),
    "sessions_unsure": ("gauge", "Live sessions whose lease could not be renewed at the last try."),
    "holders_silent": ("gauge", "Holders that did not take the agent's last word."),
    "idle_seconds_max": ("gauge", "How long the session that nobody has used for the longest has been idle."),
    "renew_seconds": ("gauge", "How long the last round of renewals took."),
    "renewals_total": ("counter", "Leases renewed."),
    "renewal_failures_total": ("counter", "Renewals that were not answered, or not with a lease."),
    "superseded_total": ("counter", "Incarnations killed because another took over."),
    "host_name_held": ("gauge", "Whether this installation holds its host name."),
    "round_failures_total": ("counter", "Rounds of the agent that ended in an error."),
}


class Metrics:
    """Written whole to a file a collector reads; every figure is there from the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, float] = dict.fromkeys(NAMES, 0.0)

    def add(self, name: str, count: float = 1) -> None:
        self._values[name] += count

    def set(self, name: str, value: float) -> None:
        if name not in NAMES:
            raise KeyError(name)
        self._values[name] = value

    def write(self) -> None:
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
        """A collector must not read figures of an agent that is gone."""
        self._path.unlink(missing_ok=True)
