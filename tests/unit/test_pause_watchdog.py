"""A VM that was paused by its hypervisor: the holder and the agent detect the pause by the hardware clock (RTC)."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from cmdop_migrate.agent import pause_watchdog
from cmdop_migrate.clock import boottime
from cmdop_migrate.holder import lease_watchdog, protocol
from cmdop_migrate.util import vm_pause
from tests.support.host import until

REAL = vm_pause.is_virtual


def board(path: Path, ahead: float = 0.0) -> Path:
    path.write_text(f"{int(time.time() + ahead)}\n")
    return path


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm_pause, "is_virtual", lambda: True)
    monkeypatch.setattr(vm_pause, "READ_AT_MOST_EVERY", 0.0)


def test_a_pause_is_found_by_the_board_clock(tmp_path: Path) -> None:
    watch = vm_pause.Pauses(str(board(tmp_path / "clock")))
    assert watch.every == vm_pause.COMPARE_CLOCKS_EVERY
    assert not watch.look() and not watch.look()
    board(tmp_path / "clock", 1.4)
    assert not watch.look(), "within what the board's clock is right to"
    board(tmp_path / "clock", 60)
    assert watch.look() and not watch.look(), "once for each time"
    board(tmp_path / "clock", -3600)
    assert not watch.look(), "set back"
    (tmp_path / "clock").write_text("no number\n")
    assert not watch.look()


def test_short_pauses_add_up_until_a_renewal(tmp_path: Path) -> None:
    watch = vm_pause.Pauses(str(board(tmp_path / "clock")))
    watch.look()
    board(tmp_path / "clock", 2)
    assert not watch.look()
    watch.renewed()
    board(tmp_path / "clock", 3.5)
    assert not watch.look(), "the lease was renewed between them"
    board(tmp_path / "clock", 6)
    assert watch.look(), "two of them, none long enough alone"


def test_a_pause_between_a_look_and_a_renewal_is_found(tmp_path: Path) -> None:
    watch = vm_pause.Pauses(str(board(tmp_path / "clock")))
    watch.look()
    board(tmp_path / "clock", 60)
    watch.renewed()
    assert watch.look()


def test_a_slow_board_clock_is_read_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm_pause, "READ_AT_MOST_EVERY", 1000.0)
    watch = vm_pause.Pauses(str(board(tmp_path / "clock")))
    watch.look(at_once=True)  # this machine may not be up for as long as that
    board(tmp_path / "clock", 60)
    assert not watch.look()
    assert watch.look(at_once=True)


def test_a_physical_machine_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu vme avx2\n")
    assert not REAL(str(tmp_path / "cpuinfo"))
    for other in ("processor\t: 0\nflags\t\t: fpu vme hypervisor avx2\n", "processor\t: 0\nFeatures\t: fp\n"):
        (tmp_path / "cpuinfo").write_text(other)
        assert REAL(str(tmp_path / "cpuinfo"))


def test_a_machine_without_board_clock_is_not_watched(tmp_path: Path) -> None:
    watch = vm_pause.Pauses(str(tmp_path / "none"))
    assert watch.every is None and not watch.look()


def test_lease_watchdog_freezes_after_a_pause_until_the_next_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pause the lease was valid for long. After it, only a renewal that began later thaws the session."""
    clock, order = board(tmp_path / "clock"), tmp_path / "cgroup.freeze"
    order.write_text("0")
    monkeypatch.setattr(lease_watchdog, "Pauses", lambda: vm_pause.Pauses(str(clock)))
    heard: list[bool] = []
    switch = lease_watchdog.LeaseWatchdog(str(tmp_path), boottime() + 1000, heard.append)
    switch.watch()
    time.sleep(2 * vm_pause.COMPARE_CLOCKS_EVERY)
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


def test_doubt_includes_a_pause_not_found_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notified of a pause before it found it: once renewed, it does not freeze the session again for the same pause."""
    clock, order = board(tmp_path / "clock"), tmp_path / "cgroup.freeze"
    order.write_text("0")
    monkeypatch.setattr(vm_pause, "READ_AT_MOST_EVERY", 1000.0)
    monkeypatch.setattr(lease_watchdog, "Pauses", lambda: vm_pause.Pauses(str(clock)))
    heard: list[bool] = []
    switch = lease_watchdog.LeaseWatchdog(str(tmp_path), boottime() + 1000, heard.append)
    switch.check()
    board(clock, 60)
    switch.doubt()
    assert switch.fenced and order.read_text().strip() == "1"
    switch.renewed(boottime() + 1000, boottime())
    monkeypatch.setattr(vm_pause, "READ_AT_MOST_EVERY", 0.0)
    switch.check()
    assert not switch.fenced and heard == [True, False]


def test_agent_tells_all_holders_about_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are notified even if one holder is gone; after a renewal no pause is found any more."""
    clock = board(tmp_path / "clock")
    monkeypatch.setattr(pause_watchdog, "Pauses", lambda: vm_pause.Pauses(str(clock)))
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for name, listener in (("one", first), ("two", second)):
            listener.bind(str(tmp_path / name))
            listener.listen()
            listener.settimeout(5)
        watch = pause_watchdog.PauseWatchdog(lambda name: tmp_path / name, lambda: ["one", "gone", "two"])
        watch.start()
        try:
            time.sleep(5 * pause_watchdog.CHECK_EVERY)
            assert not watch.found
            board(clock, 60)
            for listener in (first, second):
                with listener.accept()[0] as line:
                    line.settimeout(5)
                    assert [
                        protocol.parse_control(payload) for _, payload in protocol.Decoder().feed(line.recv(4096))
                    ] == [{"op": "doubt"}]
            until(lambda: watch.found, 5, "a reason to renew")
            watch.renewing()
            time.sleep(5 * pause_watchdog.CHECK_EVERY)
            assert not watch.found
        finally:
            watch.stop()


def test_agent_without_board_clock_watches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_watchdog, "Pauses", lambda: vm_pause.Pauses(str(tmp_path / "none")))
    watch = pause_watchdog.PauseWatchdog(lambda name: tmp_path / name, lambda: ["one"])
    watch.start()
    assert not watch.found
    watch.stop()
