"""Take a seeded sample of a long matrix in the default run; `./scripts/test --all` runs every case.

The seed is the commit under test, so each commit tests another sample and a failed run can be repeated. The head of the
report prints it; SUITE_SEED in the environment sets it.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SEED, ALL = "SUITE_SEED", "SUITE_ALL"


def configure(is_all: bool) -> None:
    """Choose the seed once for this run; workers of xdist inherit it by the environment."""
    if is_all:
        os.environ[ALL] = "1"
    if SEED not in os.environ:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        os.environ[SEED] = found.stdout.strip() or "none"


def sample(cases: Sequence[T], count: int, topic: str) -> list[T]:
    """Return `count` of the cases in their order, chosen by the seed and `topic`; all of them with --all."""
    if os.environ.get(ALL):
        return list(cases)
    chosen = random.Random(f"{os.environ.get(SEED)} {topic}").sample(range(len(cases)), min(count, len(cases)))
    return [cases[number] for number in sorted(chosen)]


def sampled(cases: Iterable[Any], count: int, topic: str) -> list[Any]:
    """Return the cases of a parametrized test, of which those outside the sample are marked `heavy`. A case is one
    value, or a tuple of several."""
    known = list(cases)
    chosen = sample(range(len(known)), count, topic)
    found = []
    for number, case in enumerate(known):
        marks = () if number in chosen else (pytest.mark.heavy,)
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return found
