"""How far a flow of several stages is, and how long it will still take, from what its stages are expected to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cmdop_migrate import clock

MOST = 0.95  # of a stage, while it lasts longer than it was expected to


@dataclass(frozen=True)
class Report:
    """`stage` is of the flow, `words` what is done in it right now; `done` from 0 to 1."""

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
    """`expected`: the seconds of each stage, in order; better figures may come later (`expect`)."""

    def __init__(self, expected: Mapping[str, float], show: Callable[[Report], None]) -> None:
        self._expected, self._show = dict(expected), show
        self._stage = next(iter(self._expected))
        self._began = clock.boottime()

    def expect(self, **seconds: float) -> None:
        self._expected.update({name: max(0.01, value) for name, value in seconds.items() if name in self._expected})

    def stage(self, name: str) -> None:
        """It begins."""
        self._stage, self._began = name, clock.boottime()
        self.say(name)

    def say(self, words: str) -> None:
        self._show(progress(self._expected, self._stage, clock.boottime() - self._began, words))


def progress(expected: Mapping[str, float], stage: str, spent: float, words: str) -> Report:
    """Pure. A stage that takes longer than expected stands at almost done."""
    names = list(expected)
    at = names.index(stage)
    own = expected[stage]
    before, after = (sum(expected[name] for name in part) for part in (names[:at], names[at + 1 :]))
    within = min(spent, own * MOST)
    total = before + own + after
    return Report(stage, words, (before + within) / total, own - within + after)
