"""Test the rules, as a table and under random histories; the encoding of records; the margins."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.errors import LeaseNewer, LeaseUnreadable, Usage
from cmdop_migrate.lease import margins, rules
from cmdop_migrate.lease.margins import RHO, contender_wait, freeze_allowance, fresh_for
from cmdop_migrate.lease.record import SIZE_MAX, LeaseRecord, parse
from cmdop_migrate.lease.rules import AcquireRequest, Already, Claim, Grant, Lost, Observation, Wait, Why

N1, N2, NEW = "1" * 32, "2" * 32, "e" * 32
HELD = LeaseRecord("s", 7, "held", "host-a", "ia", 10.0, 3, "c1", N1)
PARKED = replace(HELD, state="parked")
FREE = replace(HELD, state="free", checkpoint=None)
B = AcquireRequest("s", "host-b", "ib", 20.0)
A = AcquireRequest("s", "host-a", "ia", 10.0)
MINE = Claim("s", "ia", 7)
SEEN = Observation(7, 3, N1, 100.0)
WAIT = contender_wait(10.0)


def given_to_b(token: int, checkpoint: str | None) -> Grant:
    return Grant(LeaseRecord("s", token, "held", "host-b", "ib", 20.0, 0, checkpoint, NEW))


ACQUIRE: list[tuple[Any, ...]] = [
    ("first", None, B, None, 0.0, given_to_b(1, None)),
    ("free", FREE, B, None, 0.0, given_to_b(8, None)),
    ("parked", PARKED, B, None, 0.0, given_to_b(8, "c1")),
    ("parked, expected", PARKED, replace(B, expect_checkpoint="c1"), None, 0.0, given_to_b(8, "c1")),
    ("parked, newer", PARKED, replace(B, expect_checkpoint="c0"), None, 0.0, Lost("s", Why.CHECKPOINT, PARKED)),
    ("none, expected", None, replace(B, expect_checkpoint="c0"), None, 0.0, Lost("s", Why.CHECKPOINT, None)),
    ("ended, expected", FREE, replace(B, expect_checkpoint="c1"), None, 0.0, Lost("s", Why.CHECKPOINT, FREE)),
    ("expects none", FREE, replace(B, expect_checkpoint=None), None, 0.0, given_to_b(8, None)),
    ("held, newer", HELD, replace(B, expect_checkpoint="c0"), SEEN, 1e6, Lost("s", Why.CHECKPOINT, HELD)),
    ("held, not seen", HELD, B, None, 1e6, Wait(WAIT, HELD)),
    ("held, just seen", HELD, B, SEEN, 100.0, Wait(WAIT, HELD)),
    ("held, too early", HELD, B, SEEN, 110.0, Wait(WAIT - 10, HELD)),
    ("held, over", HELD, B, SEEN, 100.001 + WAIT, given_to_b(8, "c1")),
    ("held, renewed", HELD, B, replace(SEEN, renewals=2), 1e6, Wait(WAIT, HELD)),
    ("held, rewritten", HELD, B, replace(SEEN, nonce=N2), 1e6, Wait(WAIT, HELD)),
    ("held, other token", HELD, B, replace(SEEN, token=6), 1e6, Wait(WAIT, HELD)),
    ("held, seen after a reboot", HELD, B, replace(SEEN, since=500.0), 400.0, Wait(WAIT, HELD)),
    ("held by us, not asked to resume", HELD, A, None, 0.0, Wait(WAIT, HELD)),
    (
        "held by us, resumed",
        HELD,
        replace(A, resume_token=7, ttl=5.0),
        None,
        0.0,
        Grant(replace(HELD, renewals=4, nonce=NEW)),  # who runs it may still rely on the longer time
    ),
    (
        "held by us, resumed for longer",
        HELD,
        replace(A, resume_token=7, ttl=60.0),
        None,
        0.0,
        Grant(replace(HELD, renewals=4, ttl=60.0, nonce=NEW)),
    ),
    ("resume an older", HELD, replace(A, resume_token=6), None, 0.0, Lost("s", Why.SUPERSEDED, HELD)),
    ("resume another's", HELD, replace(B, resume_token=7), SEEN, 1e6, Lost("s", Why.SUPERSEDED, HELD)),
    ("resume what is parked", PARKED, replace(A, resume_token=7), None, 0.0, Lost("s", Why.PARKED, PARKED)),
    ("resume nothing", None, replace(A, resume_token=7), None, 0.0, Lost("s", Why.GONE, None)),
    ("store put back", FREE, replace(B, above=40), None, 0.0, given_to_b(41, None)),
    ("above is no discount", FREE, replace(B, above=3), None, 0.0, given_to_b(8, None)),
]


@pytest.mark.parametrize(
    ("record", "wanted", "seen", "now", "expected"), [row[1:] for row in ACQUIRE], ids=[r[0] for r in ACQUIRE]
)
def test_acquire(record: Any, wanted: Any, seen: Any, now: float, expected: Any) -> None:
    assert rules.acquire(record, wanted, seen, now, NEW) == expected


def test_lapsed_record_is_granted_without_waiting() -> None:
    assert rules.acquire(HELD, B, None, 0.0, NEW, lapsed=True) == given_to_b(8, "c1")


RENEW: list[tuple[Any, ...]] = [
    ("ours", HELD, Grant(replace(HELD, renewals=4, nonce=NEW))),
    ("gone", None, Lost("s", Why.GONE, None)),
    ("put back", replace(HELD, token=6), Lost("s", Why.GONE, replace(HELD, token=6))),
    ("taken", replace(HELD, token=8, instance="ib"), Lost("s", Why.SUPERSEDED, replace(HELD, token=8, instance="ib"))),
    ("taken by us", replace(HELD, token=8), Lost("s", Why.SUPERSEDED, replace(HELD, token=8))),
    ("same name, other host", replace(HELD, instance="ix"), Lost("s", Why.SUPERSEDED, replace(HELD, instance="ix"))),
    ("parked", PARKED, Lost("s", Why.PARKED, PARKED)),
    ("freed", FREE, Lost("s", Why.FREED, FREE)),
]


@pytest.mark.parametrize(("record", "expected"), [row[1:] for row in RENEW], ids=[row[0] for row in RENEW])
def test_operations_that_need_the_lease(record: Any, expected: Any) -> None:
    assert rules.renew(record, MINE, NEW) == expected
    if isinstance(expected, Lost):
        assert rules.commit_checkpoint(record, MINE, "c9", NEW) == expected
        assert rules.park(record, MINE, "c9", NEW) == expected
        assert rules.release(record, MINE, False, NEW) == (Already(FREE) if record == FREE else expected)


def test_operations_of_a_holder() -> None:
    assert rules.commit_checkpoint(HELD, MINE, "c9", NEW) == Grant(
        replace(HELD, renewals=4, checkpoint="c9", nonce=NEW)
    )
    assert rules.park(HELD, MINE, "c9", NEW) == Grant(replace(HELD, state="parked", checkpoint="c9", nonce=NEW))
    assert rules.park(PARKED, MINE, "c1", NEW) == Already(PARKED)
    assert rules.release(HELD, MINE, False, NEW) == Grant(replace(HELD, state="free", checkpoint=None, nonce=NEW))
    assert rules.release(HELD, MINE, True, NEW) == Grant(replace(HELD, state="free", nonce=NEW))


def test_break_held() -> None:
    broken = replace(HELD, token=8, state="parked", host="host-b", instance="ib", renewals=0, nonce=NEW)
    assert rules.break_held(HELD, B, NEW) == Grant(broken)
    never = replace(HELD, checkpoint=None)
    assert rules.break_held(never, B, NEW) == Grant(replace(broken, state="free", checkpoint=None))
    assert rules.break_held(PARKED, B, NEW) == Already(PARKED)
    assert rules.break_held(None, B, NEW) == Lost("s", Why.GONE, None)
    assert isinstance(rules.renew(broken, MINE, NEW), Lost), "the old holder is told"


def test_expire_fork_that_never_ran() -> None:
    unborn = replace(HELD, token=1, renewals=1, checkpoint="birth")
    over = Grant(replace(unborn, state="free", checkpoint=None, nonce=NEW))
    assert rules.expire_fork(unborn, "s", "birth", 1, NEW) == over
    assert rules.expire_fork(replace(unborn, renewals=0, checkpoint=None), "s", "birth", 1, NEW) == Grant(
        replace(over.record, renewals=0)
    )
    assert isinstance(rules.renew(over.record, replace(MINE, token=1), NEW), Lost), "who comes late does not run it"
    assert rules.expire_fork(over.record, "s", "birth", 1, NEW) == Already(over.record)
    assert rules.expire_fork(None, "s", "birth", 1, NEW) == Lost("s", Why.GONE, None)
    for other in (
        replace(unborn, renewals=2),  # it may run
        replace(unborn, token=2),  # it was restored
        replace(unborn, state="parked"),
        replace(unborn, state="free"),  # its holder died
        replace(unborn, checkpoint="c9"),  # it made one of its own
    ):
        assert rules.expire_fork(other, "s", "birth", 1, NEW) == Lost("s", Why.HELD, other)


@given(st.floats(margins.TTL_MIN, margins.TTL_MAX))
def test_holder_is_frozen_before_a_contender_may_ask(ttl: float) -> None:
    stands_still_after = (fresh_for(ttl) + freeze_allowance(ttl)) / (1 - RHO)  # real seconds, on the slowest clock
    asks_after = contender_wait(ttl) / (1 + RHO)  # real seconds, on the fastest
    assert stands_still_after <= asks_after * (1 + 1e-12)
    assert 0 < fresh_for(ttl) < ttl < contender_wait(ttl)
    assert margins.renew_every(ttl) * margins.RENEWALS_PER_TTL <= fresh_for(ttl) * (1 + 1e-12)


@pytest.mark.parametrize("ttl", [0, -1, 0.1, float("nan"), float("inf"), 1e9])
def test_ttl_outside_the_margins_is_refused(ttl: float) -> None:
    with pytest.raises(Usage):
        margins.check_ttl(ttl)


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)
records = st.builds(
    LeaseRecord,
    session=names,
    token=st.integers(1, 2**63 - 1),
    state=st.just("held"),
    host=names,
    instance=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    ttl=st.floats(margins.TTL_MIN, margins.TTL_MAX),
    renewals=st.integers(0, 2**62),
    checkpoint=st.none() | names,
    nonce=st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
)


@given(records)
def test_record_round_trips(record: LeaseRecord) -> None:
    assert parse(record.to_bytes(), record.session) == record


@given(st.binary(max_size=200) | records.map(lambda r: r.to_bytes()[:-7]) | st.text().map(str.encode))
def test_garbage_record_is_reported_and_never_crashes(data: bytes) -> None:
    with pytest.raises(LeaseUnreadable) as told:
        parse(data, "s")
    assert told.value.hint


@given(
    st.sampled_from(sorted(asdict(HELD))),
    st.none() | st.booleans() | st.integers(-5, 0) | st.floats() | st.text() | st.lists(st.integers()),
)
def test_invalid_field_is_reported(field: str, value: Any) -> None:
    table = asdict(HELD) | {field: value}
    data = json.dumps(table).encode()
    try:
        found = parse(data, "s")
    except LeaseUnreadable:
        return
    assert found.to_bytes() and getattr(found, field) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"version": true}',
        b"[" * 100_000,
        b" " * (SIZE_MAX + 1) + HELD.to_bytes(),
        json.dumps(asdict(HELD) | {"more": 1}).encode(),
        json.dumps({key: value for key, value in asdict(HELD).items() if key != "nonce"}).encode(),
        replace(HELD, session="other").to_bytes(),
        replace(PARKED, checkpoint=None).to_bytes(),
        replace(HELD, ttl=float("inf")).to_bytes(),
        replace(HELD, version=0).to_bytes(),
    ],
)
def test_record_of_another_session_is_refused(data: bytes) -> None:
    with pytest.raises(LeaseUnreadable) as told:
        parse(data, "s")
    assert not isinstance(told.value, LeaseNewer)


def test_record_of_a_newer_version_is_recognised_with_any_content() -> None:
    with pytest.raises(LeaseNewer, match="newer"):
        parse(json.dumps({"version": 2, "what": ["we", "cannot", "know"]}).encode(), "s")


steps = st.lists(
    st.tuples(st.sampled_from(["acquire", "renew", "park", "release", "commit", "break", "wait"]), st.integers(0, 2)),
    max_size=60,
)


@given(steps)
def test_tokens_grow_and_only_the_last_holder_may_act(script: list[tuple[str, int]]) -> None:
    """Let three hosts act in turn, each with what it last knew; the record changes only as the rules say."""
    record: LeaseRecord | None = None
    tokens: list[int] = []
    mine: dict[int, Claim] = {}
    seen: dict[int, Observation | None] = {}
    now = 0.0
    for count, (what, who) in enumerate(script):
        nonce, name = f"{count:032x}", f"i{who}"
        claim = mine.get(who, Claim("s", name, 0))
        wanted = AcquireRequest("s", f"h{who}", name, 1.0)
        decision: Grant | Already | Wait | Lost | None = None
        match what:
            case "wait":
                now += 0.4
            case "acquire":
                seen[who] = rules.observe(record, seen.get(who), now)
                decision = rules.acquire(record, wanted, seen[who], now, nonce)
                if isinstance(decision, Grant):
                    mine[who] = Claim("s", name, decision.record.token)
                    tokens.append(decision.record.token)
            case "renew":
                decision = rules.renew(record, claim, nonce)
            case "park":
                decision = rules.park(record, claim, "c", nonce)
            case "release":
                decision = rules.release(record, claim, False, nonce)
            case "commit":
                decision = rules.commit_checkpoint(record, claim, "c", nonce)
            case "break":
                decision = rules.break_held(record, wanted, nonce)
        if isinstance(decision, Grant):
            if what in ("renew", "park", "release", "commit"):
                assert record is not None and claim.token == record.token == max(tokens)
            assert record is None or decision.record.token >= record.token
            assert parse(decision.record.to_bytes(), "s") == decision.record
            record = decision.record
    assert tokens == sorted(set(tokens))
