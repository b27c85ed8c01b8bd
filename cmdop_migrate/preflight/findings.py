"""What a plan says: findings, and the rules that make them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

Level = Literal["block", "warn", "info"]
LEVELS: tuple[Level, ...] = ("block", "warn", "info")
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One thing to know before a session is moved. `block`: the move would fail, or would harm. `passing`: it is
    likely to be gone in a moment by itself."""

    check: str
    level: Level
    message: str
    fix: str
    passing: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Said:
    """What a rule found. Without a fix of its own, the rule's."""

    level: Level
    message: str
    fix: str = ""
    passing: bool = False


@dataclass(frozen=True)
class Rule(Generic[T]):
    """One check. `about`: what is looked at; `levels`: those it may answer with; docs/operations/plan.md lists all."""

    name: str
    levels: tuple[Level, ...]
    about: str
    fix: str
    find: Callable[[T], Iterable[Said]]

    def run(self, facts: T) -> Iterator[Finding]:
        for said in self.find(facts):
            if said.level not in self.levels:
                raise AssertionError(f"rule {self.name} says {said.level}, which docs/operations/plan.md does not know")
            yield Finding(self.name, said.level, said.message, said.fix or self.fix, said.passing)


def several(names: Iterable[str], most: int = 5) -> str:
    """`a, b and 7 more`: a message stays one that can be read."""
    listed = list(dict.fromkeys(names))
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
