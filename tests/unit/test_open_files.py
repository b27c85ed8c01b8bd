"""Open files and their locks, from what the kernel says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cmdop_migrate.holder import cgroup
from cmdop_migrate.session import open_files

INFO = """pos:\t12
flags:\t02100002
mnt_id:\t31
ino:\t99
"""


def test_fdinfo_is_parsed() -> None:
    locks = (
        "lock:\t1: FLOCK  ADVISORY  WRITE 4711 00:2a:99 0 EOF\nlock:\t2: POSIX  ADVISORY  READ 4711 00:2a:99 128 255\n"
    )
    assert open_files.parse(7, 3, "/a: b", INFO + locks) == open_files.Opened(
        7, 3, "/a: b", "both", 12, ("FLOCK WRITE", "POSIX READ 128-255")
    )
    read_only = INFO.replace("02100002", "0100000")
    assert open_files.parse(7, 3, "/a", read_only).access == "read"
    assert open_files.parse(7, 3, "/a", read_only.replace("0100000", "0100001")).access == "write"


def test_only_files_written_or_locked_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read", "written", "locked"):
        (tmp_path / name).write_text("some text")
    script = (
        "import fcntl, sys; r = open('read'); w = open('written', 'r+'); w.seek(4); l = open('locked');"
        "fcntl.flock(l, fcntl.LOCK_SH); print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdin and child.stdout and child.stdout.readline() == "ready\n"
        gone = subprocess.Popen(["true"])
        gone.wait()
        monkeypatch.setattr(cgroup, "pids", lambda _: [gone.pid, child.pid])
        found = [one for one in open_files.opened("") if one.path.startswith(str(tmp_path))]
    finally:
        child.kill()
        child.communicate()
    assert [(os.path.basename(one.path), one.access, one.offset, one.locks) for one in found] == [
        ("written", "both", 4, ()),
        ("locked", "read", 0, ("FLOCK READ",)),
    ]


def test_databases_of_sqlite_by_their_first_bytes() -> None:
    head = b"SQLite format 3\0\x10\x00"
    assert open_files.is_rollback_database(head + b"\x01")
    assert not open_files.is_rollback_database(head + b"\x02"), "WAL"
    assert not open_files.is_rollback_database(head) and not open_files.is_rollback_database(b"")
    assert not open_files.is_rollback_database(b"x" * 18 + b"\x01")
