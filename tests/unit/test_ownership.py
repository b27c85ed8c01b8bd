"""Whose is a session that was being handed over: every case of the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cmdop_migrate.host.move_journal import Move
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.migration.ownership import LocalCopy, Ownership, decide

OWN, OTHER = "host-a-boot", "host-b-boot"
MOVE = Move("m", "s", "work", "host-a", "host-b", token=3, started=0.0, checkpoint="c2", parent="c1")
HELD = LeaseRecord("s", 3, "held", "host-a", OWN, 15.0, 4, "c1", "0" * 16)
PARKED = replace(HELD, state="parked", checkpoint="c2")
TAKEN = replace(PARKED, token=4, state="held", host="host-b", instance=OTHER, renewals=0)


@pytest.mark.parametrize(
    ("copy", "lease", "verdict"),
    [
        ("runs", HELD, Ownership.HERE),
        ("runs", TAKEN, Ownership.HERE),  # its agent will hear of it: not ours to decide
        ("frozen", HELD, Ownership.OURS),  # it was announced, and not parked yet
        ("frozen", PARKED, Ownership.FREE),
        ("frozen", replace(PARKED, token=5, instance=OTHER), Ownership.FREE),  # the target gave it back
        ("frozen", TAKEN, Ownership.WATCH),
        ("frozen", replace(TAKEN, renewals=1), Ownership.WATCH),  # a restore renews once before it lets it run
        ("frozen", replace(TAKEN, renewals=2), Ownership.THERE),
        ("frozen", replace(TAKEN, checkpoint="c3"), Ownership.THERE),
        ("frozen", replace(TAKEN, instance=OWN), Ownership.OURS),  # taken back, and cut off before it was thawed
        ("frozen", replace(TAKEN, state="parked", checkpoint="c3"), Ownership.PARKED),
        ("frozen", replace(TAKEN, state="free", checkpoint=None), Ownership.OVER),
        ("frozen", replace(TAKEN, state="free"), Ownership.FREE),  # it died there with its holder
        ("gone", HELD, Ownership.OURS),
        ("gone", replace(HELD, instance=OTHER), Ownership.WATCH),  # ours, of before a reboot
        ("gone", PARKED, Ownership.PARKED),
        ("gone", replace(HELD, state="free", checkpoint=None), Ownership.FREE),  # died, all of it captured
        ("gone", replace(HELD, state="free"), Ownership.FREE),  # … with the checkpoint before it kept
        ("gone", replace(HELD, state="free", checkpoint="c3"), Ownership.PARKED),  # it ran on, and made another
        ("gone", TAKEN, Ownership.WATCH),
        ("gone", replace(TAKEN, renewals=2), Ownership.THERE),
        ("gone", replace(TAKEN, state="free", checkpoint=None), Ownership.OVER),
        ("ended", replace(HELD, state="free", checkpoint=None), Ownership.OVER),
        ("ended", replace(TAKEN, renewals=2), Ownership.THERE),
    ],
)
def test_decision_by_local_copy_and_lease(copy: LocalCopy, lease: LeaseRecord, verdict: Ownership) -> None:
    assert decide(copy, lease, OWN, MOVE) is verdict


@pytest.mark.parametrize(
    ("lease", "verdict"),
    [
        (HELD, Ownership.OURS),
        (replace(HELD, state="free", checkpoint=None), Ownership.OVER),
        (replace(HELD, state="free"), Ownership.PARKED),  # an older checkpoint is left
    ],
)
def test_decision_when_nothing_was_captured(lease: LeaseRecord, verdict: Ownership) -> None:
    assert decide("gone", lease, OWN, replace(MOVE, checkpoint=None)) is verdict


@pytest.mark.parametrize("token", [4, 5, 9])
@pytest.mark.parametrize("renewals", [0, 1, 2, 7])
@pytest.mark.parametrize("checkpoint", ["c2", "c3", None])
def test_frozen_copy_never_resumes_while_another_host_holds_the_lease(
    token: int, renewals: int, checkpoint: str | None
) -> None:
    lease = replace(TAKEN, token=token, renewals=renewals, checkpoint=checkpoint)
    assert decide("frozen", lease, OWN, MOVE) in (Ownership.WATCH, Ownership.THERE)
