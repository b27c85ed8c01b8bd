"""Park and restore reserved address space that is larger than the host's memory, with its content."""

from __future__ import annotations

import sys

import pytest

from tests.support.host import Host
from tests.support.program_session import Program

# Three generations of processes. Each has its own content in what it inherited; a line "round N" typed to the first
# goes down the line, and each answers whether its memory is what it wrote, and that it can still use the reservation.
PROGRAM = r"""
import ctypes, os, sys
NONE, RW, READ = 0, 3, 1
PRIVATE, ANON, FIXED, NORESERVE = 2, 0x20, 0x10, 0x4000
PAGE, TOTAL = 4096, os.sysconf("SC_PHYS_PAGES") * 4096
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def mmap(size, prot, flags, at=0, fd=-1):
    got = libc.mmap(at, size, prot, PRIVATE | flags, fd, 0)
    assert got != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return got

def put(at, text):
    ctypes.memmove(at, text.encode() + b"\0", len(text) + 1)

def get(at):
    return ctypes.string_at(at).decode()

def writable(at):
    assert libc.mprotect(at, PAGE, RW) == 0, os.strerror(ctypes.get_errno())

SIZE = TOTAL * 2 // PAGE * PAGE
HALF = TOTAL * 6 // 10 // PAGE * PAGE
reserved = mmap(SIZE, NONE, ANON)                  # Chromium, Java
unaccounted = mmap(SIZE, RW, ANON | NORESERVE)     # Go, sanitizers
places = [unaccounted, unaccounted + SIZE // 2, unaccounted + SIZE - PAGE]
for at in (reserved + PAGE, reserved + SIZE - PAGE):
    writable(at)
    places.append(at)
held = {}

def fill(generation, addresses):
    for at in addresses:
        held[at] = f"generation {generation} at {at:x}"
        put(at, held[at])

def check(generation, word):
    for at, wanted in held.items():
        assert get(at) == wanted, (get(at), wanted)
    at = reserved + (int(word.split()[1]) + 2) * PAGE * 1024   # more of the reservation is taken into use
    writable(at)
    assert get(at) == ""
    fill(generation, [at])
    return f"generation {generation} holds after {word}"

lines, answers, generation = sys.stdin, sys.stdout, 0
fill(0, places)
below = None
while generation < 2 and below is None:
    down, up = os.pipe(), os.pipe()
    if os.fork():
        os.close(down[0]); os.close(up[1])
        below = os.fdopen(down[1], "w"), os.fdopen(up[0])
    else:
        os.close(down[1]); os.close(up[0])
        lines, answers, generation = os.fdopen(down[0]), os.fdopen(up[1], "w"), generation + 1
        fill(generation, places[:-1])  # the last is left as it was inherited
if generation == 2:  # two writable ones that the kernel joins into one above the memory's size
    space = mmap(3 * HALF, NONE, ANON)
    for at in (space, space + HALF):
        mmap(HALF, RW, ANON | FIXED, at)
    fill(2, [space + HALF - PAGE, space + HALF])
if generation == 0:
    print("ready", flush=True)
for line in lines:
    if below:
        below[0].write(line); below[0].flush()
        answer = below[1].readline()
    else:
        answer = ""
    answers.write(check(generation, line.strip()) + "; " + (answer or "\n"))
    answers.flush()
"""


@pytest.mark.parametrize("options", [(), ("--lazy",)], ids=["at-once", "lazy"])
def test_reservations_above_memory_size_inherited_by_forks_are_restored(host: Host, options: tuple[str, ...]) -> None:
    with Program(host, sys.executable, "-c", PROGRAM) as program:
        program.see("ready")
        for number in range(3):
            program.type(f"round {number}\n")
            for generation in range(3):
                program.see(f"generation {generation} holds after round {number}")
            if number < 2:
                program.park()
                program.back(*options)
