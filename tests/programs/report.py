"""Write docs/reference/compatibility.md from what the runs of tests/programs found.

    python -m tests.programs.report         (scripts/compatibility runs the tests first)

Results of the runs on this machine (.cache/program-results) replace those in tests/programs/results.json, which is
committed; so a run of one program changes one row.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.programs.results import OK, RESULTS, STAGES, Result
from tests.programs.scenario import REGISTERED, Scenario

HERE = Path(__file__).resolve().parent
KEPT = HERE / "results.json"
PAGE = HERE.parents[1] / "docs" / "reference" / "compatibility.md"
MOVES, REFUSED, NOT_PARKED, BROKEN, LATER, LOST, NOT_RUN = (
    "moves",
    "refused, runs on",
    "not parked, runs on",
    "comes back broken",
    "moves in part",
    "**lost**",
    "not run yet",
)
INTRODUCTION = """<!-- Written by scripts/compatibility from what tests/programs found. Run it again instead of editing. -->

# Programs, and whether they move

Each program is brought into a state worth keeping and taken through `plan`, a park, a restore, new work, a second park
and restore, `checkpoint --leave-running`, and a fork in which both branches work on. The scenarios are in
`tests/programs/`; `scripts/compatibility` runs them and writes this page, `scripts/compatibility -k less` one of them.

| verdict | means |
|---|---|
| moves | every stage passed |
| refused, runs on | `plan` and `checkpoint` refuse it before it is frozen (exit 4) and name the reason; the program does not notice |
| not parked, runs on | `plan` said that it can move, the checkpoint failed; the program does not notice |
| moves in part | it is parked and restored; a later stage failed |
| comes back broken | it is restored, but does not work as before |
| **lost** | it was parked and could not be restored, or ended when a checkpoint failed |
"""


def scenarios() -> list[Scenario]:
    """Return every scenario of tests/programs, in the order of the files."""
    for path in sorted(HERE.glob("test_*.py")):
        importlib.import_module(f"tests.programs.{path.stem}")
    return list(REGISTERED)


def verdict(result: Result) -> str:
    failed = [stage for stage in STAGES if result.stages.get(stage, OK) != OK]
    if not failed:
        return MOVES if set(STAGES) <= set(result.stages) else NOT_RUN
    if result.failure in ("NeverBack", "Ended"):
        return LOST
    if result.failure == "Refused":
        return REFUSED
    if failed[0] == "park":
        return NOT_PARKED
    if failed[0] == "restore":
        return BROKEN
    return NOT_RUN if failed[0] == "start" else LATER


def remark(result: Result, scenario: Scenario) -> str:
    """Say what a user should do, or what failed and whether its mending is planned."""
    failed = next((stage for stage in STAGES if result.stages.get(stage, OK) != OK), None)
    parts = []
    if failed is not None:
        cause = result.stages[failed].removeprefix("blocked: ")
        parts.append(f"{failed}: " + re.sub(r" \(pid \d+\)| in session 'p'|(?<=session) 'p'", "", cause).rstrip(":"))
        if scenario.expected:
            parts.append("known, to be mended")
    if scenario.advice:
        parts.append(scenario.advice)
    return "; ".join(parts).replace("|", "\\|")


def page(results: Mapping[str, Result], every: Iterable[Scenario]) -> str:
    lines = [INTRODUCTION]
    counts: dict[str, int] = {}
    families: dict[str, list[str]] = {}
    for one in every:
        result = results.get(one.title)
        said = verdict(result) if result else NOT_RUN
        counts[said] = counts.get(said, 0) + 1
        version = result.version if result else ""
        row = f"| {one.title} | {version} | {said} | {remark(result, one) if result else ''} |"
        families.setdefault(one.family, []).append(row)
    total = ", ".join(f"{count} {said}" for said, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    dates = sorted({result.date for result in results.values()})
    kernels = ", ".join(sorted({result.kernel for result in results.values()}))
    if dates:
        lines.append(f"{sum(counts.values())} programs: {total}. Run {dates[0]} to {dates[-1]}, kernel {kernels}.\n")
    for family, rows in families.items():
        lines += [f"## {family}\n", "| program | version | verdict | what to do, or what failed |", "|---|---|---|---|"]
        lines += [*rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def load() -> dict[str, Result]:
    """Read the committed results."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else []
    return {one["name"]: Result(**one) for one in kept}


def merge(every: list[Scenario]) -> dict[str, Result]:
    """Replace committed results by those of this machine, and drop scenarios that are gone."""
    results = load()
    for path in sorted(RESULTS.glob("*.json")):
        new = Result(**json.loads(path.read_text()))
        results[new.name] = new
    return {one.title: results[one.title] for one in every if one.title in results}


def main() -> None:
    every = scenarios()
    results = merge(every)
    KEPT.write_text(json.dumps([dataclasses.asdict(one) for one in results.values()], indent=1) + "\n")
    PAGE.write_text(page(results, every))


if __name__ == "__main__":
    main()
