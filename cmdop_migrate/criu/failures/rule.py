"""Define one known failure of CRIU: its pattern in the log, its cause and its fix."""

from __future__ import annotations

import re
from dataclasses import dataclass

SAME_FILES = (
    "Restore with --carry opened (the file then travels with the checkpoint), or make the two hosts' files equal."
)
NEWER = "Run `cmdop-migrate doctor --fix`, which fetches a CRIU that works on this kernel."
VERIFY = "Run `cmdop-migrate checkpoints verify`, and restore again from the store."
CLOSE = "End the program that has it open, or close it there, and try again."


@dataclass(frozen=True)
class Rule:
    """Describe one known failure. `passing`: it usually ends by itself, so that trying again later may help."""

    name: str
    pattern: re.Pattern[str]
    cause: str  # {0}, {1}: the groups of the pattern
    fix: str
    passing: bool = False


def rule(name: str, pattern: str, cause: str, fix: str, passing: bool = False) -> Rule:
    """Return a rule, with its pattern compiled."""
    return Rule(name, re.compile(pattern), cause, fix, passing)
