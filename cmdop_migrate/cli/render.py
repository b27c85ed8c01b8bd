"""The only module that prints: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cmdop_migrate.errors import CmdopError

BAR = 24


def answer(value: dict[str, Any]) -> None:
    """The one JSON object of a command."""
    print(json.dumps(value), flush=True)


def progress_line(facts: dict[str, Any]) -> None:
    """Before the one object, with --json, on its own line: where a long command stands. That nobody reads it any more
    (the connection it came over is gone) must not stop what is half done."""
    try:
        beat(facts)
    except OSError:
        return


def beat(facts: dict[str, Any]) -> None:
    """The same, for who must know whether anybody listens: OSError when not."""
    print(json.dumps({"progress": facts}), flush=True)


def line(text: str) -> None:
    print(text, flush=True)


def note(text: str) -> None:
    """For the person only: never mixes with what a program reads."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return  # the person's terminal is gone, and with it whoever could read this


def raw(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the last one is not padded."""
    lines = [list(headings), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for cells in lines:
        padded = [cell.ljust(width) for cell, width in zip(cells[:-1], widths, strict=False)]
        print("  ".join([*padded, cells[-1]]).rstrip())


def hooks(as_json: bool, outcomes: Iterable[Mapping[str, Any]]) -> None:
    """What failed; a program finds it in the answer."""
    for one in outcomes:
        if not as_json and not one["ok"]:
            note(printable(f"warning: {one['event']} hook {one['hook']}: {one['problem']}"))


@contextmanager
def bar(title: str, shown: bool, lines: bool) -> Iterator[Callable[[str, float, float, dict[str, Any]], None]]:
    """(words, done from 0 to 1, seconds left, the same for programs), as a bar on the person's terminal or as `lines`
    of JSON on stdout, before the one object."""
    shown = shown and sys.stderr.isatty()

    def show(words: str, done: float, left: float, facts: dict[str, Any]) -> None:
        if lines:
            progress_line(facts)
        elif shown:
            full = round(done * BAR)
            text = (
                f"{title} [{'#' * full}{'.' * (BAR - full)}] {done * 100:3.0f} %  {printable(words)}, {left:.0f} s left"
            )
            print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown and not lines:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """What is being done now, on one line of the person's terminal, gone when it is over."""
    shown = not as_json and sys.stderr.isatty()

    def show(text: str) -> None:
        if shown:
            cut = text[: shutil.get_terminal_size().columns - 3]  # a line that wraps could not be taken back
            print(f"\r\x1b[K{cut} …" if text else "\r\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """What a session chose to call itself must not move this terminal's cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def error_facts(error: CmdopError) -> dict[str, Any]:
    return {"code": error.code, "exit": error.exit, "message": error.message, "hint": error.hint}


def failure(error: CmdopError, as_json: bool) -> None:
    if as_json:
        answer({"error": error_facts(error)})
        return
    note(f"cmdop-migrate: {printable(error.message)}" + (f"\n  {error.hint}" if error.hint else ""))
