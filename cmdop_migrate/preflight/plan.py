"""Whether a session can move from one host to another. Pure: facts in, findings out, one function for each check."""

from __future__ import annotations

from dataclasses import dataclass

from cmdop_migrate.preflight.findings import LEVELS, Finding, Level
from cmdop_migrate.preflight.move import Move
from cmdop_migrate.preflight.rules import dump, machine, services, session

RULES = (*services.RULES, *machine.RULES, *session.RULES)


@dataclass(frozen=True)
class About:
    """One check, as docs/operations/plan.md tells it."""

    name: str
    levels: tuple[Level, ...]
    about: str
    fix: str


def find(move: Move) -> list[Finding]:
    """Every finding, worst first."""
    found = [*dump.find(move.session.tree), *(one for rule in RULES for one in rule.run(move))]
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def checks() -> list[About]:
    """All of them, in the order they are made."""
    of_the_dump = [About(one.name, one.levels, one.about, one.fix) for one in dump.RULES]
    return of_the_dump + [About(one.name, one.levels, one.about, one.fix) for one in RULES]
