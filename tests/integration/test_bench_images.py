"""The benchmark runs and its numbers make sense. Nothing here says how fast anything is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.benchlib import common, imagereport
from tests.support.host import PROJECT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bench_images_measures_both_sides(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("sessions need root")
    if not os.environ.get("CMDOP_MIGRATE_BENCH"):
        pytest.skip("takes minutes: set CMDOP_MIGRATE_BENCH=1 to run it, or use scripts/bench images --quick")
    command = [sys.executable, "-m", "scripts.benchlib", "images", "--quick", "--json", "-"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["sizes_mib"] == [64, 256]
    assert set(report["samples"]) == {"file/64", "s3/64", "file/256", "s3/256"}
    for place, samples in report["samples"].items():
        size = int(place.partition("/")[2]) << 20
        one = {key: values[0] for key, values in samples.items()}
        assert all(value >= 0 for value in one.values())
        # Some of it is random, so neither side can have stored less; a quarter is zero, so neither stored it all.
        for stored in (one["script_first_stored"], one["first_stored"]):
            assert size * 0.15 < stored < size * 0.8
        assert one["raw_dump"] / 2 < one["stream_total"] and one["stream_cpu"] > 0
        assert 0 < one["first_frozen"] < one["first_total"]
        assert one["contiguous_new"] < one["first_new"] / 2, "an unchanged page is not sent again"
        assert one["raw_dump"] < one["script_first_total"]
        assert one["restore_first_output"] > 0 and one["lazy_first_output"] > 0
        assert one["first_peak"] > 10 << 20, "the process was seen"
    names = {bar["name"] for bar in report["bars"]}
    assert {"first, parked: total / script's", "first: frozen / raw dump", "peak memory, MiB"} <= names
    assert all(bar["holds"] == (bar["value"] <= bar["limit"]) for bar in report["bars"])


def test_an_unknown_benchmark_is_refused() -> None:
    command = [sys.executable, "-m", "scripts.benchlib", "nothing"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "images" in done.stderr


def test_what_is_asked_for_is_what_is_measured() -> None:
    """`--quick` decides only what was not said."""

    def asked(*words: str) -> tuple[list[int], list[str], int]:
        found = common.ask(list(words), "images", None, "little", (64, 256), ("file", "s3"))
        return found.sizes, found.stores, found.rounds

    with handlers_kept():
        assert asked() == ([64, 512, 2048], ["file", "s3"], 3)
        assert asked("--quick") == ([64, 256], ["file", "s3"], 1)
        assert asked("--quick", "--stores", "s3", "--rounds", "2") == ([64, 256], ["s3"], 2)
        for wrong in (("--stores", "tape"), ("--sizes", "big"), ("--endpoint", "127.0.0.1")):
            with pytest.raises(SystemExit):
                asked(*wrong)


@contextmanager
def handlers_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_bar_compares_within_each_round() -> None:
    """A round on a busy machine is slow on both sides: the ratio must not see it."""
    quiet, busy = 1.0, 10.0
    one = {"ours": [quiet, busy, quiet], "theirs": [2 * quiet, 2 * busy, 2 * quiet]}
    assert imagereport._ratio(one, "ours", "theirs") == 0.5


def test_show_tells_the_spread() -> None:
    assert common.show([1.0, 3.0, 2.0]) == "2.00 (1.00–3.00)"
    assert common.show([]) == "-"
