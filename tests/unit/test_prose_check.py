"""scripts/py/check_prose.py: it finds banned phrases and docstrings without a verb, and its pending list only shrinks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "py"))

import check_prose


@pytest.mark.parametrize(
    "text", ["Return the id.", "Re-read the file.", "Pass it on.", "Bring up the link.", "Seal it."]
)
def test_docstring_that_begins_with_imperative_verb_is_accepted(text: str) -> None:
    assert check_prose.is_imperative(text)


@pytest.mark.parametrize(
    "text",
    ["Returns the id.", "The id.", "What it holds.", "Whether it runs.", "`id` of it.", "CRIU's log.", "Called once."],
)
def test_docstring_that_begins_with_another_word_is_refused(text: str) -> None:
    assert not check_prose.is_imperative(text)


def test_banned_phrase_is_found_across_a_line_break() -> None:
    (found,) = check_prose.banned("It stands\n    still.", first_line=7)
    assert found[0] == 7 and "frozen" in found[1]


def test_python_file_is_checked_in_docstrings_comments_and_literals() -> None:
    source = '"""Hold it."""\nname = "nobody"\n# whoever\n# goes\n# on\n\n\ndef f():\n    """Returns."""\n'
    found = check_prose.check_python("cmdop_migrate/x.py", source)
    assert sorted(violation.line for violation in found) == [2, 3, 4, 9]


def test_test_names_are_checked_and_test_data_is_not() -> None:
    found = list(check_prose.check_python("tests/x.py", "def test_nobody_waits():\n    print('nobody')\n"))
    assert [violation.line for violation in found] == [1]
