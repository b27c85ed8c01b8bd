"""Estimate the progress of a flow of several stages, and its remaining time, from the expected time of each stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cmdop_migrate import clock

STAGE_LIMIT = 0.95  # of a stage that takes longer than expected


@dataclass(frozen=True)
class Report:
    """Hold the progress of a flow: its stage, the current step in words, the fraction done from 0 to 1, seconds
    left."""

    stage: str
    words: str
    done: float
    eta_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "phase": self.words,
            "done": round(self.done, 3),
            "eta_s": round(self.eta_s, 1),
        }


class Meter:
    """Report progress through `show`. `expected` has the seconds of each stage, in order; `expect` corrects them."""

    def __init__(self, expected: Mapping[str, float], show: Callable[[Report], None]) -> None:
        self._expected, self._show = dict(expected), show
        self._stage = next(iter(self._expected))
        self._began = clock.boottime()

    def expect(self, **seconds: float) -> None:
        """Correct the expected seconds of stages, when better estimates are known."""
        self._expected.update({name: max(0.01, value) for name, value in seconds.items() if name in self._expected})

    def stage(self, name: str) -> None:
        """Begin a stage, and report it."""
        self._stage, self._began = name, clock.boottime()
        self.say(name)

    def say(self, words: str) -> None:
        """Report what is being done in the current stage."""
        self._show(progress(self._expected, self._stage, clock.boottime() - self._began, words))


def progress(expected: Mapping[str, float], stage: str, spent: float, words: str) -> Report:
    """Return the progress after `spent` seconds of a stage. A stage that takes longer than expected stays almost done.
    Pure."""
    names = list(expected)
    at = names.index(stage)
    own = expected[stage]
    before, after = (sum(expected[name] for name in part) for part in (names[:at], names[at + 1 :]))
    within = min(spent, own * STAGE_LIMIT)
    total = before + own + after
    return Report(stage, words, (before + within) / total, own - within + after)
