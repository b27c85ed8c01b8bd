"""What a migration is made of, without one: steps, journal, meter, page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate.cli import report
from cmdop_migrate.errors import Blocked, NotFound, Usage
from cmdop_migrate.host.move_journal import End, Moves
from cmdop_migrate.migration import steps
from cmdop_migrate.util import progress
from cmdop_migrate.util.timings import Phases


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, step: str) -> None:
        self.lines.append(f"begin {step}")

    def fail(self, step: str, error: BaseException) -> None:
        self.lines.append(f"fail {step}")

    def step(self, name: str, fails: BaseException | None = None, **options: Any) -> steps.Step:
        def do() -> None:
            self.lines.append(f"do {name}")
            if fails is not None:
                raise fails

        return steps.Step(name, do, lambda: self.lines.append(f"undo {name}"), **options)

    def run(self, *sequence: steps.Step) -> None:
        steps.run(sequence, self, Phases("test"), lambda name: None)


def test_each_step_is_journaled_before_it_begins() -> None:
    notes = Notes()
    notes.run(notes.step("a"), notes.step("b"))
    assert notes.lines == ["begin a", "do a", "begin b", "do b"]


@pytest.mark.parametrize("error", [Blocked("no"), KeyboardInterrupt()])
def test_begun_steps_are_undone_last_first(error: BaseException) -> None:
    notes = Notes()
    with pytest.raises(type(error)):
        notes.run(notes.step("a"), notes.step("b", error), notes.step("c"))
    assert notes.lines == ["begin a", "do a", "begin b", "do b", "fail b", "undo b", "undo a"]


def test_nothing_is_undone_after_the_point_of_no_return() -> None:
    notes = Notes()
    with pytest.raises(Blocked):
        notes.run(notes.step("a"), notes.step("b", is_final=True), notes.step("c", Blocked("no")))
    assert notes.lines == ["begin a", "do a", "begin b", "do b", "begin c", "do c"]


def test_error_of_a_failed_undo_is_raised() -> None:
    def undo() -> None:
        raise Usage("cannot")

    notes = Notes()
    with pytest.raises(Usage, match="cannot"):
        notes.run(steps.Step("a", lambda: None, undo), notes.step("b", Blocked("no")))


def test_journal_is_kept_until_its_end_was_reported(tmp_path: Path) -> None:
    moves = Moves(tmp_path, keep=0.0)
    one = moves.begin("s1", "work", "host-a", "host-b", 3)
    two = moves.begin("s2", "other", "host-a", "host-b", 1)
    assert [move.id for move in moves.open()] == [one.id, two.id]
    assert moves.find("work") == moves.find(one.id[:8]) == one
    assert moves.end(one, End.ON_TARGET, told=False) == moves.find(one.id)
    moves.forget_old()
    assert moves.find(one.id).end is End.ON_TARGET
    moves.end(one, End.ON_TARGET, told=True)
    moves.forget_old()
    with pytest.raises(NotFound):
        moves.find(one.id)
    (tmp_path / "migrations" / "odd.json").write_text('{"version": 1}')
    assert moves.open() == [two]


def test_one_move_of_a_session_at_a_time(tmp_path: Path) -> None:
    moves = Moves(tmp_path, keep=0.0)
    with moves.alone("s1", "work"), moves.alone("s2", "other"), moves.lock("s1") as free:
        assert not free
        with pytest.raises(Blocked, match="being moved already"), moves.alone("s1", "work"):
            pass
    with moves.lock("s1") as free:
        assert free


@pytest.mark.parametrize(
    ("stage", "spent", "done", "left"),
    [("a", 0.0, 0.0, 10.0), ("a", 1.0, 0.1, 9.0), ("b", 4.0, 0.6, 4.0), ("b", 99.0, 0.96, 0.4), ("a", 99.0, 0.19, 8.1)],
)
def test_progress(stage: str, spent: float, done: float, left: float) -> None:
    found = progress.progress({"a": 2.0, "b": 8.0}, stage, spent, "at it")
    assert (round(found.done, 2), round(found.eta_s, 2), found.words) == (done, left, "at it")


def test_meter_never_shows_more_than_everything() -> None:
    shown: list[progress.Report] = []
    made = progress.Meter({"a": 1.0, "b": 1.0}, shown.append)
    made.stage("a")
    made.expect(b=30.0, unknown=5.0)
    made.stage("b")
    assert all(0 <= one.done <= 1 and one.eta_s >= 0 for one in shown)
    assert shown[-1].eta_s == pytest.approx(30.0, abs=0.5)


FACTS: dict[str, Any] = {
    "session": "0" * 24, "name": "<work>", "from": "host-a", "to": "host-b", "token": 2, "checkpoint": "c" * 32,
    "frozen_s": 0.5, "downtime_s": 0.6, "downtime": {"from": "last output", "until": "first output"}, "took_s": 4.0,
    "phases": {"plan": 1.0, "pre_ship_1": 0.4, "freeze": 0.01, "dump": 0.2, "there": 0.5, "forget": 0.01, "there.restore": 0.3},
    "bytes": {"memory": 1 << 20, "files": 0, "new": 4096, "stored": 4096}, "closed_connections": [],
}  # fmt: skip


def test_report_page_is_self_contained_and_shows_every_phase() -> None:
    text = report.page(FACTS)
    assert "<work>" not in text and "&lt;work&gt;" in text
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    assert text.count("<rect") == len(FACTS["phases"]) - 1  # `there` is the sum of its parts
    assert "0.600 s (from last output to first output)" in text


@pytest.mark.parametrize("change", [lambda f: {**f, "frozen_s": None, "downtime_s": None, "downtime": None}])
def test_report_page_of_a_migration_without_measurements(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    assert "not measured" in report.page(change(FACTS))
