"""Check the masks of blocked signals in CRIU's core images, and the registers of interrupted threads."""

from __future__ import annotations

import struct
from pathlib import Path

from cmdop_migrate.criu import ptrace
from cmdop_migrate.criu.image import signal_masks
from cmdop_migrate.criu.protobuf import varint

TRAP, USR1 = 1 << 4, 1 << 9


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def image(leader: int, thread: int) -> bytes:
    process = field(1, 1) + field(5, leader) + field(6, b"name")
    message = field(1, 1) + field(2, b"registers") + field(3, process) + field(5, field(6, thread) + field(7, 9))
    return b"12345678" + struct.pack("<I", len(message)) + message


def test_sigtrap_is_unblocked_and_nothing_else_changes() -> None:
    assert signal_masks.without_trap(image(TRAP | USR1, TRAP)) == image(USR1, 0)
    assert signal_masks.without_trap(image(2**64 - 1, USR1)) == image(2**64 - 1 - TRAP, USR1)


def test_threads_that_blocked_sigtrap_themselves_keep_it_blocked(tmp_path: Path) -> None:
    for thread in (1, 7):
        (tmp_path / f"core-{thread}.img").write_bytes(image(TRAP, TRAP))
    signal_masks.unblock_trap(tmp_path, {7})
    assert (tmp_path / "core-1.img").read_bytes() == image(0, 0)
    assert (tmp_path / "core-7.img").read_bytes() == image(TRAP, TRAP)


def test_interrupted_system_calls_are_restarted() -> None:
    def words(rax: int, orig: int, rip: int = 0x1000) -> bytes:
        held = [0] * 27
        held[10], held[15], held[16] = rax % 2**64, orig % 2**64, rip
        return struct.pack("<27Q", *held)

    assert ptrace.restartable(words(-512, 0)) == words(0, -1, 0xFFE)  # read, with ERESTARTSYS
    assert ptrace.restartable(words(-516, 230)) == words(-4, -1)  # clock_nanosleep: EINTR
    assert ptrace.restartable(words(-11, 0)) == words(-11, -1)  # it had its answer: EAGAIN
    assert ptrace.restartable(words(-512, -1)) == words(-512, -1)  # it was in no call
