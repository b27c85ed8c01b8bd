"""The order of inputs, who wrote them, and what is never written down."""

from __future__ import annotations

import json
import os
import pty
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.holder import input_journal as journal_module
from cmdop_migrate.holder.input_journal import Journal, digest
from cmdop_migrate.holder.input_queue import QUEUE_LIMIT, Inputs


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    yield master, slave
    os.close(master)
    os.close(slave)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def echo(slave: int, on: bool) -> None:
    modes = termios.tcgetattr(slave)
    modes[3] = modes[3] | termios.ECHO if on else modes[3] & ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, modes)


def test_commit_names_everyone_whose_bytes_are_in_it(tmp_path: Path, terminal: tuple[int, int]) -> None:
    inputs = Inputs(Journal(str(tmp_path / "j")), token=7)
    assert inputs.add("ann", b"rm -rf", terminal[0]) == 1
    assert inputs.add("bob", b" /tmp/x", terminal[0]) == 1
    assert inputs.add("ann", b"\rls\rnext", terminal[0]) == 2
    assert inputs.add("cy", b"\x03", terminal[0]) == 3
    got = [(one["seq"], one["actor"], one["originators"], one["text"], one["token"]) for one in lines(tmp_path / "j")]
    assert got == [
        (1, "ann", ["ann", "bob"], "rm -rf /tmp/x\r", 7),
        (2, "ann", ["ann"], "ls\r", 7),
        (3, "cy", ["ann", "cy"], "next\x03", 7),
    ]


def test_secrets_are_not_journalled(tmp_path: Path, terminal: tuple[int, int]) -> None:
    """Typed where nothing is echoed: not written, even when it is committed after the echo is back."""
    master, slave = terminal
    inputs = Inputs(Journal(str(tmp_path / "j")), 1)
    echo(slave, False)
    inputs.add("ann", b"geheim\r", master)
    inputs.add("ann", b"gehe", master)
    echo(slave, True)
    inputs.add("ann", b"im\r", master)
    inputs.add("ann", b"public\r", master)
    assert [one["text"] for one in lines(tmp_path / "j")] == [None, None, "public\r"]
    assert b"gehe" not in (tmp_path / "j").read_bytes()


def test_staged_input_continues_in_the_next_incarnation(tmp_path: Path, terminal: tuple[int, int]) -> None:
    master, slave = terminal
    before, after = Inputs(Journal(str(tmp_path / "a")), 1), Inputs(Journal(str(tmp_path / "b")), 2)
    before.add("ann", b"half \xff", master)
    after.stage(json.loads(json.dumps(before.staged())))
    after.add("bob", b"whole\r", master)
    (line,) = lines(tmp_path / "b")
    assert (line["originators"], line["text"], line["bytes"]) == (["ann", "bob"], "half \ufffdwhole\r", 12)
    echo(slave, False)
    before.add("cy", b"secret", master)
    assert before.staged() == {"data": "\0" * 12, "authors": ["ann", "cy"], "secret": True}
    after.stage(before.staged())
    echo(slave, True)
    after.add("cy", b"\r", master)
    assert lines(tmp_path / "b")[-1]["text"] is None
    assert after.staged() == {"data": "", "authors": [], "secret": False}


def test_journal_numbers_continue_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(str(path))
    assert [journal.write({"text": "a"}), journal.write({"text": "b"})] == [1, 2]
    with path.open("ab") as file:
        file.write(b'{"seq":3,"te')
    again = Journal(str(path))
    assert again.write({"text": "c"}) == 3
    whole = path.read_text().splitlines()
    assert [json.loads(whole[0])["seq"], json.loads(whole[1])["seq"], whole[2]] == [1, 2, '{"seq":3,"te']
    assert json.loads(whole[3]) == {"seq": 3, "text": "c", "prev": digest(whole[1].encode())}


def test_a_full_disk_leaves_a_gap_in_the_journal() -> None:
    journal = Journal("/dev/full")
    assert [journal.write({"text": "a"}), journal.write({"text": "b"})] == [1, 2]


def test_input_that_the_terminal_has_no_room_for_waits_in_order(tmp_path: Path, terminal: tuple[int, int]) -> None:
    master, slave = terminal
    modes = termios.tcgetattr(slave)
    modes[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    inputs = Inputs(Journal(str(tmp_path / "j")), 1)
    data = b"".join(b"%06d," % number for number in range(20000))
    inputs.add("ann", data, master)
    assert inputs.waiting and not inputs.has_room(QUEUE_LIMIT)
    got = b""
    while len(got) < len(data):
        got += os.read(slave, 4096)
        inputs.flush(master)
    assert got == data and inputs.has_room(QUEUE_LIMIT)


def test_journal_rotation_continues_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ROTATE_AT", 1000)
    path, old = tmp_path / "j", tmp_path / "j.1"
    journal = Journal(str(path))
    for number in range(1, 101):
        assert journal.write({"text": "x" * 40}) == number
        assert path.stat().st_size <= 1100 and (not old.exists() or old.stat().st_size <= 1100)
    both = [one["seq"] for one in lines(old) + lines(path)]
    assert both == list(range(101 - len(both), 101)) and len(both) >= 15
    assert sorted(os.listdir(tmp_path)) == ["j", "j.1"]
    assert Journal(str(path)).write({"text": "later"}) == 101
    path.write_bytes(b"")
    last = lines(old)[-1]["seq"]
    assert Journal(str(path)).next == int(str(last)) + 1, "an empty file goes on from the one before it"


def test_failed_journal_rotation_continues_in_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ROTATE_AT", 100)
    path = tmp_path / "j"
    (tmp_path / "j.new").mkdir()
    journal = Journal(str(path))
    assert [journal.write({"text": "x" * 60}) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert [one["seq"] for one in lines(path)] == [1, 2, 3, 4, 5]
