"""A journal that was touched tells where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cmdop_migrate.holder import input_journal as journal_module
from cmdop_migrate.holder.input_journal import Journal, digest
from cmdop_migrate.session import input_journal_check


def written(tmp_path: Path, count: int = 6) -> tuple[list[bytes], str]:
    journal = Journal(str(tmp_path / "j"))
    for number in range(count):
        journal.write({"text": f"line {number}"})
    return (tmp_path / "j").read_bytes().splitlines(), journal.head


def seqs(verdict: input_journal_check.Verdict) -> list[int | None]:
    return [one.seq for one in verdict.breaks]


def test_an_untouched_journal_has_no_breaks(tmp_path: Path) -> None:
    lines, head = written(tmp_path)
    found = input_journal_check.verify(lines, head)
    assert found.ok and (found.lines, found.first, found.last, found.head) == (6, 1, 6, head)
    assert input_journal_check.verify([], "").ok and input_journal_check.verify(lines[2:], head).ok, (
        "the oldest may have been put away"
    )
    assert input_journal_check.verify([*lines, *_after(lines)], head).ok, "what came while it was read"


def _after(lines: list[bytes]) -> list[bytes]:
    return [json.dumps({"seq": 7, "prev": digest(lines[-1])}).encode()]


def test_a_long_line_is_followed_by_the_next_number(tmp_path: Path) -> None:
    """The name of an actor can be of any length, and the line has the names of all actors that typed."""
    first = Journal(str(tmp_path / "j"))
    first.write({"text": "short"})
    first.write({"originators": ["x" * 300_000]})
    again = Journal(str(tmp_path / "j"))
    assert (again.next, again.head) == (3, first.head)
    again.write({"text": "next"})
    assert input_journal_check.verify((tmp_path / "j").read_bytes().splitlines(), again.head).ok


def test_a_changed_removed_or_inserted_line_is_found(tmp_path: Path) -> None:
    lines, head = written(tmp_path)
    changed = [*lines[:2], lines[2].replace(b"line 2", b"line X"), *lines[3:]]
    assert seqs(input_journal_check.verify(changed, head)) == [4]
    removed = [*lines[:2], *lines[3:]]
    assert (
        seqs(input_journal_check.verify(removed, head)) == [4]
        and "3 is missing" in input_journal_check.verify(removed).breaks[0].problem
    )
    renumbered = [
        *lines[:2],
        *(line.replace(b'"seq":%d' % n, b'"seq":%d' % (n - 1)) for n, line in enumerate(lines[3:], 4)),
    ]
    assert 3 in seqs(input_journal_check.verify(renumbered, head))
    assert seqs(input_journal_check.verify([lines[1], lines[0], *lines[2:]], head))[0] == 1
    assert seqs(input_journal_check.verify([*lines[:3], lines[2], *lines[3:]], head))[0] == 3
    assert seqs(input_journal_check.verify(lines[:4], head)) == [None], "the last ones are gone"
    assert seqs(input_journal_check.verify([], head)) == [None]
    first = [lines[0].replace(b'"prev":""', b'"prev":"ab"'), *lines[1:]]
    assert seqs(input_journal_check.verify(first, head)) == [1, 2]
    unbound = [*lines[:3], b'{"seq":4}', *lines[4:]]
    assert seqs(input_journal_check.verify(unbound, head)) == [4, 5]


def test_the_chain_continues_after_restart_and_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a restart, a rotation, and behind lines from before there was a chain."""
    path = tmp_path / "j"
    path.write_bytes(b'{"seq":1,"text":"old"}\n{"seq":2,"text":"old"}\n')
    Journal(str(path)).write({"text": "x" * 100})
    monkeypatch.setattr(journal_module, "ROTATE_AT", 1000)
    last = Journal(str(path))
    for _ in range(8):
        last.write({"text": "y" * 60})
    lines = (tmp_path / "j.1").read_bytes().splitlines() + path.read_bytes().splitlines()
    found = input_journal_check.verify(lines, last.head)
    assert found.ok and (found.first, found.last, found.unchained) == (1, 11, 2)


def test_a_line_lost_on_a_full_disk_is_reported_missing(tmp_path: Path) -> None:
    lines, _ = written(tmp_path, 3)
    journal = Journal(str(tmp_path / "j"))
    fd, journal._fd = journal._fd, open("/dev/full", "wb", buffering=0).fileno()
    journal.write({"text": "lost"})
    journal._fd = fd
    journal.write({"text": "kept"})
    found = input_journal_check.verify((tmp_path / "j").read_bytes().splitlines(), journal.head)
    assert [one.problem for one in found.breaks] == ["line 4 is missing"]
    cut = [*lines, b'{"seq":4,"te']
    assert [one.problem for one in input_journal_check.verify(cut).breaks] == [
        "after line 3: bytes that are no line, cut by a crash or a full disk"
    ]
