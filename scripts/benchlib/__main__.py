"""`python -m scripts.benchlib NAME …`: finds the benchmark and hands it the rest of the line."""

from __future__ import annotations

import importlib
import sys

NAMES = ("crowd", "fence", "images", "lease", "migrate", "netlink", "relay")


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"usage: scripts/bench sessions|{'|'.join(NAMES)} [--help]", file=sys.stderr)
        return 2
    found = importlib.import_module(f"scripts.benchlib.{sys.argv[1]}")
    return int(found.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
