"""Test that the checker of histories finds planted violations, and none in valid histories."""

from __future__ import annotations

from pathlib import Path

from tests.support.lease_history import Event, claims, line, read_events, violations


def held(worker: str, token: int, at: float, until: float, what: str = "held") -> Event:
    return Event(what, worker, "s", token, at, at - 0.1, until)


GOOD = [
    held("a", 1, 0, 10),
    held("a", 1, 5, 15, "renewed"),
    held("b", 2, 15, 25),
    Event("stopped", "b", "s", 2, 18, 18),
    Event("wrote", "b", "s", 2, 19, 18),
    held("a", 3, 18.5, 30),
]


def test_valid_history_is_accepted() -> None:
    assert violations(GOOD) == []
    assert [(one.worker, one.start, one.end) for one in claims(GOOD)] == [("a", 0, 15), ("b", 15, 18), ("a", 18.5, 30)]


def test_two_simultaneous_holders_are_detected() -> None:
    assert violations([held("a", 1, 0, 10), held("b", 2, 9.999, 20)]) == [
        "s: a (token 1) until 10.000000 and b (token 2) from 9.999000"
    ]
    assert violations([held("a", 1, 0, 100), held("b", 2, 50, 60), held("c", 3, 70, 80)]), "inside a long one"
    assert violations([held("a", 1, 0, 10), held("a", 2, 5, 15)]), "also one worker under two tokens"


def test_late_freeze_is_detected() -> None:
    assert violations([held("a", 1, 0, 10), Event("stopped", "a", "s", 1, 8, 8), held("b", 2, 7, 20)])
    assert not violations([held("a", 1, 0, 10), Event("stopped", "a", "s", 1, 6, 6), held("b", 2, 7, 20)])


def test_clock_rate_within_the_bound_is_tolerated() -> None:
    close = [held("a", 1, 0, 10), held("b", 2, 10.05, 20)]
    assert violations(close) == [] and violations(close, drift=0.01)
    stopped = [held("a", 1, 0, 10), Event("stopped", "a", "s", 1, 8, 8), held("b", 2, 8.001, 20)]
    assert violations(stopped, drift=0.01) == [], "an act is not a matter of clocks"
    renewed = [held("a", 1, 0, 10), held("a", 1, 995, 1005, "renewed"), held("b", 2, 1006, 1010)]
    assert violations(renewed, drift=0.01) == [], "nor is the time before the last renewal"


def test_non_increasing_tokens_are_detected() -> None:
    assert "token 1 (b) after token 1 (a)" in violations([held("a", 1, 0, 10), held("b", 1, 11, 20)])[0]
    assert violations([held("a", 2, 0, 10), held("b", 1, 11, 20)])
    late = Event("held", "b", "s", 1, 30.0, -1.0, 9.0)
    assert violations([held("a", 2, 10, 20), late]) == [], "asked for before, and the answer too late to be of use"


def test_accepted_late_write_is_detected() -> None:
    late = [held("a", 1, 0, 10), held("b", 2, 11, 20), Event("wrote", "a", "s", 1, 13, 12)]
    assert "under token 1 begun at 12" in violations(late)[0]
    in_time = [held("a", 1, 0, 10), held("b", 2, 11, 20), Event("wrote", "a", "s", 1, 13, 9)]
    assert violations(in_time) == [], "begun before, it may have taken effect before"
    assert violations([held("a", 1, 0, 5), held("b", 2, 6, 7), held("a", 1, 9, 10, "renewed")])


def test_sessions_are_checked_independently() -> None:
    other = Event("held", "b", "t", 1, 5, 5, 15)
    assert violations([held("a", 1, 0, 10), other]) == []


def test_line_truncated_by_a_crash_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(line(GOOD[0]) + line(GOOD[1])[:-9])
    assert read_events([file]) == [GOOD[0]]
