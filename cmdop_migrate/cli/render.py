"""The only module that prints: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import click

from cmdop_migrate.errors import CmdopError, Unexpected, Usage

BAR = 24
_UNSAID = f"{__name__}.unsaid"  # in what click keeps for one call of a command


def answer(value: dict[str, Any]) -> None:
    """The one JSON object of a command. As with `line`, that nobody reads it changes nothing, least of all how the
    command ends."""
    try:
        item(value)
    except BrokenPipeError:
        say_no_more(sys.stdout)


def item(value: dict[str, Any]) -> None:
    """One JSON object of many."""
    with _heard():
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
    """That it cannot be written, because nobody reads it any more or the disk is full, must not stop what is half done:
    `unsaid` has it for the end."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            click.get_current_context().meta.setdefault(_UNSAID, error)
        say_no_more(sys.stdout)


def only(text: str) -> None:
    """What is said once, and never again: Usage when it cannot be written, whoever was to read it."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise Usage(f"cannot write to standard output: {error.strerror}", "Give a file, with --out.") from error


def is_void() -> bool:
    """Whether standard output is the null device, which is also what stands in for one that is closed."""
    return os.fstat(sys.stdout.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def unsaid(context: click.Context) -> CmdopError | None:
    """What could not be written, though somebody may wait for it."""
    error = context.meta.get(_UNSAID)
    return None if error is None else _unwritten(error)


def _unwritten(error: OSError) -> CmdopError:
    """A disk that is full of what we say is no sign that nothing was done."""
    hint = "What was asked for may be done all the same: see cmdop-migrate ls, or events."
    return Unexpected(f"cannot write to standard output: {error.strerror}", hint)


def say_no_more(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), stream.fileno())


def note(text: str) -> None:
    """For the person only: never mixes with what a program reads."""
    _show(f"{text}\n")


def _show(text: str) -> None:
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        return  # the person's terminal is gone, and with it whoever could read this


def raw(data: bytes) -> None:
    with _heard():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextmanager
def _heard() -> Iterator[None]:
    """Who reads it and leaves wants no more: BrokenPipeError. Any other trouble is said as such."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritten(error) from error


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the last one is not padded."""
    lines = [list(headings), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(headings))]
    shown = []
    for cells in lines:
        padded = [cell.ljust(width) for cell, width in zip(cells[:-1], widths, strict=False)]
        shown.append("  ".join([*padded, cells[-1]]).rstrip())
    line("\n".join(shown))


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
            _show(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")

    try:
        yield show
    finally:
        if shown and not lines:
            _show("\r\x1b[K")


@contextmanager
def progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """What is being done now, on one line of the person's terminal, gone when it is over."""
    shown = not as_json and sys.stderr.isatty()

    def show(text: str) -> None:
        if shown:
            cut = text[: shutil.get_terminal_size().columns - 3]  # a line that wraps could not be taken back
            _show(f"\r\x1b[K{cut} …" if text else "\r\x1b[K")

    try:
        yield show
    except KeyboardInterrupt:  # how far it came cannot be told from here: it may be done, or go on behind us
        if not as_json:
            note("\ncmdop-migrate: interrupted\n  See where it stands: cmdop-migrate ls")
        raise
    finally:
        if shown:
            _show("\r\x1b[K")


def printable(text: str) -> str:
    """What a session chose to call itself must not move this terminal's cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def error_facts(error: CmdopError) -> dict[str, Any]:
    return {"code": error.code, "exit": error.exit, "message": error.message, "hint": error.hint}


def failure(error: CmdopError, as_json: bool) -> None:
    if as_json:
        item({"error": error_facts(error)})
        return
    first, *more = error.message.split("\n")
    lines = [f"cmdop-migrate: {printable(first)}", *(f"    {printable(line.expandtabs(2))}" for line in more)]
    note("\n".join([*lines, f"  {error.hint}"] if error.hint else lines))
