"""Labs that several tests of a module share: a test leaves every node running, connected and without sessions."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.lab_hosts import TestLab, a_lab


@pytest.fixture(autouse=True, scope="session")
def _as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("a lab needs root")


@pytest.fixture(scope="module")
def lab3() -> Iterator[TestLab]:
    """Three hosts, leases in one etcd, TTL 3 s."""
    with a_lab(hosts=3) as lab:
        yield lab
