"""The page that this suite writes."""

from __future__ import annotations

from tests.programs import report
from tests.programs.results import OK, STAGES, Result


def test_compatibility_page_is_what_the_results_say() -> None:
    text = report.page(report.load(), report.scenarios())
    assert report.PAGE.read_text() == text, "write it: scripts/compatibility --write"


def test_verdict_is_moves_only_when_every_stage_passed() -> None:
    result = Result("n", "f", "1", stages=dict.fromkeys(STAGES, OK))
    assert report.verdict(result) == report.MOVES
    del result.stages["fork"]
    assert report.verdict(result) == report.NOT_RUN


def test_verdict_of_a_session_that_never_came_back_is_lost() -> None:
    result = Result(
        "n", "f", "1", failure="NeverBack", stages={"start": OK, "plan": OK, "park": OK, "restore": "exit 8"}
    )
    assert report.verdict(result) == report.LOST
    result.failure = "AssertionError"
    assert report.verdict(result) == report.BROKEN
