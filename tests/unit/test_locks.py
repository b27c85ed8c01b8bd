"""File locks: held by an open descriptor, taken or refused, also when the lock file is replaced."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from cmdop_migrate.util import locks


def test_try_take_refuses_a_lock_that_is_held_and_takes_it_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = locks.try_take(path)
    assert first is not None and locks.try_take(path) is None
    os.close(first)
    second = locks.try_take(path)
    assert second is not None
    os.close(second)


def test_try_take_waits_for_its_timeout(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = locks.try_take(path)
    assert first is not None
    began = time.monotonic()
    assert locks.try_take(path, 0.1) is None and time.monotonic() - began >= 0.1
    threading.Timer(0.1, os.close, (first,)).start()
    second = locks.try_take(path, 20.0)
    assert second is not None
    os.close(second)


def test_try_take_current_does_not_accept_the_lock_of_a_removed_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = locks.try_take_current(path)
    assert first is not None
    path.unlink()
    second = locks.try_take_current(path)  # a new file: the owner of the removed one does not hold it
    assert second is not None and os.path.samestat(os.fstat(second), os.stat(path))
    assert locks.try_take_current(path) is None
    os.close(first)
    os.close(second)


def test_try_take_current_takes_the_new_file_when_the_old_one_is_removed_while_it_waits(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = locks.try_take_current(path)
    assert first is not None

    def release() -> None:
        path.unlink()
        os.close(first)

    threading.Timer(0.1, release).start()
    second = locks.try_take_current(path, 20.0)
    assert second is not None and os.path.samestat(os.fstat(second), os.stat(path))
    os.close(second)


def test_lock_file_in_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    for take in (locks.try_take, locks.try_take_current):
        with pytest.raises(FileNotFoundError):
            take(tmp_path / "gone" / "lock")


def test_held_reports_that_it_waits_and_releases_after_an_error(tmp_path: Path) -> None:
    path, reports = tmp_path / "lock", list[str]()
    with pytest.raises(ValueError), locks.held(path, lambda: reports.append("waits")):
        assert not reports and locks.try_take(path) is None
        raise ValueError
    first = locks.try_take(path)
    assert first is not None
    threading.Timer(0.1, os.close, (first,)).start()
    with locks.held(path, lambda: reports.append("waits")):
        assert reports == ["waits"]


def test_directory_is_locked_like_a_file(tmp_path: Path) -> None:
    first, second = locks.open_directory(tmp_path), locks.open_directory(tmp_path)
    assert locks.try_lock(first) and not locks.try_lock(second)
    os.close(first)
    assert locks.try_lock(second)
    os.close(second)
