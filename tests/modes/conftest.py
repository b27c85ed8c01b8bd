"""The nine failure modes, each told as a user would live it, and checked from what the tool itself says of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.host import Host, a_host
from tests.support.host_pair import World, two

Sign = Callable[..., None]


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with two(tmp_path_factory.mktemp("two")) as made:
        yield made


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """host-a and host-b, without sessions of other tests."""
    yield shared
    shared.clear()


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Host]:
    """Its agent comes by every second."""
    with a_host(tmp_path, ttl="3s") as one:
        yield one


@pytest.fixture
def sign(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Sign:
    """Prints a mode's signature, as it was seen."""

    def say(**facts: object) -> None:
        with capsys.disabled():
            print(f"\n{request.node.name}")
            for key, value in facts.items():
                print(f"  {key:<18} {value if isinstance(value, str) else json.dumps(value)}")

    return say
