"""Print: tables and lines for people, one JSON object for programs. No other module prints."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import click

from cmdop_migrate.errors import CmdopError, Unexpected, Usage

BAR_WIDTH = 24
_WRITE_ERROR = f"{__name__}.write_error"  # key in the `meta` of click's context, which lives as long as one command


def answer(value: dict[str, Any]) -> None:
    """Print the one JSON object of a command. A reader that is gone changes neither the work nor the exit status."""
    try:
        item(value)
    except BrokenPipeError:
        discard_output(sys.stdout)


def item(value: dict[str, Any]) -> None:
    """Print one JSON object of many. Raise BrokenPipeError if the reader is gone."""
    with _write_errors():
        print(json.dumps(value), flush=True)


def progress_line(facts: dict[str, Any]) -> None:
    """Print the progress of a long command as one line of JSON, before its answer. Ignore a reader that is gone (a lost
    connection, for example): the work must be finished all the same."""
    try:
        beat(facts)
    except OSError:
        return


def beat(facts: dict[str, Any]) -> None:
    """Print the progress as one line of JSON. Raise OSError if the reader is gone, for callers that must know."""
    print(json.dumps({"progress": facts}), flush=True)


def line(text: str) -> None:
    """Print one line for people. A failure must not stop work that is half done: a reader that is gone is ignored, and
    any other error (a full disk) is kept for `write_error`, to be reported at the end."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            click.get_current_context().meta.setdefault(_WRITE_ERROR, error)
        discard_output(sys.stdout)


def only(text: str) -> None:
    """Print text that cannot be printed again, such as a credential. Raise Usage if it cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise Usage(f"cannot write to standard output: {error.strerror}", "Give a file, with --out.") from error


def is_void() -> bool:
    """Return True if standard output is the null device, which also replaces one that was closed at the start."""
    return os.fstat(sys.stdout.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def write_error(context: click.Context) -> CmdopError | None:
    """Return the error of the first line that could not be written although its reader was there, or None."""
    error = context.meta.get(_WRITE_ERROR)
    return None if error is None else _not_written(error)


def _not_written(error: OSError) -> CmdopError:
    hint = "The command itself may have succeeded: see cmdop-migrate ls, or events."
    return Unexpected(f"cannot write to standard output: {error.strerror}", hint)


def discard_output(stream: TextIO) -> None:
    """Send all further output of `stream` to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), stream.fileno())


def note(text: str) -> None:
    """Print a note for people to stderr, where it does not mix with output that a program reads."""
    _show(f"{text}\n")


def _show(text: str) -> None:
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        return  # the terminal is gone, and its reader with it


def raw(data: bytes) -> None:
    """Write bytes to standard output. Raise BrokenPipeError if the reader is gone."""
    with _write_errors():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextmanager
def _write_errors() -> Iterator[None]:
    """Re-raise BrokenPipeError; turn other write errors into Unexpected."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _not_written(error) from error


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows in columns as wide as their longest cell; the last column is not padded."""
    lines = [list(headings), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in lines) for column in range(len(headings))]
    shown = []
    for cells in lines:
        padded = [cell.ljust(width) for cell, width in zip(cells[:-1], widths, strict=False)]
        shown.append("  ".join([*padded, cells[-1]]).rstrip())
    line("\n".join(shown))


def hooks(as_json: bool, outcomes: Iterable[Mapping[str, Any]]) -> None:
    """Print a warning for each hook that failed. With --json the answer has them instead."""
    for outcome in outcomes:
        if not as_json and not outcome["ok"]:
            note(printable(f"warning: {outcome['event']} hook {outcome['hook']}: {outcome['problem']}"))


@contextmanager
def bar(title: str, shown: bool, lines: bool) -> Iterator[Callable[[str, float, float, dict[str, Any]], None]]:
    """Show progress as a bar on the terminal, or as `lines` of JSON on stdout before the answer.

    Yield a function of (words, fraction done from 0 to 1, seconds left, the same facts as JSON).
    """
    shown = shown and sys.stderr.isatty()

    def show(words: str, done: float, left: float, facts: dict[str, Any]) -> None:
        if lines:
            progress_line(facts)
        elif shown:
            full = round(done * BAR_WIDTH)
            drawn = "#" * full + "." * (BAR_WIDTH - full)
            text = f"{title} [{drawn}] {done * 100:3.0f} %  {printable(words)}, {left:.0f} s left"
            _show(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")

    try:
        yield show
    finally:
        if shown and not lines:
            _show("\r\x1b[K")


@contextmanager
def progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Show the current step on one line of the terminal, and clear it at the end. Yield the function that shows it."""
    shown = not as_json and sys.stderr.isatty()

    def show(text: str) -> None:
        if shown:
            cut = text[: shutil.get_terminal_size().columns - 3]  # a line that wraps could not be cleared
            _show(f"\r\x1b[K{cut} …" if text else "\r\x1b[K")

    try:
        yield show
    except KeyboardInterrupt:  # the work may be done, undone, or continue in a detached process
        if not as_json:
            note("\ncmdop-migrate: interrupted\n  See the state of the session: cmdop-migrate ls")
        raise
    finally:
        if shown:
            _show("\r\x1b[K")


def printable(text: str) -> str:
    """Return `text` with control characters escaped: names chosen by a session must not control this terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def findings(rows: Sequence[tuple[str, str, str]], columns: int) -> None:
    """Print (check, level, message) as a table in which messages are wrapped between words."""
    taken = max(len(check) for check, _, _ in rows) + max(len(level) for _, level, _ in rows) + 4
    shown = []
    for check, level, message in rows:
        first, *rest = textwrap.wrap(message, max(30, columns - taken), break_on_hyphens=False) or [""]
        shown += [(check, level, first), *(("", "", line) for line in rest)]
    table(("CHECK", "LEVEL", "WHAT"), shown)


def error_field(error: CmdopError | None) -> dict[str, Any]:
    """Return the field `error` of an answer whose work was done in part, or no field."""
    return {"error": error_facts(error)} if error else {}


def error_facts(error: CmdopError) -> dict[str, Any]:
    """Return an error as the JSON object that programs read."""
    return {"code": error.code, "exit": error.exit, "message": error.message, "hint": error.hint}


def failure(error: CmdopError, as_json: bool) -> None:
    """Print an error with its hint, to stderr or as JSON to stdout."""
    if as_json:
        item({"error": error_facts(error)})
        return
    first, *more = error.message.split("\n")
    lines = [f"cmdop-migrate: {printable(first)}", *(f"    {printable(line.expandtabs(2))}" for line in more)]
    note("\n".join([*lines, f"  {error.hint}"] if error.hint else lines))
