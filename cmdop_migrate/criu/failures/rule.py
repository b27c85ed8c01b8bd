"""One known failure of CRIU: how its log words it, what it means, what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass

SAME_FILES = (
    "Restore with --carry opened (the file then travels with the checkpoint), or make the two hosts' files equal."
)
NEWER = "Run `cmdop-migrate doctor --fix`, which fetches a CRIU that works on this kernel."
VERIFY = "Run `cmdop-migrate checkpoints verify`, and restore again from the store."
CLOSE = "End the program that has it open, or let it close it, and try again."


@dataclass(frozen=True)
class Rule:
    """`passing`: it usually goes away by itself, so to try again in a moment may help."""

    name: str
    pattern: re.Pattern[str]
    cause: str  # {0}, {1}: what the pattern's groups caught
    fix: str
    passing: bool = False


def rule(name: str, pattern: str, cause: str, fix: str, passing: bool = False) -> Rule:
    """Make a rule from the pattern's text."""
    return Rule(name, re.compile(pattern), cause, fix, passing)
