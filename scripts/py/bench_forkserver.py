"""Measure what the fork server saves: `ls`, `checkpoint` and `restore` of a small session, with and without it in
turns.

docs/decisions/0007-ready.md has the figures and the decision.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench_figure import Figure, percentile
from demo_place import Place, Trouble

from cmdop_migrate.cli.forkserver import compat
from tests.support.servers import seaweed

COMMANDS = (("ls",), ("checkpoint", "--leave-running", "work"), ("checkpoint", "work"), ("restore", "work"))
START_TIMEOUT = 60.0
MODES = {"with": "1", "without": "0"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=15, help="of each command in each mode [15]")
    parser.add_argument("--store", choices=("file", "s3"), default="file", help="[file]")


def measure(options: argparse.Namespace) -> list[Figure]:
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    faults: dict[tuple[str, str], list[int]] = defaultdict(list)
    with _place(options.store) as place:
        for name in ("work", "other"):  # a host without live sessions soon has no agent, and so no fork server
            place.json("run", "-d", "--name", name, "--", "sleep", "100000")
        _wait_for_server(place)
        for number in range(options.runs + 1):
            for mode, value in MODES.items():
                for words in COMMANDS:
                    took, touched = _timed(place, value, *words)
                    if number:  # the first round fills caches and compiles
                        seconds[" ".join(words), mode].append(took)
                        faults[" ".join(words), mode].append(touched)
    return [figure for command in COMMANDS for figure in _figures(" ".join(command), seconds, faults)]


def _figures(
    words: str, seconds: dict[tuple[str, str], list[float]], faults: dict[tuple[str, str], list[int]]
) -> list[Figure]:
    """Return the figures of one command. A client that did the work itself, because the fork server did not answer in
    time, has touched as many pages as one without it: such runs do not count."""
    alone = statistics.median(faults[words, "without"])
    pairs = [
        (with_it, without)
        for with_it, without, touched in zip(
            seconds[words, "with"], seconds[words, "without"], faults[words, "with"], strict=True
        )
        if touched < alone / 2
    ]
    figures = [Figure(f"{words}: runs done by a fork, of {len(seconds[words, 'with'])}", len(pairs), "")]
    if len(pairs) > 1:
        for mode, values in zip(MODES, zip(*pairs, strict=True), strict=True):
            figures += [
                Figure(f"{words}: {mode}, median", statistics.median(values), "s"),
                Figure(f"{words}: {mode}, quartile 1", percentile(values, 0.25), "s"),
                Figure(f"{words}: {mode}, quartile 3", percentile(values, 0.75), "s"),
            ]
        saved = [without - with_it for with_it, without in pairs]
        figures.append(Figure(f"{words}: saved, median of pairs", statistics.median(saved), "s"))
    return figures


@contextlib.contextmanager
def _place(store: str) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(Place())
        if store == "s3":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(seaweed(folder))
            with (place.top / "config.toml").open("a") as file:
                file.write(f'store = "{server.url(server.new_bucket())}"\n')
            place.environment.update(server.environ())
        yield place


def _wait_for_server(place: Place) -> None:
    """Wait until the fork server of the agent listens and has a moment to settle."""
    until = time.monotonic() + START_TIMEOUT
    while not (place.top / "run" / compat.SOCKET).exists():
        if time.monotonic() > until:
            raise Trouble("the fork server does not start")
        time.sleep(0.1)
    time.sleep(2)


def _timed(place: Place, ready: str, *words: str) -> tuple[float, int]:
    """Return (seconds, page faults of the process that was started). A client of the fork server has few faults."""
    environment = {**place.environment, compat.SWITCH: ready}
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "cmdop_migrate", "--json", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        answer = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    took = time.monotonic() - began
    if process.returncode:
        raise Trouble(f"{' '.join(words)}: {json.loads(answer)['error']['message']}")
    return took, usage.ru_minflt
