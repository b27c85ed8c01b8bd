"""Define the findings of a plan, and the rules that make them. Without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

Level = Literal["block", "warn", "info"]
LEVELS: tuple[Level, ...] = ("block", "warn", "info")
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """Describe one problem of a move. `block`: the move would fail, or do harm. `passing`: the problem is likely to end
    by itself soon."""

    check: str
    level: Level
    message: str
    fix: str
    passing: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a value that can be encoded as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Hit:
    """Describe one hit of a rule. Without its own fix, the rule's fix is used."""

    level: Level
    message: str
    fix: str = ""
    passing: bool = False


@dataclass(frozen=True)
class Rule(Generic[T]):
    """Describe one check. `about`: what it examines; `levels`: those it may return; the plan page lists all."""

    name: str
    levels: tuple[Level, ...]
    about: str
    fix: str
    find: Callable[[T], Iterable[Hit]]

    def run(self, facts: T) -> Iterator[Finding]:
        """Yield the findings of this rule."""
        for hit in self.find(facts):
            if hit.level not in self.levels:
                raise AssertionError(
                    f"rule {self.name} returns {hit.level}, which docs/operations/plan.md does not list"
                )
            yield Finding(self.name, hit.level, hit.message, hit.fix or self.fix, hit.passing)


def several(names: Iterable[str], most: int = 5) -> str:
    """Return `a, b and 7 more`, so that messages stay readable."""
    listed = list(dict.fromkeys(names))
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
