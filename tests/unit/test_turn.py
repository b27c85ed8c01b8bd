"""The write turn, as a table and as a property: one holder, in order, bounded, and a seize always wins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.holder.write_turn import QUEUE_LIMIT, Refused, Turn

ACTORS = ("ann", "bob", "cy", "root")
# (what is asked, who has it afterwards or the refusal, who waits)
STEPS: list[tuple[tuple[Any, ...], str | None, list[str]]] = [
    (("release", "ann"), "!not_yours", []),
    (("grant", "ann", None, False), "!not_yours", []),
    (("grant", "root", None, True), "!no_waiter", []),
    (("seize", "ann", False), "!not_admin", []),
    (("request", "ann"), "ann", []),
    (("request", "ann"), "ann", []),
    (("request", "bob"), "ann", ["bob"]),
    (("request", "cy"), "ann", ["bob", "cy"]),
    (("request", "bob"), "ann", ["bob", "cy"]),
    (("grant", "bob", "bob", False), "!not_yours", ["bob", "cy"]),
    (("grant", "ann", "cy", False), "cy", ["bob"]),
    (("release", "ann"), "!not_yours", ["bob"]),
    (("seize", "bob", False), "!not_admin", ["bob"]),
    (("seize", "root", True), "root", ["bob"]),
    (("request", "cy"), "root", ["bob", "cy"]),
    (("release", "bob"), "root", ["cy"]),
    (("release", "root"), "cy", []),
    (("grant", "root", "ann", True), "ann", []),
    (("request", ""), "!name", []),
    (("request", "a\x1b[2J"), "!name", []),
    (("release", "ann"), None, []),
]


def do(turn: Turn, step: tuple[Any, ...], now: float = 0.0, timeout: float = 10.0, freeze: bool = False) -> None:
    if step[0] == "request":
        turn.request(step[1], timeout, now)
    elif step[0] == "grant":
        turn.grant(step[1], step[2], step[3], timeout, now)
    elif step[0] == "release":
        turn.release(step[1], now)
    else:
        turn.seize(step[1], step[2], timeout, freeze, now)


def test_turn_requests_in_order() -> None:
    turn = Turn()
    for step, expected, queue in STEPS:
        if expected is not None and expected.startswith("!"):
            with pytest.raises(Refused) as refused:
                do(turn, step)
            assert "!" + refused.value.code == expected, step
        else:
            do(turn, step)
            assert turn.holder == expected, step
        assert turn.queue == queue, step


def test_only_its_holder_writes() -> None:
    turn = Turn()
    assert all(turn.may_write(one) for one in ACTORS)
    turn.request("ann", 10, 0)
    assert [one for one in ACTORS if turn.may_write(one)] == ["ann"]
    turn.seize("root", True, 10, False, 1)
    assert [one for one in ACTORS if turn.may_write(one)] == ["root"]


def test_turn_lapses_without_input_and_goes_to_the_next() -> None:
    turn = Turn()
    turn.request("ann", 10, 0)
    turn.request("bob", 3, 0)
    turn.touch("bob", 9)
    turn.touch("ann", 5)
    assert not turn.lapse(14.9) and turn.left(14) == 1
    assert turn.lapse(15) and (turn.holder, turn.left(15)) == ("bob", 3)
    assert turn.lapse(18) and turn.holder is None and not turn.lapse(1e9)


def test_a_freezing_turn_does_not_lapse() -> None:
    for end in (("release", "root"), ("grant", "root", "ann", True), ("seize", "ann", True)):
        turn = Turn()
        turn.seize("root", True, 1, True, 0)
        assert turn.frozen and turn.deadline() is None and not turn.lapse(1e9)
        do(turn, end, 1e9)
        assert not turn.frozen


def test_the_queue_is_bounded() -> None:
    turn = Turn()
    turn.request("ann", 10, 0)
    for number in range(QUEUE_LIMIT):
        turn.request(f"a{number}", 10, 0)
    with pytest.raises(Refused, match="others wait"):
        turn.request("late", 10, 0)
    assert len(turn.queue) == QUEUE_LIMIT


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"holder": 5, "frozen": False, "timeout": 1, "left": 1, "queue": []},
        {"holder": "a", "frozen": False, "timeout": 1, "left": 9, "queue": []},
        {"holder": "a", "frozen": False, "timeout": "nan", "left": 0, "queue": []},
        {"holder": "a", "frozen": False, "timeout": 1, "left": 1, "queue": [["a", 1]]},
        {"holder": "a", "frozen": False, "timeout": 1, "left": 1, "queue": [["b", 1]] * 2},
        {"holder": "a", "frozen": False, "timeout": 1, "left": 1, "queue": [[str(n), 1] for n in range(99)]},
        {"holder": "\x1b", "frozen": False, "timeout": 1, "left": 1, "queue": []},
    ],
)
def test_a_malformed_saved_turn_is_refused(saved: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, Refused)):
        Turn().load(saved, 0.0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["request", "release", "grant", "seize", "touch", "lapse", "move"]),
        st.sampled_from([*ACTORS, *(f"a{number}" for number in range(QUEUE_LIMIT + 3))]),
        st.sampled_from([None, *ACTORS]),
        st.booleans(),
        st.floats(0.5, 50),
    ),
    max_size=60,
)


@given(steps)
def test_turn_invariants_hold_for_any_requests(asked: list[tuple[str, str, str | None, bool, float]]) -> None:
    turn, now = Turn(), 0.0
    for word, actor, to, admin, seconds in asked:
        now += seconds / 4
        before = turn.holder
        try:
            if word == "touch":
                turn.touch(actor, now)
                assert turn.holder == before
            elif word == "lapse":
                turn.lapse(now)
            elif word == "move":
                after = Turn()
                after.load(json.loads(json.dumps(turn.save(now))), 1000.0)
                assert (after.holder, after.queue, after.frozen) == (turn.holder, turn.queue, turn.frozen)
                assert after.left(1000.0) == pytest.approx(turn.left(now))
                turn, now = after, 1000.0
            else:
                do(turn, (word, actor, *((to, admin) if word == "grant" else (admin,))), now, seconds, admin)
        except Refused:
            assert turn.holder == before and not (word == "seize" and admin)
        if word == "seize" and admin:
            assert turn.holder == actor
        elif before is not None and turn.holder != before:
            # An actor loses the turn only by its own request, by an admin's, or by a timeout.
            assert actor == before or (word == "grant" and admin) or word == "lapse"
        writers = [one for one in ACTORS if turn.may_write(one)]
        assert len(writers) <= 1 or turn.holder is None
        assert len(turn.queue) == len(set(turn.queue)) <= QUEUE_LIMIT and turn.holder not in turn.queue
        assert turn.holder is not None or (turn.queue == [] and not turn.frozen)
