"""How the demo speaks: short lines for an 80-column terminal, colours only where they are seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WIDTH = 78
INDENT = "     "


class Say:
    def __init__(self) -> None:
        self._colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def _print(self, text: str, style: str = "", end: str = "\n") -> None:
        print(f"\x1b[{style}m{text}\x1b[0m" if style and self._colours else text, end=end, flush=True)

    def title(self, text: str) -> None:
        self._print(f"\n{text}", "1")

    def step(self, number: int, text: str) -> None:
        self._print(f"\n  {number}  {text}", "1")

    def command(self, *lines: str, prompt: str = "$ ") -> None:
        for index, line in enumerate(lines):
            self._print(f"{INDENT}{'  ' if index else prompt}{line}", "36")

    def result(self, text: str) -> None:
        self._print(f"{INDENT}{text}")

    def row(self, *cells: str) -> None:
        self._print(INDENT + cells[0].ljust(29) + "".join(cell.ljust(19) for cell in cells[1:]).rstrip())

    def good(self, text: str) -> None:
        self._print(f"{INDENT}{text}", "32")

    def end(self, text: str) -> None:
        self._print(f"\n  {text}", "32")

    def bad(self, text: str) -> None:
        self._print(f"\n  demo: {text}", "31")

    def next(self, text: str, *commands: str) -> None:
        self._print(f"\n  {text}", "1")
        self.command(*commands[:1])
        self.command(*commands[1:])

    @contextmanager
    def stream(self, brief: bool = False) -> Iterator[Callable[[str], None]]:
        """For words that come one by one: on one line as long as they fit. `brief` shows first and last."""
        shown: list[str] = []
        column = 0

        def show(word: str) -> None:
            nonlocal column
            shown.append(word)
            if brief and len(shown) > 5:
                return
            if column == 0 or column + len(word) + 1 > WIDTH:
                self._print(("\n" if column else "") + INDENT[:-1], end="")
                column = len(INDENT)
            self._print(f" {word}", "2", end="")
            column += len(word) + 1

        try:
            yield show
        finally:
            if brief and len(shown) > 5:
                self._print(f" ... {shown[-1]}", "2", end="")
            if column:
                self._print("")
