"""Do, undo, journal: a flow as an ordered list of named steps.

What is about to be done is on disk before it is done. A failure undoes what was
begun, last first; from the point of no return on nothing is undone, and whoever
reads the journal goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cmdop_migrate.util.timings import Phases


class Journal(Protocol):
    def begin(self, step: str) -> None:
        """Durable when this returns."""

    def fail(self, step: str, error: BaseException) -> None:
        """The step failed, and what was begun is about to be undone. Durable when this returns."""


@dataclass(frozen=True)
class Step:
    """`undo` is called once `do` has begun, also when it failed half-way: it must find out what there is to undo.
    `is_final`: from here on there is no way back."""

    name: str
    do: Callable[[], None]
    undo: Callable[[], None] | None = None
    is_final: bool = False


def run(steps: Sequence[Step], journal: Journal, phases: Phases, progress: Callable[[str], None]) -> None:
    """All of them; or the error of the one that failed, with the others undone. What fails while undoing is raised
    instead: the journal then stays as it is, for whoever resumes."""
    begun: list[Step] = []
    for step in steps:
        journal.begin(step.name)
        phases.reach(f"begin {step.name}")
        begun.append(step)
        progress(step.name)
        try:
            step.do()
        except BaseException as error:
            if any(one.is_final for one in begun):
                raise
            journal.fail(step.name, error)
            phases.reach("undo")
            for one in reversed(begun):
                if one.undo is not None:
                    one.undo()
            raise
