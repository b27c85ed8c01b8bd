"""The holder's state machine: every event in every mode, and what must hold of all of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cmdop_migrate.holder import state as machine
from cmdop_migrate.holder.state import Ending, Event, Left, Mode, NotAllowed, State, after, ending

OWNER, OTHER = 1, 2
MOVED = Left("moved", "host-b", 2, "moved to host-b (token 2)")
SUPERSEDED = Left("superseded", "host-c", 3, "superseded by token 3 on host-c")
STATES = {
    Mode.RUNNING: State(),
    Mode.FROZEN: State(Mode.FROZEN, owner=OWNER),
    Mode.COMMITTING: State(Mode.COMMITTING, owner=OWNER),
    Mode.UNCERTAIN: State(Mode.UNCERTAIN),
    Mode.KILL_PENDING: State(Mode.KILL_PENDING),
    Mode.HANDED_OVER: State(Mode.HANDED_OVER, checkpoint="c1"),
    Mode.PARKED: State(Mode.PARKED, checkpoint="c1"),
    Mode.LEFT: State(Mode.LEFT, left=SUPERSEDED),
}
Facts = dict[str, Any]
FACTS: dict[Event, Facts] = {
    Event.FREEZE: {"by": OTHER},
    Event.THAW: {"by": OWNER},
    Event.COMMIT: {"by": OWNER},
    Event.HAND_OVER: {"by": OWNER, "checkpoint": "c2"},
    Event.PARK: {"by": OWNER, "checkpoint": "c2"},
    Event.MOVED: {"left": MOVED},
    Event.SUPERSEDED: {"left": SUPERSEDED},
    Event.PARKED_IN_STORE: {"checkpoint": "c2"},
    Event.MEMORY_LOST: {"checkpoint": "c2", "why": "cut off"},
}
# Written out again, apart from the module's docstring, which is compared with it below.
TABLE = """
    Freeze           FROZEN   !            !             FROZEN        !             !            !       !
    Thaw             -        RUNNING      RUNNING       -             -             -            -       -
    Commit           !        COMMITTING   COMMITTING    !             !             !            !       !
    HandOver         !        HANDED_OVER  HANDED_OVER   !             !             !            !       !
    Park             !        PARKED       PARKED        !             !             !            !       !
    OwnerGone        -        RUNNING      UNCERTAIN     -             -             -            -       -
    Renewed          -        -            -             RUNNING       -             -            -       -
    Kill             -        RUNNING      KILL_PENDING  KILL_PENDING  -             -            -       -
    TakeBack         !        !            !             !             !             RUNNING      !       !
    Moved            !        !            !             !             !             LEFT         !       !
    Superseded       LEFT     LEFT         LEFT          LEFT          LEFT          LEFT         -       -
    ParkedInStore    PARKED   PARKED       PARKED        PARKED        -             PARKED       -       -
    MemoryLost       PARKED   PARKED       PARKED        PARKED        -             PARKED       -       -
