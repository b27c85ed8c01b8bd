"""Test every order of the steps of two contenders (model.py): never do both run."""

from __future__ import annotations

import os

import pytest

from cmdop_migrate.lease.margins import RHO
from tests.unit.lease.model import Model

SLOW, FAST = 1 - RHO, 1 + RHO


REQUESTS = (3, 3) if os.environ.get("CMDOP_MIGRATE_LONG_TESTS") else (2, 2)


@pytest.mark.timeout(1800 if REQUESTS == (3, 3) else 180)
@pytest.mark.parametrize("rates", [(SLOW, FAST), (1.0, 1.0)], ids=["slow-fast", "equal"])
def test_at_most_one_holder_in_any_order(rates: tuple[float, float]) -> None:
    worlds, takeovers, both = Model(rates, requests=REQUESTS).walk()
    assert both is None
    assert worlds > 50_000 and takeovers > 5_000, "the model must get somewhere"


def test_the_model_finds_a_clock_beyond_the_bound() -> None:
    assert Model((0.6, 1.0)).walk()[2] is not None
    assert Model((1.0, 2.1)).walk()[2] is not None


def test_the_model_finds_counting_from_the_request() -> None:
    assert Model((1.0, 1.0), since_sent=True).walk()[2] is not None
