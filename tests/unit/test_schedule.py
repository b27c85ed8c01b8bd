"""Which session moves to which host, in which order, for any sessions, hosts, budget and time."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cmdop_migrate.drain import schedule
from cmdop_migrate.drain.schedule import Budget, Busy, DrainTarget, Load, Planned

MIB = 1 << 20
ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
sizes = st.integers(0, 4096).map(lambda mib: mib * MIB)


@st.composite
def some_loads(draw: st.DrawFn) -> list[Load]:
    count = draw(st.integers(0, 12))
    names = st.sampled_from(["host-b", "host-c"])
    return [
        Load(
            f"{number:024x}",
            f"s{number}",
            draw(sizes),
            draw(sizes),
            draw(sizes),
            draw(st.floats(0, 60)),
            draw(st.frozensets(names)),
            draw(st.sampled_from(["", "", "", "as asked"])),
        )
        for number in range(count)
    ]


some_targets = st.lists(
    st.builds(DrainTarget, st.sampled_from(["host-b", "host-c", "host-d"]), sizes, sizes),
    unique_by=lambda one: one.name,
)
some_budgets = st.builds(
    Budget,
    st.integers(1, 4),
    st.none() | st.integers(1, 200).map(lambda mib: mib * MIB),
    st.none() | sizes.filter(bool),
    st.floats(0.5, 4),
)
some_times = st.just(math.inf) | st.floats(0.1, 300)
some_busy = st.lists(st.builds(Busy, sizes, st.floats(0.1, 20), st.none() | st.just("host-b")), max_size=3)


@ANY
@given(some_loads(), some_targets, some_budgets, some_times, some_busy)
def test_schedule_never_exceeds_the_budget(
    loads: list[Load], targets: list[DrainTarget], budget: Budget, time_s: float, busy: list[Busy]
) -> None:
    busy = busy[: budget.parallel]
    planned = schedule.schedule(loads, targets, budget, time_s, busy)
    assert sorted(one.load.session for one in planned) == sorted(one.session for one in loads)
    begun = [one for one in planned if one.how != "leave"]
    for moment in {one.begin_s for one in begun}:
        now = [one for one in begun if one.begin_s <= moment < one.end_s]
        before = [one for one in busy if moment < one.ends_s]
        assert len(now) + len(before) <= budget.parallel or not now
        memory = sum(one.load.memory for one in now) + sum(one.memory for one in before)
        assert budget.memory is None or memory <= budget.memory or len(now) + len(before) == 1
    if budget.bandwidth is not None and budget.share is not None:
        assert budget.share * budget.parallel <= max(budget.bandwidth, budget.parallel)
        assert all(one.end_s - one.begin_s >= 0.99 * budget.pace * one.load.send / budget.share for one in begun)


@ANY
@given(some_loads(), some_targets, some_budgets, some_times)
def test_every_session_is_moved_parked_or_left_with_a_reason(
    loads: list[Load], targets: list[DrainTarget], budget: Budget, time_s: float
) -> None:
    planned = schedule.schedule(loads, targets, budget, time_s)
    room = {one.name: one for one in targets}
    for one in planned:
        assert (one.how == "move") == (one.target is not None)
        assert bool(one.why) == (one.how != "move")
        if one.target is not None:
            assert not one.load.stays and one.target not in one.load.refused
            assert room[one.target].room_for(one.load)
            room[one.target] = room[one.target].plus(one.load)
            assert one.end_s <= time_s  # who cannot be there in time is parked
        assert (one.how == "leave") == (one.begin_s >= time_s)
    assert [one.begin_s for one in planned] == sorted(one.begin_s for one in planned)


@ANY
@given(some_loads(), some_targets, some_budgets)
def test_cheap_sessions_go_first(loads: list[Load], targets: list[DrainTarget], budget: Budget) -> None:
    moved = [one for one in schedule.schedule(loads, targets, budget) if one.how == "move"]
    costs = [schedule.move_seconds(one.load, budget) for one in moved]
    assert costs == sorted(costs)


@ANY
@given(some_loads(), some_targets, some_budgets, st.floats(0.1, 300))
def test_costliest_sessions_are_parked_when_time_is_short(
    loads: list[Load], targets: list[DrainTarget], budget: Budget, time_s: float
) -> None:
    free = [Load(one.session, one.name, one.memory, one.files, one.send, one.work_s) for one in loads]
    wide = [DrainTarget(one.name, 1 << 50, 1 << 50) for one in targets]
    planned = schedule.schedule(free, wide, budget, time_s)
    moved = [schedule.move_seconds(one.load, budget) for one in planned if one.how == "move"]
    no_time = [schedule.move_seconds(one.load, budget) for one in planned if one.why == "no time to move it"]
    assert not moved or not no_time or max(moved) <= min(no_time)


def _named(planned: list[Planned]) -> dict[str, tuple[str, str | None, str]]:
    return {one.load.name: (one.how, one.target, one.why) for one in planned}


def _load(name: str, mib: int = 10, work_s: float = 1.0, **more: object) -> Load:
    return Load(name * 24, name, mib * MIB, 0, mib * MIB // 4, work_s, **more)  # type: ignore[arg-type]


def test_sessions_are_spread_by_free_memory() -> None:
    loads = [_load(name) for name in "abcdef"]
    planned = schedule.schedule(
        loads, [DrainTarget("b", 4 << 30, 1 << 40), DrainTarget("c", 2 << 30, 1 << 40)], Budget()
    )
    assert sorted(one.target or "" for one in planned) == ["b"] * 4 + ["c"] * 2


def test_session_without_a_host_that_has_room_is_parked() -> None:
    planned = schedule.schedule([_load("a", 500), _load("b")], [DrainTarget("b", 100 * MIB, 1 << 40)], Budget())
    assert _named(planned) == {"b": ("move", "b", ""), "a": ("park", None, "no host has room for it")}
    assert _named(schedule.schedule([_load("a")], [], Budget())) == {"a": ("park", None, "no host to move it to")}


def test_without_time_sessions_are_left() -> None:
    target = [DrainTarget("b", 1 << 40, 1 << 40)]
    loads = [_load("a"), _load("b", work_s=30.0), _load("c", work_s=60.0)]
    quick, slow, slower = (schedule.move_seconds(one, Budget(1)) for one in loads)
    parks = [schedule.park_seconds(one, Budget(1)) for one in loads]
    planned = schedule.schedule(loads, target, Budget(1), quick + slow + slower)
    assert [one.how for one in planned] == ["move", "move", "move"]
    planned = schedule.schedule(loads, target, Budget(1), quick + slow + parks[2] + 0.1)
    assert _named(planned)["c"] == ("park", None, "no time to move it")
    assert [one.how for one in planned] == ["move", "move", "park"]
    planned = schedule.schedule(loads, target, Budget(1), parks[0] + 1)
    assert _named(planned)["c"] == ("leave", None, "no time even to park it")
    assert _named(planned)["b"] == ("park", None, "no time to move it")  # it may be quicker than we think


def test_session_larger_than_the_budget_goes_alone() -> None:
    loads = [_load("a"), _load("b"), _load("c", 1000)]
    planned = schedule.schedule(loads, [], Budget(3, None, 100 * MIB))
    large = next(one for one in planned if one.load.name == "c")
    assert large.begin_s >= max(one.end_s for one in planned if one is not large)


def test_at_most_four_simultaneous_moves_to_one_host() -> None:
    loads = [_load(name) for name in "abcdef"]
    planned = schedule.schedule(loads, [DrainTarget("b", 1 << 40, 1 << 40)], Budget(6))
    assert [one.begin_s == 0.0 for one in planned] == [True] * 4 + [False] * 2
