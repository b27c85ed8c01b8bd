"""Choose the tests of a run, and report at its end which tests took longest and which were left out, and why.

tests/conftest.py calls these functions from pytest's hooks. With xdist each worker selects for itself, so a worker
hands the counts of what it left out to the controller, which prints the report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SLOWEST = 10
# Fixtures of tests/contract that start a server for the tests that ask for them.
SERVER_FIXTURES = {"shared_server", "own_server", "etcd_one", "etcd_three"}
LEFT_OUT = pytest.StashKey[Counter[str]]()

# One worker runs all tests of a file, so the longest files have to begin first: a long file that begins last leaves
# the other workers idle. The order is by what the files took; the end of a run shows it.
LONGEST = (
    "crash/test_migrate_killed.py",
    "lab/test_lab_fence.py",
    "crash/test_checkpoint_killed.py",
    "integration/test_fence_steps.py",
    "integration/test_plan_truth.py",
    "lab/test_lab.py",
    "lab/test_drain_lab.py",
    "integration/test_checkpoint_damage.py",
    "crash/test_restore_killed.py",
    "lab/test_lab_relay.py",
    "integration/test_session_clients.py",
    "integration/test_session_bad_input.py",
    "integration/test_ready.py",
    "lab/test_lab_migrate.py",
    "integration/test_lease_history.py",
    "integration/test_session_terminal.py",
)
# The levels of the remaining files, longest first.
LEVELS = ("lab", "crash", "random_programs", "modes", "integration", "contract")


def why_left_out(item: pytest.Item, fast: bool, every: bool) -> str | None:
    """Return why this run leaves `item` out, or None if it runs."""
    if not every and item.get_closest_marker("heavy"):
        return "marked heavy: run by ./scripts/test --all"
    names = set(getattr(item, "fixturenames", ()))
    if fast and (item.get_closest_marker("server") or names & SERVER_FIXTURES):
        return "start a server: not with --fast"
    return None


def place(item: pytest.Item) -> int:
    """Return the sort key that puts the longest files first, then the levels by length."""
    path = item.path.relative_to(TESTS).as_posix()
    if path in LONGEST:
        return LONGEST.index(path)
    level = path.split("/")[0]
    return len(LONGEST) + (LEVELS.index(level) if level in LEVELS else len(LEVELS))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this run leaves out, count it by reason, and put the longest files first."""
    reasons = [why_left_out(item, config.getoption("--fast"), config.getoption("--all")) for item in items]
    config.stash[LEFT_OUT] = Counter(reason for reason in reasons if reason)
    config.hook.pytest_deselected(items=[item for item, reason in zip(items, reasons, strict=True) if reason])
    items[:] = [item for item, reason in zip(items, reasons, strict=True) if reason is None]
    items.sort(key=place)


def lines(reports: Iterable[pytest.TestReport], left_out: Counter[str]) -> list[str]:
    """Return the report: the slowest tests and files, with set-up and clearing up, and what was left out and why."""
    tests: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for report in reports:
        tests[report.nodeid] += report.duration
        files[report.nodeid.split("::")[0]] += report.duration
    found = [*_slowest(tests), "the slowest files:", *_slowest(files)]
    return found + [f"left out: {count} tests, {reason}" for reason, count in left_out.items()]


def _slowest(seconds: dict[str, float]) -> list[str]:
    ranked = sorted(seconds.items(), key=lambda pair: pair[1], reverse=True)
    return [f"{taken:8.1f} s  {name}" for name, taken in ranked[:SLOWEST]]
