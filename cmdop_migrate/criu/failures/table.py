"""Join the tables of known failures, which `diagnosis` reads.

Order matters: of two rules that fit one line, the first counts.
"""

from __future__ import annotations

from cmdop_migrate.criu.failures.dump_rules import DUMP_RULES
from cmdop_migrate.criu.failures.restore_rules import RESTORE_RULES
from cmdop_migrate.criu.failures.rule import Rule

RULES: tuple[Rule, ...] = (*DUMP_RULES, *RESTORE_RULES)
