"""Random sessions: plan, park, prove, restore. Nothing is lost, and what the plan says is what happens.

A failure prints the command that runs its seed again, and the same with `--shrink` finds the least that shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.random_programs.catalog import left_out
from tests.random_programs.generator import generate
from tests.random_programs.rounds import Defect, run
from tests.support.host import Host, a_host

DEFAULT, ALL = 20, 200  # seeds in the default suite, and with --all
SMALL, LARGE = 10, 30  # processes of a session: few in the default suite, where all seeds must take minutes only


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with a_host(tmp_path_factory.mktemp("random")) as host:
        yield host


@pytest.mark.parametrize("seed", range(DEFAULT))
def test_random_programs_come_back_or_are_refused(shared_host: Host, seed: int) -> None:
    _run(shared_host, seed, SMALL)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(ALL))
def test_thirty_random_programs_come_back_or_are_refused(shared_host: Host, seed: int) -> None:
    _run(shared_host, seed, LARGE)


def _run(host: Host, seed: int, size: int) -> None:
    spec = generate(seed, size, left_out())
    try:
        run(host, spec)
    except Defect as defect:
        again = f"python -m tests.random_programs --seed {seed} --size {size}"
        pytest.fail(f"{defect}\n\nAgain: {again}\nThe least that shows it: {again} --shrink\n\n{spec}", pytrace=False)
