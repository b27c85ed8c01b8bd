"""Test how the suite samples, bounds times and reports (tests/support/sampling.py, patience.py, suite_report.py)."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import patience, sampling, suite_report


def test_sample_depends_on_the_seed_and_the_topic_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sampling.ALL, raising=False)
    monkeypatch.setenv(sampling.SEED, "one")
    cases = list(range(100))
    first = sampling.sample(cases, 10, "topic")
    assert first == sorted(first) == sampling.sample(cases, 10, "topic") and len(first) == 10
    assert first != sampling.sample(cases, 10, "another topic")
    monkeypatch.setenv(sampling.SEED, "two")
    assert first != sampling.sample(cases, 10, "topic")


def test_all_takes_every_case_and_the_default_marks_the_others_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sampling.ALL, raising=False)
    monkeypatch.setenv(sampling.SEED, "one")
    cases = [("a", 1), ("b", 2), ("c", 3)]
    found = sampling.sampled(cases, 1, "topic")
    assert [case.values for case in found] == cases and sum(not case.marks for case in found) == 1
    monkeypatch.setenv(sampling.ALL, "1")
    assert sampling.sample(cases, 1, "topic") == cases
    assert not any(case.marks for case in sampling.sampled(cases, 1, "topic"))


@pytest.mark.parametrize(
    ("marks", "fixtures", "fast", "every", "left_out"),
    [
        ((), (), True, False, False),
        (("heavy",), (), False, False, True),
        (("heavy",), (), False, True, False),
        (("server",), (), True, False, True),
        (("server",), (), False, False, False),
        ((), ("shared_server",), True, False, True),
    ],
)
def test_heavy_tests_need_all_and_fast_leaves_out_servers(
    marks: tuple[str, ...], fixtures: tuple[str, ...], fast: bool, every: bool, left_out: bool
) -> None:
    item: Any = SimpleNamespace(get_closest_marker=lambda name: name in marks, fixturenames=fixtures)
    assert (suite_report.why_left_out(item, fast, every) is not None) is left_out


def test_the_longest_files_exist() -> None:
    assert [name for name in suite_report.LONGEST if not (suite_report.TESTS / name).exists()] == []


def test_report_adds_up_the_phases_of_a_test_and_says_what_was_left_out() -> None:
    reports: Any = [SimpleNamespace(nodeid=f"f.py::test_{n}", duration=n) for n in (1.0, 2.0, 2.0)]
    lines = suite_report.lines(reports, Counter({"too long": 3}))
    assert lines[0].split() == ["4.0", "s", "f.py::test_2.0"] and lines[-1] == "left out: 3 tests, too long"


def test_bounds_grow_with_the_load_and_are_never_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience.bound(2.0) >= 2.0
    monkeypatch.setattr(patience, "busy_factor", lambda: 4.0)
    assert patience.bound(2.0) == 8.0
    deadline = patience.Deadline(0.0)
    assert deadline.is_over() or deadline.is_over()
