"""Find out whether a session can move from one host to another, without side effects: facts in, findings out."""

from __future__ import annotations

from dataclasses import dataclass

from cmdop_migrate.preflight.facts.session import Move
from cmdop_migrate.preflight.findings import LEVELS, Finding, Level
from cmdop_migrate.preflight.rules import dump, machine, services, session

RULES = (*services.RULES, *machine.RULES, *session.RULES)


@dataclass(frozen=True)
class CheckDescription:
    """Describe one check, for docs/operations/plan.md."""

    name: str
    levels: tuple[Level, ...]
    about: str
    fix: str


def find(move: Move) -> list[Finding]:
    """Return every finding, worst first."""
    findings = [*dump.find(move.session.tree), *(finding for rule in RULES for finding in rule.run(move))]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def checks() -> list[CheckDescription]:
    """Return the descriptions of all checks, in their order."""
    described = [CheckDescription(rule.name, rule.levels, rule.about, rule.fix) for rule in dump.RULES]
    return described + [CheckDescription(rule.name, rule.levels, rule.about, rule.fix) for rule in RULES]
