"""Input that waits for a gate, is refused by it, or is dropped by a seize: on a real terminal, with a scripted gate."""

from __future__ import annotations

import json
import os
import pty
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate.holder.input_journal import Journal
from cmdop_migrate.holder.input_queue import LINE_LIMIT, Inputs, Piece


class Desk:
    """A terminal with inputs, and the questions its gate was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        os.set_blocking(self.slave, False)
        self.asked: list[dict[str, Any]] = []
        self.settled: list[tuple[str, str, int]] = []
        self.inputs = Inputs(Journal(str(path)), 1)
        self.inputs.ask = lambda facts: self.asked.append(dict(facts))

    def type(self, actor: str, data: bytes) -> None:
        self.inputs.add(actor, data, self.master, self._settled)

    def _settled(self, piece: Piece, error: str, why: str) -> None:
        self.settled.append((error, why, len(piece.data)))

    def say(self, allowed: bool, why: str = "") -> None:
        self.inputs.decide(allowed, why, self.master)

    def read(self) -> bytes:
        try:
            return os.read(self.slave, 65536)
        except BlockingIOError:
            return b""

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def mode(self, canonical: bool, signals: bool = True) -> None:
        modes = termios.tcgetattr(self.slave)
        for flag, on in ((termios.ICANON, canonical), (termios.ISIG, signals)):
            modes[3] = modes[3] | flag if on else modes[3] & ~flag
        modes[3] &= ~termios.ECHO if not canonical else ~0
        modes[0] &= ~termios.ICRNL if not canonical else ~0
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    one = Desk(tmp_path / "j")
    yield one
    os.close(one.master)
    os.close(one.slave)


def test_a_gated_line_waits_with_all_input_behind_it(desk: Desk) -> None:
    desk.type("ann", b"ls")
    assert desk.asked == []
    desk.type("bob", b" -l\rwhoami\r")
    desk.type("cy", b"x")
    assert desk.read() == b"" and desk.lines() == []
    (asked,) = desk.asked
    assert (asked["actor"], asked["originators"], asked["text"]) == ("bob", ["ann", "bob"], "ls -l\r")
    assert (asked["seq"], asked["token"], asked["plain"], asked["partial"], asked["secret"]) == (
        1,
        1,
        True,
        False,
        False,
    )
    desk.say(True)
    assert desk.read() == b"ls -l\n" and desk.asked[1]["text"] == "whoami\r"
    desk.say(True, "the gate failed: no answer")
    assert desk.read() == b"whoami\n"
    assert desk.inputs.staged()["authors"] == ["cy"]
    got = [(one["actor"], one["originators"], one["gate"], one.get("why")) for one in desk.lines()]
    assert got == [("bob", ["ann", "bob"], "allowed", None), ("bob", ["bob"], "allowed", "the gate failed: no answer")]


def test_a_refused_line_is_erased_and_typeahead_dropped(desk: Desk) -> None:
    desk.type("ann", b"rm -rf /\recho next\r")
    desk.type("bob", b"ls\r")
    desk.say(False, "no")
    assert desk.settled == [("gate", "no", len(b"\recho next\r"))]
    assert desk.asked[-1]["text"] == "ls\r" and desk.asked[-1]["originators"] == ["bob"]
    desk.say(True)
    assert desk.read() == b"ls\n"
    refused, passed = desk.lines()
    assert (refused["gate"], refused["why"], refused["text"], refused["originators"]) == (
        "refused",
        "no",
        "rm -rf /\r",
        ["ann"],
    )
    assert passed["gate"] == "allowed"


def test_a_quoted_kill_does_not_save_the_line(desk: Desk) -> None:
    desk.type("ann", b"evil\x16\r")
    desk.say(False, "no")
    desk.type("ann", b"\r")
    desk.say(True)
    assert desk.read() == b"\n"


def test_a_line_that_cannot_be_erased_is_asked_about_again(desk: Desk) -> None:
    modes = termios.tcgetattr(desk.slave)
    modes[6][termios.VKILL] = b"\0"
    termios.tcsetattr(desk.slave, termios.TCSANOW, modes)
    desk.type("ann", b"evil\r")
    desk.say(False)
    desk.type("bob", b"\r")
    assert (desk.asked[-1]["text"], desk.asked[-1]["originators"]) == ("evil\r", ["ann", "bob"])


@pytest.mark.parametrize(
    ("canonical", "typed", "asked"),
    [
        (True, b"r\x04m -rf /\r", ["r\x04", "r\x04m -rf /\r"]),  # half a line to the program
        (True, b"\x04ls\r", ["ls\r"]),  # the end of a file: a line of its own
        (False, b"r\x04m -rf /\r", ["r\x04m -rf /\r"]),  # deletes a letter
        (False, b"evil\x0f", ["evil\x0f"]),  # readline runs it
        (True, b"evil\x1a\r", ["evil\x1a\r"]),  # may leave the line as it is
        (True, b"evil\x1c\n", ["evil\x1c\n"]),
        (True, b"evil\x03ls\r", ["ls\r"]),  # interrupted: the line is gone
        (True, b"x" * LINE_LIMIT + b"y\r", ["x" * LINE_LIMIT, "y\r"]),
    ],
)
def test_the_question_holds_actor_text_and_authors(desk: Desk, canonical: bool, typed: bytes, asked: list[str]) -> None:
    desk.mode(canonical)
    desk.type("ann", typed)
    while desk.inputs.asked is not None:
        desk.say(True)
        desk.read()
    assert [one["text"] for one in desk.asked] == asked
    assert all(one["partial"] == (not one["text"].endswith(("\r", "\n"))) for one in desk.asked)


def test_ctrl_c_in_raw_mode_does_not_hide_input_from_the_gate(desk: Desk) -> None:
    desk.mode(canonical=False, signals=False)
    desk.type("ann", b"evil\x03\r")
    assert desk.asked[0]["text"] == "evil\x03\r" and not desk.asked[0]["plain"]


def test_secrets_are_not_shown_to_a_gate(desk: Desk) -> None:
    modes = termios.tcgetattr(desk.slave)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(desk.slave, termios.TCSANOW, modes)
    desk.type("ann", b"geheim\r")
    (asked,) = desk.asked
    assert (asked["secret"], asked["text"], asked["plain"], asked["bytes"]) == (True, None, False, 7)
    desk.say(False, "no")
    assert desk.lines()[0]["text"] is None and b"geheim" not in desk.path.read_bytes()


def test_a_seize_drops_what_others_have_waiting(desk: Desk) -> None:
    desk.type("ann", b"one\rtwo\r")
    desk.type("root", b"\x03")
    assert desk.inputs.drop(lambda one: one.actor != "root", "turn", "seized") == 5
    assert desk.settled == [("turn", "seized", 5)]
    desk.inputs.flush(desk.master)
    assert desk.settled[1:] == [("", "", 0)]
    (line,) = desk.lines()
    assert (line["actor"], line["originators"], line["text"]) == ("root", ["ann", "root"], "one\x03")


def test_an_answer_about_dropped_input_admits_nothing(desk: Desk) -> None:
    desk.mode(canonical=False)
    desk.inputs.ask = None
    desk.type("filler", b"x" * 40000)  # the terminal is full now
    desk.inputs.drop(lambda one: True, "turn")
    desk.inputs.ask = lambda facts: desk.asked.append(dict(facts))
    desk.inputs.stage({"data": "", "authors": [], "secret": False})
    desk.type("ann", b"\r")
    desk.say(True)  # but there is no room for it
    assert not desk.inputs.is_empty
    desk.inputs.drop(lambda one: one.actor == "ann", "turn")
    desk.type("bob", b"\r")
    while desk.read():
        desk.inputs.flush(desk.master)
    assert [one["actor"] for one in desk.asked] == ["ann", "bob"] and desk.inputs.asked is not None


def test_the_gate_is_asked_again_after_a_freeze(desk: Desk, tmp_path: Path) -> None:
    desk.type("ann", b"half")
    desk.type("bob", b"\rrest")
    desk.inputs.cancel()
    carried = json.loads(json.dumps([desk.inputs.queued(), desk.inputs.staged()]))
    assert carried[0] == [["bob", "\rrest", False]]
    desk.inputs.flush(desk.master)
    assert len(desk.asked) == 2 and desk.asked[0] == desk.asked[1]
    other = Inputs(Journal(str(tmp_path / "other")), 2)
    other.ask = lambda facts: desk.asked.append(dict(facts))
    for actor, data, secret in carried[0]:
        other.queue(data.encode("latin-1"), actor, secret)
    other.stage(carried[1])
    other.flush(desk.master)
    assert (desk.asked[2]["text"], desk.asked[2]["originators"], desk.asked[2]["token"]) == (
        "half\r",
        ["ann", "bob"],
        2,
    )
