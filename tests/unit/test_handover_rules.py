"""Whose is a session that was being handed over: every case of the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cmdop_migrate.host.move_journal import Move
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.migration.ownership import Copy, Verdict, judge

OWN, OTHER = "host-a-boot", "host-b-boot"
MOVE = Move("m", "s", "work", "host-a", "host-b", token=3, started=0.0, checkpoint="c2", parent="c1")
HELD = LeaseRecord("s", 3, "held", "host-a", OWN, 15.0, 4, "c1", "0" * 16)
PARKED = replace(HELD, state="parked", checkpoint="c2")
TAKEN = replace(PARKED, token=4, state="held", host="host-b", instance=OTHER, renewals=0)


@pytest.mark.parametrize(
    ("copy", "lease", "verdict"),
    [
        ("runs", HELD, Verdict.HERE),
        ("runs", TAKEN, Verdict.HERE),  # its agent will hear of it: not ours to judge
        ("stands", HELD, Verdict.OURS),  # it was announced, and not parked yet
        ("stands", PARKED, Verdict.FREE),
        ("stands", replace(PARKED, token=5, instance=OTHER), Verdict.FREE),  # the target gave it back
        ("stands", TAKEN, Verdict.WATCH),
        ("stands", replace(TAKEN, renewals=1), Verdict.WATCH),  # a restore renews once before it lets it run
        ("stands", replace(TAKEN, renewals=2), Verdict.THERE),
        ("stands", replace(TAKEN, checkpoint="c3"), Verdict.THERE),
        ("stands", replace(TAKEN, instance=OWN), Verdict.OURS),  # taken back, and cut off before it was thawed
        ("stands", replace(TAKEN, state="parked", checkpoint="c3"), Verdict.PARKED),
        ("stands", replace(TAKEN, state="free", checkpoint=None), Verdict.OVER),
        ("stands", replace(TAKEN, state="free"), Verdict.FREE),  # it died there with its holder
        ("gone", HELD, Verdict.OURS),
        ("gone", replace(HELD, instance=OTHER), Verdict.WATCH),  # ours, of before a reboot
        ("gone", PARKED, Verdict.PARKED),
        ("gone", replace(HELD, state="free", checkpoint=None), Verdict.FREE),  # died, all of it captured
        ("gone", replace(HELD, state="free"), Verdict.FREE),  # … with the checkpoint before it kept
        ("gone", replace(HELD, state="free", checkpoint="c3"), Verdict.PARKED),  # it ran on, and made another
        ("gone", TAKEN, Verdict.WATCH),
        ("gone", replace(TAKEN, renewals=2), Verdict.THERE),
        ("gone", replace(TAKEN, state="free", checkpoint=None), Verdict.OVER),
        ("ended", replace(HELD, state="free", checkpoint=None), Verdict.OVER),
        ("ended", replace(TAKEN, renewals=2), Verdict.THERE),
    ],
)
def test_the_lease_alone_tells(copy: Copy, lease: LeaseRecord, verdict: Verdict) -> None:
    assert judge(copy, lease, OWN, MOVE) is verdict


@pytest.mark.parametrize(
    ("lease", "verdict"),
    [
        (HELD, Verdict.OURS),
        (replace(HELD, state="free", checkpoint=None), Verdict.OVER),
        (replace(HELD, state="free"), Verdict.PARKED),  # an older checkpoint is left
    ],
)
def test_nothing_was_captured(lease: LeaseRecord, verdict: Verdict) -> None:
    assert judge("gone", lease, OWN, replace(MOVE, checkpoint=None)) is verdict


@pytest.mark.parametrize("token", [4, 5, 9])
@pytest.mark.parametrize("renewals", [0, 1, 2, 7])
@pytest.mark.parametrize("checkpoint", ["c2", "c3", None])
def test_a_copy_never_goes_on_against_another_holder(token: int, renewals: int, checkpoint: str | None) -> None:
    lease = replace(TAKEN, token=token, renewals=renewals, checkpoint=checkpoint)
    assert judge("stands", lease, OWN, MOVE) in (Verdict.WATCH, Verdict.THERE)
