"""scripts/bench: finds the benchmark, prints its figures as a table or as JSON.

A benchmark is a module bench_NAME with `measure(options) -> list[Figure]` and `add_options(parser)`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench_figure import Figure

BENCHMARKS = {
    "sessions": "start, memory and latency of live sessions",
    "forkserver": "commands with and without the fork server",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench")
    commands = parser.add_subparsers(dest="name", required=True)
    modules = {name: importlib.import_module(f"bench_{name}") for name in BENCHMARKS}
    for name, words in BENCHMARKS.items():
        command = commands.add_parser(name, help=words)
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        modules[name].add_options(command)
    options = parser.parse_args()
    figures: list[Figure] = modules[options.name].measure(options)
    if options.json:
        print(
            json.dumps({"benchmark": options.name, "machine": machine(), "figures": [asdict(one) for one in figures]})
        )
    else:
        for line in table(figures):
            print(line)
        print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))
    return 0


def machine() -> dict[str, object]:
    """What the figures depend on; a load well above 0 makes them worthless."""
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def table(figures: Iterable[Figure]) -> list[str]:
    rows = [("WHAT", "VALUE", "BAR", ""), *(one.row() for one in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