"""
ROWS = {words[0]: words[1:] for words in (line.split() for line in TABLE.strip().splitlines())}
CELLS = [(Event(name), mode, cell) for name, cells in ROWS.items() for mode, cell in zip(Mode, cells, strict=True)]


def step(state: State, event: Event, **facts: Any) -> State:
    try:
        return after(state, event, **(facts or FACTS.get(event, {})))
    except NotAllowed:
        return state


@pytest.mark.parametrize(("event", "mode", "cell"), CELLS)
def test_every_event_in_every_mode(event: Event, mode: Mode, cell: str) -> None:
    before, facts = STATES[mode], FACTS.get(event, {})
    if cell == "!":
        with pytest.raises(NotAllowed):
            after(before, event, **facts)
    elif cell == "-":
        assert after(before, event, **facts) == before
    else:
        assert after(before, event, **facts).mode is Mode[cell]


def test_table_names_every_event_and_is_the_one_in_the_docstring() -> None:
    assert set(ROWS) == {event.value for event in Event}
    assert TABLE.strip() in str(machine.__doc__)
    header = next(line for line in str(machine.__doc__).splitlines() if line.strip().startswith("event "))
    assert header.split()[1:] == [mode.name for mode in Mode]


@pytest.mark.parametrize("mode", [Mode.FROZEN, Mode.COMMITTING])
@pytest.mark.parametrize("event", [Event.COMMIT, Event.HAND_OVER, Event.PARK])
def test_only_the_owner_commits_parks_and_hands_over(mode: Mode, event: Event) -> None:
    for other in (OTHER, None):
        with pytest.raises(NotAllowed, match="not frozen by you"):
            after(STATES[mode], event, by=other, checkpoint="c2")


@pytest.mark.parametrize("mode", list(Mode))
def test_thaw_of_another_connection_changes_nothing(mode: Mode) -> None:
    assert after(STATES[mode], Event.THAW, by=OTHER) == after(STATES[mode], Event.THAW) == STATES[mode]


def reachable() -> set[State]:
    """Return every state that events lead to from the first one."""
    known, news = {State()}, [State()]
    moves: list[tuple[Event, Facts]] = [(event, FACTS.get(event, {})) for event in Event]
    moves += [(event, {"by": by, "checkpoint": "c3"}) for event in Event for by in (OWNER, OTHER)]
    moves += [(event, {**facts, "left": SUPERSEDED}) for event, facts in moves]
    while news:
        state = news.pop()
        for event, facts in moves:
            if event in (Event.MOVED, Event.SUPERSEDED) and "left" not in facts:
                continue
            after_it = step(state, event, **facts)
            if after_it not in known:
                known.add(after_it)
                news.append(after_it)
    return known


def test_all_modes_are_reached_and_their_values_fit() -> None:
    known = reachable()
    assert {state.mode for state in known} == set(Mode)
    for state in known:
        assert (state.owner is not None) == (state.mode in (Mode.FROZEN, Mode.COMMITTING)), state
        assert (state.checkpoint is not None) == (state.mode in (Mode.HANDED_OVER, Mode.PARKED)), state
        assert (state.left is not None) == (state.mode is Mode.LEFT), state
        assert not state.is_over or (state.withholds_input and state.may_be_elsewhere), state


def test_no_event_leads_out_of_parked_and_left() -> None:
    for state, event in itertools.product(reachable(), Event):
        if state.is_over:
            assert step(state, event) == state


def test_only_the_lease_leads_from_uncertain_or_handed_over_to_running() -> None:
    only = {Mode.UNCERTAIN: Event.RENEWED, Mode.HANDED_OVER: Event.TAKE_BACK}
    for state, event in itertools.product(reachable(), Event):
        if state.mode in only and step(state, event) == State():
            assert event is only[state.mode]


def test_owner_gone_during_commit_is_not_taken_for_an_undone_checkpoint() -> None:
    state = after(STATES[Mode.COMMITTING], Event.OWNER_GONE)
    assert state.may_be_elsewhere and not state.withholds_input
    assert after(state, Event.RENEWED) == State()
    assert after(state, Event.PARKED_IN_STORE, checkpoint="c9") == State(Mode.PARKED, checkpoint="c9")


def test_killed_during_commit_is_never_parked_by_this_holder() -> None:
    state = after(STATES[Mode.UNCERTAIN], Event.KILL)
    assert step(step(state, Event.PARKED_IN_STORE), Event.MEMORY_LOST) == state
    assert ending(state, 143, True) == Ending("kill_pending", 143)


@pytest.mark.parametrize(
    ("state", "code", "is_signal", "expected"),
    [
        (State(), 3, False, Ending("exited", 3, "", None)),
        (State(), 137, True, Ending("killed", 137, "", None)),
        (STATES[Mode.FROZEN], 137, True, Ending("killed", 137, "", None)),
        (STATES[Mode.COMMITTING], 137, True, Ending("parking_unknown", None, "", None)),
        (STATES[Mode.UNCERTAIN], 137, True, Ending("parking_unknown", None, "", None)),
        (STATES[Mode.HANDED_OVER], 137, True, Ending(None, None, "parked in the store", "c1")),
        (STATES[Mode.PARKED], 137, True, Ending(None, None, "parked in the store", "c1")),
        (step(State(), Event.MEMORY_LOST), 137, True, Ending(None, None, "cut off", "c2")),
        (step(State(), Event.SUPERSEDED), 137, True, Ending("superseded", 137, SUPERSEDED.reason, None, SUPERSEDED)),
        (step(STATES[Mode.HANDED_OVER], Event.SUPERSEDED), 137, True, Ending("superseded", None, SUPERSEDED.reason, None, SUPERSEDED)),
        (step(STATES[Mode.HANDED_OVER], Event.MOVED), 137, True, Ending("moved", None, MOVED.reason, None, MOVED)),
    ],
)  # fmt: skip
def test_how_the_end_of_the_processes_is_recorded(state: State, code: int, is_signal: bool, expected: Ending) -> None:
    assert ending(state, code, is_signal) == expected
