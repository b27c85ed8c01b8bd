"""Numbered input: input that is sent again is applied once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.holder.input_streams import LIMIT, Streams

ONE = "0123456789abcdef"


def test_bytes_that_arrived_before_are_skipped() -> None:
    table = Streams()
    assert table.open(ONE) == 0
    assert table.new(ONE, 0, b"abc") == b"abc"
    assert table.apply(ONE, 3, 7, 90) == 3
    assert table.new(ONE, 0, b"abc") == b""
    assert table.new(ONE, 1, b"bcde") == b"de"
    assert table.new(ONE, 4, b"e") is None, "a gap"
    assert table.last(ONE) == (7, 90)


@given(st.binary(min_size=1, max_size=50), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_each_byte_is_applied_once_and_in_order(typed: bytes, sent: list[tuple[int, int]]) -> None:
    table, got = Streams(), b""
    for at, count in [*sent, (0, len(typed))]:
        new = table.new(ONE, at, typed[at : at + count])
        if new:
            got += new
            assert table.apply(ONE, len(new)) == len(got)
        assert typed.startswith(got)
    assert got == typed


def test_streams_continue_in_the_next_incarnation() -> None:
    before, after = Streams(), Streams()
    before.open(ONE)
    before.apply(ONE, 5, 2, 3)
    after.load(json.loads(json.dumps(before.save())))
    assert after.new(ONE, 3, b"defg") == b"fg"
    before.apply(ONE, 1)
    assert after.open(ONE) == 5, "a copy"


def test_the_least_recently_used_stream_is_forgotten() -> None:
    table = Streams()
    table.apply(ONE, 9)
    for number in range(3 * LIMIT):
        table.open(f"{number:016x}")
        assert table.open(ONE) == 9
    applied = table.save()["applied"]
    assert isinstance(applied, dict) and len(applied) == LIMIT


@pytest.mark.parametrize("bad", ["", "x" * 16, "0" * 15, "0" * 17, "../" * 5])
def test_a_malformed_stream_id_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        Streams().open(bad)


def saved(applied: object, born: object = ()) -> dict[str, object]:
    return {"applied": applied, "born": list(born) if isinstance(born, tuple) else born}


@pytest.mark.parametrize(
    "bad",
    [None, [], {}, {"applied": {}}, saved([]), saved({}, 3), saved({}, ([1],)), saved({}, ([1, -1],)), saved({}, (3,)),
     saved({ONE: 3}), saved({ONE: [1, 2]}), saved({ONE: [1, 2, "3"]}), saved({ONE: [-1, 0, 0]}), saved({"x": [1, 2, 3]}),
     saved({ONE: [True, 0, 0]}), saved({f"{number:016x}": [0, 0, 0] for number in range(LIMIT + 1)})],
)  # fmt: skip
def test_a_malformed_saved_table_is_refused(bad: object) -> None:
    with pytest.raises(ValueError):
        Streams().load(bad)


def test_since_tells_where_the_output_differs() -> None:
    table = Streams()
    assert table.since(1) is None
    table.begin(2, 400)  # moved
    table.begin(3, 100)  # that host died: from a checkpoint before
    table.begin(4, 900)  # moved
    again = Streams()
    again.load(json.loads(json.dumps(table.save())))
    assert [again.since(token) for token in (1, 2, 3, 4, 5)] == [100, 100, 900, None, None]
    for token in range(200):
        again.begin(token, token)
    again.load(again.save())
