"""The program inside a benchmarked session: MIB of memory, a quarter of it zeros, RANDOM % (50) random, the rest text.

Prints `t N TIME` every 5 ms, and obeys lines on stdin: `contiguous`, `scattered`
and `pages` change 5 % of the memory, `digest` prints a digest of all of it. With
EVERY, its second argument, it rewrites its working set, 5 % in scattered regions, always
the same, by itself every so many lines: not by the clock, or it would begin with that
each time it comes back. RANDOM is the third.
Stdlib only; it must run wherever Python does.
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import sys
import time

MIB = 1 << 20
PAGE = 4096
REGION = 256 << 10  # a scattered change: what an allocator's arena or a table's segment comes to


def text(size: int, seed: int) -> bytes:
    """Log lines. No line is there twice."""
    bits = random.Random(seed).getrandbits
    lines, length, number = [], 0, 0
    while length < size:
        line = (
            f"{number:010d} INFO worker-{bits(4)} GET /api/v1/items/{bits(20)}?user={bits(40):x} status=200 "
            f"took={bits(8)}ms bytes={bits(16)}\n"
        )
        lines.append(line)
        length += len(line)
        number += 1
    return "".join(lines).encode()[:size]


def fill(view: memoryview, share: int) -> None:
    size = len(view) // MIB
    noise, zeros = size * share // 100, size // 4
    for number in range(size):
        at = number * MIB
        if number < noise:
            view[at : at + MIB] = os.urandom(MIB)
        elif number < noise + zeros:
            view[at : at + MIB] = bytes(MIB)  # touched: the kernel has real pages for it
        else:
            view[at : at + MIB] = text(MIB, at)


def change(view: memoryview, pattern: str, chooser: random.Random) -> None:
    """5 % of all bytes get new, random ones; which, `chooser` says."""
    wanted = len(view) // 20
    if pattern == "contiguous":
        start = chooser.randrange((len(view) - wanted) // PAGE) * PAGE
        regions = [(start, wanted)]
    elif pattern == "pages":
        spots = chooser.sample(range(len(view) // PAGE), wanted // PAGE)
        regions = [(spot * PAGE, PAGE) for spot in spots]
    else:
        spots = chooser.sample(range(len(view) // REGION), max(1, wanted // REGION))
        regions = [(spot * REGION, REGION) for spot in spots]
    for start, size in regions:
        for at in range(start, start + size, MIB):
            end = min(at + MIB, start + size)
            view[at:end] = os.urandom(end - at)


def obey(view: memoryview, line: str) -> None:
    """`line` is a word and a mark; the answer has the mark in it."""
    word, _, mark = line.partition(" ")
    if word in ("contiguous", "scattered", "pages"):
        change(view, word, random.Random())
        print(f"done {mark}.", flush=True)
    elif word == "digest":
        print(f"done {mark}. {hashlib.blake2b(view, digest_size=16).hexdigest()}.", flush=True)


def main() -> None:
    view = memoryview(bytearray(int(sys.argv[1]) * MIB))
    fill(view, int(sys.argv[3]) if len(sys.argv) > 3 else 50)
    print("ready", flush=True)
    number, listening = 0, True
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    while True:
        number += 1
        if every and number % every == 0:
            change(view, "scattered", random.Random(1))  # always the same ones
        print(f"t {number} {time.time():.6f}", flush=True)
        if not listening:
            time.sleep(0.005)
        elif select.select([sys.stdin], [], [], 0.005)[0]:
            line = sys.stdin.readline()
            listening = bool(line)
            obey(view, line.strip())


if __name__ == "__main__":
    main()
