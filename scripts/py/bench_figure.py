"""One measured number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`bar` is what was promised, for a quiet machine; None where nothing was."""

    name: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.bar is None else self.value <= self.bar

    def row(self) -> tuple[str, str, str, str]:
        bar = "" if self.bar is None else f"<= {self.bar:g} {self.unit}"
        return self.name, f"{self.value:.2f} {self.unit}", bar, {None: "", True: "ok", False: "MISSED"}[self.holds]


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
