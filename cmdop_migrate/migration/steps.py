"""Run a flow as an ordered list of named steps with undo and a journal.

The journal names a step before the step begins. A failure undoes the steps that
were begun, last first. From the point of no return on nothing is undone; the
command that reads the journal finishes the flow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cmdop_migrate.util.timings import Phases


class Journal(Protocol):
    """Record the steps of a flow on disk."""

    def begin(self, step: str) -> None:
        """Record that a step begins. The record is durable when this returns."""

    def fail(self, step: str, error: BaseException) -> None:
        """Record that a step failed, and that the undo begins. The record is durable when this returns."""


@dataclass(frozen=True)
class Step:
    """Define one step. `undo` is called if `do` has begun, also if it failed half-way: it must find out what there is
    to undo. `is_final` marks the point of no return."""

    name: str
    do: Callable[[], None]
    undo: Callable[[], None] | None = None
    is_final: bool = False


def run(steps: Sequence[Step], journal: Journal, phases: Phases, progress: Callable[[str], None]) -> None:
    """Run all steps. If one fails, undo those that were begun and raise its error. An error of an undo is raised
    instead: the journal then stays as it is, for `resume`."""
    begun: list[Step] = []
    for step in steps:
        journal.begin(step.name)
        phases.reach(f"begin {step.name}")
        begun.append(step)
        progress(step.name)
        try:
            step.do()
        except BaseException as error:
            if any(begun_step.is_final for begun_step in begun):
                raise
            journal.fail(step.name, error)
            phases.reach("undo")
            for begun_step in reversed(begun):
                if begun_step.undo is not None:
                    begun_step.undo()
            raise
