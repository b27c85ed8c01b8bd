"""Run generated sessions from the command line.

python -m tests.random_programs --seed 17 [--size 30] [--shrink] [--print]
python -m tests.random_programs --seeds 0-199          every seed of a range; names those that fail
python -m tests.random_programs --each                 every kind alone, early and late
"""

from __future__ import annotations

import argparse
import collections
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.random_programs import generator, shrink
from tests.random_programs.catalog import CATALOG, left_out
from tests.random_programs.generator import Feature, Process, Spec
from tests.random_programs.rounds import Defect, run
from tests.support.host import a_host


def one_each(names: list[str]) -> Iterator[Spec]:
    """Make a spec per kind: a process with a child, where the kind is built early, and late."""
    if names and names[0].endswith(".."):
        order = list(CATALOG)
        names = order[order.index(names[0].removesuffix("..")) :]
    for kind in CATALOG.values():
        if names and kind.name not in names:
            continue
        for early in (False, True)[: 1 + kind.early]:
            parent = Process(0, None, "root", (Feature(kind.name, 1, early),))
            yield Spec(-1, (parent, Process(1, 0, "group")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0-19", metavar="FIRST-LAST")
    parser.add_argument("--size", type=int, default=30, help="how many processes")
    parser.add_argument("--everything", action="store_true", help="also what is switched off in catalog.py")
    parser.add_argument("--without", default="", help="kinds to leave out, separated by commas")
    parser.add_argument("--shrink", action="store_true", help="reduce what fails to the least that fails the same way")
    parser.add_argument("--print", action="store_true", help="print the spec and do nothing")
    parser.add_argument("--each", nargs="*", metavar="KIND", help="each kind alone; FIRST.. : from that one on")
    options = parser.parse_args()
    without = {name for name in options.without.split(",") if name}
    if not options.everything:
        without |= left_out()
    if options.each is not None:
        specs = list(one_each(options.each))
    else:
        first, _, last = options.seeds.partition("-")
        seeds = [options.seed] if options.seed is not None else range(int(first), int(last or first) + 1)
        specs = [generator.generate(seed, options.size, without) for seed in seeds]
    if options.print:
        print(*specs, sep="\n")
        return 0
    return run_all(specs, options.shrink)


def name_of(spec: Spec) -> str:
    if spec.seed >= 0:
        return f"seed {spec.seed}"
    return str(spec.processes[0].features[0])


def told_to_end(number: int, frame: FrameType | None) -> None:
    """End as with Ctrl-C, and clear up: sessions outlive the process that started them."""
    raise KeyboardInterrupt


def run_all(specs: list[Spec], reduce: bool) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # started in the background, Python ignores the first
        signal.signal(number, told_to_end)
    failed: dict[str, list[str]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as directory, a_host(Path(directory)) as host:
        for spec in specs:
            began = time.monotonic()
            what = name_of(spec)
            try:
                clock = run(host, spec)
                print(f"{what}: ok, {time.monotonic() - began:.1f} s: {clock}", flush=True)
            except Exception as error:
                defect = (
                    error if isinstance(error, Defect) else Defect("error", "".join(traceback.format_exception(error)))
                )
                print(f"{what}: {defect}" + f"\n{spec}" * (spec.seed >= 0), flush=True)
                failed[defect.kind].append(what)
                if reduce:
                    print(f"the least that shows it:\n{shrink.shrink(host, spec, defect)}", flush=True)
    for kind, names in failed.items():
        print(f"{kind}: {len(names)}: {', '.join(names)}")
    print(f"{len(specs)} run, {sum(map(len, failed.values()))} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
