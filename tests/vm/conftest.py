"""Tests on virtual machines. scripts/test-vm brings those up and says so in the environment; without them nothing here is
collected, and the head of the report says so (tests/conftest.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from scripts.vmlib.model import fleet
from tests.vm.machines import Machines, mended

if "CMDOP_VM_RUN" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def vms() -> Iterator[Machines]:
    """All of them run when the test begins, and again when it has ended, without sessions."""
    with mended(Machines(fleet())) as made:
        yield made
