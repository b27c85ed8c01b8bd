"""Check the changes to the terminals in CRIU's images before a restore."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from cmdop_migrate.criu.protobuf import ImageFile, Message
from cmdop_migrate.criu.terminal import terminal_images
from cmdop_migrate.criu.terminal.terminal_images import File, Info

HEAD = bytes(range(8))


def image(path: Path, *records: bytes) -> Path:
    path.write_bytes(HEAD + b"".join(struct.pack("<I", len(one)) + one for one in records))
    return path


def message(**fields: int | bytes | Message) -> Message:
    """Fields by number: f1=…"""
    made = Message()
    for name, value in fields.items():
        made.set(int(name[1:]), value)
    return made


def _terminal(number: int, session: int, group: int) -> bytes:
    return message(
        **{f"f{Info.ID}": number, f"f{Info.TYPE}": terminal_images.PTY, f"f{Info.TERMIOS}": b""},
        **{f"f{Info.SESSION}": session, f"f{Info.GROUP}": group, f"f{Info.PTY}": message(f1=number >> 1)},
    ).serialise()


def _file(number: int, terminal: int) -> bytes:
    tty = message(**{f"f{File.TTY_ID}": number, f"f{File.TTY_INFO}": terminal})
    return message(
        **{f"f{File.TYPE}": terminal_images.TTY_FILE, f"f{File.ID}": number, f"f{File.TTY}": tty}
    ).serialise()


def _fd(number: int, fd: int) -> bytes:
    values = {File.FD_ID: number, File.FD_FLAGS: 0, File.FD_TYPE: terminal_images.TTY_FILE, File.FD: fd}
    return message(**{f"f{field}": value for field, value in values.items()}).serialise()


@pytest.mark.parametrize(
    ("used", "lent"), [((0, 1, 2), range(3, 4)), (range(500), range(500, 501)), ([0, 499], range(3, 4))]
)
def test_process_1_gets_descriptors_of_inner_masters(tmp_path: Path, used: list[int], lent: range) -> None:
    """Its own terminal is /dev/pts/0, that of tmux /dev/pts/4 with two processes; the foreground group of it has ended."""
    image(tmp_path / "tty-info.img", _terminal(0, 1, 1), _terminal(9, 5, 99), _terminal(8, 0, 0))
    image(tmp_path / "files.img", _file(1, 0), _file(2, 9), _file(3, 8))
    image(
        tmp_path / "pstree.img",
        *(message(f1=pid, f3=pid, f4=session).serialise() for pid, session in ((1, 1), (5, 5), (6, 5))),
    )
    image(tmp_path / "ids-1.img", message(f2=1).serialise())
    image(tmp_path / "fdinfo-1.img", *(_fd(1, fd) for fd in used))
    found = terminal_images.prepare(tmp_path, lend=True)
    assert found.lent == lent
    own, inner = found.terminals
    assert (own.index, own.leader, own.foreground, own.is_own) == (0, 1, 1, True)
    assert (inner.index, inner.leader, inner.foreground, inner.is_own) == (4, 5, 5, False)
    table = [(one.number(File.FD), one.number(File.FD_ID)) for one in ImageFile(tmp_path / "fdinfo-1.img").records]
    assert table == sorted([*((fd, 1) for fd in used), (lent.start, 2)])
    assert found.first_free == table[-1][0] + 1


def test_process_1_gets_no_descriptors_where_tasks_cannot_be_traced(tmp_path: Path) -> None:
    image(tmp_path / "tty-info.img", _terminal(0, 1, 1), _terminal(9, 5, 5), _terminal(8, 0, 0))
    image(tmp_path / "files.img", _file(1, 0), _file(2, 9), _file(3, 8))
    image(tmp_path / "pstree.img", *(message(f1=pid, f3=5, f4=5).serialise() for pid in (5, 6)))
    image(tmp_path / "ids-1.img", message(f2=1).serialise())
    table = image(tmp_path / "fdinfo-1.img", _fd(1, 0)).read_bytes()
    assert not terminal_images.prepare(tmp_path, lend=False).lent
    assert (tmp_path / "fdinfo-1.img").read_bytes() == table
