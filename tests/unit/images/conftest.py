from __future__ import annotations

from pathlib import Path

import pytest

from cmdop_migrate.images.format.keys import KeyRing, new_key
from cmdop_migrate.storage.memory import MemoryStore


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing((new_key(),))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    return tmp_path / "spill"
