"""Checkpoint and restore, beside CRIU alone and beside a script. docs/internals/benchmarks.md tells how to read it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cmdop_migrate.cli.forkserver.compat import SOCKET
from cmdop_migrate.host import resources
from scripts.benchlib import common, rivals
from scripts.benchlib.imagereport import bars, tables
from scripts.benchlib.moves import Stores, Subject
from tests.support.host import CM, Host, a_host, until

MEMORY = Path("/dev/shm")
SETTLE = 3.0  # after the first command that used S3 the ready process loads what that needs
PATTERNS = ("contiguous", "scattered")
Samples = dict[str, list[float]]
_WATCHED = (
    *("raw_dump", "raw_dump_again", "first_frozen", "contiguous_frozen", "script_first_total", "first_parked_total"),
    *(
        "stream_total",
        "first_total",
        "script_second_total",
        "contiguous_parked_total",
        "contiguous_total",
        "raw_restore",
        "script_fetch",
        "restore_first_output",
    ),
    *("restore_total", "lazy_first_output"),
)


def main(arguments: list[str]) -> int:
    asked = common.ask(arguments, "images", __doc__, "64 and 256 MiB, one round", (64, 256), ("file", "s3"))
    facts = asked.facts()
    with common.warm(asked.warm):
        results = _measure(asked)
    facts["load_after"] = common.load()
    found = bars(results, asked.sizes)
    report = {
        "machine": facts,
        "sizes_mib": asked.sizes,
        "samples": {f"{store}/{size}": dict(one) for (store, size), one in results.items()},
        "bars": [bar.to_json() for bar in found],
    }
    asked.report(report, f"{tables(results)}\n{common.bars_table(found)}")
    return 0


def _measure(asked: common.Asked) -> dict[tuple[str, int], Samples]:
    sizes, stores, warm_up = asked.sizes, asked.stores, not asked.quick
    results: dict[tuple[str, int], Samples] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=MEMORY)))
        server = stack.enter_context(asked.s3(folder)) if "s3" in stores else None
        extra = server.environ() if server else {}
        os.environ.update(extra)  # for what is sent from here
        host = stack.enter_context(a_host(folder / "host", extra=extra, ready=True))  # as it is unless one turns it off
        stack.enter_context(_served(host))
        for size in sizes:
            if warm_up:
                rivals.warm(memory, 5 * size)
            for name in stores:
                results[name, size] = defaultdict(list)
            with _subject(host, size, memory, asked.random) as (subject, twin):
                if warm_up:
                    subject.raw_dump()
                    for name in stores:
                        places = Stores(name, folder / "stores" / f"{size}-warm-{name}", server)
                        subject.checkpoint(places, "warm")
                        places.remove()
                    time.sleep(SETTLE)
                for number in range(asked.rounds):
                    for name in stores:
                        places = Stores(name, folder / "stores" / f"{size}-{number}", server)
                        apart = Stores(name, folder / "stores" / f"{size}-{number}-apart", server)
                        bare = Stores(name, folder / "stores" / f"{size}-{number}-bare", server)
                        began = time.monotonic()
                        samples = _round(subject, twin, places, apart, bare)
                        for key, value in samples.items():
                            results[name, size][key].append(value)
                        took = time.monotonic() - began
                        _say(f"{size} MiB, {name}, round {number + 1}: {took:.0f} s, load {samples['load']:.1f}")
                        _say("  " + ", ".join(f"{key} {samples[key]:.2f}" for key in _WATCHED))
                        for one in (places, apart, bare):
                            one.remove()
        ends = sorted({min(sizes), max(sizes)})
        for name in stores:
            _first_outputs(
                host, memory, asked, ends, Stores(name, folder / "stores" / f"turns-{name}", server), results
            )
    return results


def _first_outputs(
    host: Host,
    memory: Path,
    asked: common.Asked,
    sizes: list[int],
    places: Stores,
    results: dict[tuple[str, int], Samples],
) -> None:
    """What is compared across sizes is measured in turns: a quarter of an hour later the machine is another."""
    criu = resources.find_criu(_config(host))
    subjects = {size: Subject(host, criu, memory, rivals.Payload(size, asked.random), f"of-{size}") for size in sizes}
    for subject in subjects.values():
        subject.start()
    for _ in range(asked.rounds):
        for size, subject in subjects.items():
            found: dict[str, float] = {}
            for key in ("turns_restore", "turns_lazy"):
                subject.tell("contiguous")
                subject.checkpoint(places, "parked", park=True)
                found |= subject.restore(places, key, lazy=key == "turns_lazy")
                subject.digest()  # all of its memory is there
            for key in ("turns_restore_first_output", "turns_restore_phase_fetch", "turns_lazy_first_output"):
                results[places.kind, size][key].append(found[key])
            first, lazy = found["turns_restore_first_output"], found["turns_lazy_first_output"]
            _say(f"{size} MiB, {places.kind}, in turns: first output {first:.2f}, --lazy {lazy:.2f}")
    for subject in subjects.values():
        subject.end()
    places.remove()


@contextmanager
def _served(host: Host) -> Iterator[None]:
    """With an agent that stays, as scripts/install sets it up: what a command starts leaves with the last session."""
    host.dir.mkdir(exist_ok=True)
    with subprocess.Popen([*CM, "agent"], env=host.env(), cwd="/", stdout=subprocess.DEVNULL) as agent:
        try:
            until((host.run / SOCKET).exists, 30, "the agent's ready process is there")
            yield
        finally:
            agent.terminate()


@contextmanager
def _subject(host: Host, mib: int, memory: Path, random: int) -> Iterator[tuple[Subject, rivals.Twin]]:
    host.dir.mkdir(exist_ok=True)
    criu = resources.find_criu(_config(host))
    payload = rivals.Payload(mib, random)
    twin = rivals.Twin(criu, payload, memory)
    subject = Subject(host, criu, memory, payload)
    try:
        subject.start()
        yield subject, twin
        subject.end()
    finally:
        twin.close()


def _config(host: Host) -> Any:
    from cmdop_migrate import config

    return config.load(environ=host.env())


def _round(subject: Subject, twin: rivals.Twin, places: Stores, apart: Stores, bare: Stores) -> dict[str, float]:
    """Run everything once, ours and theirs in turn, so that other load disturbs both. A session that is parked (after
    the script it is gone) waits for the whole upload; one that resumes does not: both are measured, each first
    checkpoint to its own store, and memory that is only sent to a third."""
    found: dict[str, float] = {"load": common.load()}
    found["raw_dump"] = subject.raw_dump()
    found |= subject.script(places, "script_first")
    found |= subject.stream(bare, "stream")
    found |= subject.checkpoint(apart, "first_parked", park=True)
    subject.restore(apart, "unmeasured", lazy=False)
    found |= subject.checkpoint(places, "first")
    for pattern in PATTERNS:
        subject.tell(pattern)
        if pattern == PATTERNS[0]:  # to the script all changes are one: it sends everything
            found |= subject.script(places, "script_second")
        found |= subject.checkpoint(places, pattern)
    found["raw_dump_again"] = subject.raw_dump()
    subject.tell("contiguous")
    digest = subject.digest()
    found |= subject.checkpoint(places, "contiguous_parked", park=True)
    found["raw_restore"] = twin.restore()
    found |= subject.fetch_script(places)
    found |= subject.restore(places, "restore", lazy=False)
    if subject.digest() != digest:
        raise RuntimeError("the memory that came back is not the memory that went")
    subject.tell("scattered")
    digest = subject.digest()
    found |= subject.checkpoint(places, "scattered_parked", park=True)
    found["raw_restore_again"] = twin.restore()
    found |= subject.restore(places, "lazy", lazy=True)
    if subject.digest() != digest:
        raise RuntimeError("the memory that came back is not the memory that went")
    subject.tell("pages")
    found |= subject.checkpoint(places, "pages")
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
