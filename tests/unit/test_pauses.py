"""A machine that stood still without knowing: by the clock of its board it is found out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cmdop_migrate.clock import boottime
from cmdop_migrate.session import deadman, pauses
from tests.hosts import until


def board(path: Path, ahead: float = 0.0) -> Path:
    path.write_text(f"{int(time.time() + ahead)}\n")
    return path


def test_looks(tmp_path: Path) -> None:
    watch = pauses.Pauses(str(board(tmp_path / "clock")))
    assert watch.every == pauses.LOOK_EVERY
    assert not watch.look() and not watch.look()
    board(tmp_path / "clock", 1.4)
    assert not watch.look(), "within what the board's clock is right to"
    board(tmp_path / "clock", 60)
    assert watch.look() and not watch.look(), "once for each time"
    board(tmp_path / "clock", -3600)
    assert not watch.look(), "set back"
    (tmp_path / "clock").write_text("no number\n")
    assert not watch.look()


def test_no_clock_on_the_board(tmp_path: Path) -> None:
    watch = pauses.Pauses(str(tmp_path / "none"))
    assert watch.every is None and not watch.look()


def test_the_switch_freezes_and_asks_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the pause its lease was good for long. After it, only a renewal that began later lets it go on."""
    clock, order = board(tmp_path / "clock"), tmp_path / "cgroup.freeze"
    order.write_text("0")
    monkeypatch.setattr(deadman, "Pauses", lambda: pauses.Pauses(str(clock)))
    heard: list[bool] = []
    switch = deadman.DeadMan(str(tmp_path), boottime() + 1000, heard.append)
    switch.watch()
    time.sleep(2 * pauses.LOOK_EVERY)
    switch.check()
    before = boottime()
    assert order.read_text() == "0" and not switch.fenced
    board(clock, 60)
    until(lambda: order.read_text().strip() == "1", 5, "the order to freeze")
    until(lambda: switch.on_timer() or switch.fenced, 5, "the holder hears of it")
    switch.renewed(boottime() + 1000, before)
    assert switch.fenced and heard == [True], "a renewal from before the pause says nothing"
    switch.renewed(boottime() + 1000, boottime())
    assert not switch.fenced and heard == [True, False]
