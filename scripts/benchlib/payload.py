"""The program inside a benchmarked session: MIB of memory, a quarter of it zeros, RANDOM % (15) random, the rest what
Python's own heap holds.

Prints `t N TIME` every 5 ms, and obeys lines on stdin: `contiguous`, `scattered`
and `pages` change 5 % of the memory, `digest` prints a digest of all of it. With
EVERY, its second argument, it rewrites its working set, 5 % in scattered regions, always
the same, by itself every so many lines: not by the clock, or it would begin with that
each time it comes back. RANDOM is the third.
Stdlib only; it must run wherever Python does.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import random
import select
import subprocess
import sys
import time

MIB = 1 << 20
PAGE = 4096
REGION = 256 << 10  # a scattered change: what an allocator's arena or a table's segment comes to
SAMPLE = 8 * MIB


def heap() -> bytes:
    """Pages of this process's memory, once it holds what programs hold: rows of a table, and trees."""
    bits = random.Random(1).getrandbits
    kept: list[object] = [
        {"id": n, "name": f"user-{bits(20)}", "score": bits(53) / 7, "tags": [bits(16), bits(32)], "to": f"/a/{n * 7}"}
        for n in range(12_000)
    ]
    kept += [ast.parse(inspect.getsource(module)) for module in (ast, inspect, random)]
    found: list[bytes] = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps.readlines():
            words = line.split()
            if not words[1].startswith("rw") or len(words) > 5:  # not ours to write, or a file's
                continue
            start, end = (int(word, 16) for word in words[0].split("-"))
            memory.seek(start)
            pages = memory.read(end - start)
            found += [pages[at : at + PAGE] for at in range(0, len(pages), PAGE) if any(pages[at : at + PAGE])]
    return b"".join(found)[:SAMPLE]


class Content:
    """What belongs where. Every page is marked: no two are alike, or they would be stored but once."""

    def __init__(self, size: int, share: int) -> None:
        # Made by another process, which takes what it needed for that along.
        self.sample = subprocess.run([sys.executable, __file__], stdout=subprocess.PIPE, check=True).stdout
        if len(self.sample) < SAMPLE:
            raise SystemExit(f"only {len(self.sample)} bytes of heap")
        self.noise, self.zeros = size // PAGE * share // 100 * PAGE, size // 4

    def fill(self, view: memoryview) -> None:
        for at in range(0, len(view), MIB):
            is_zero = self.noise <= at < self.noise + self.zeros
            view[at : at + MIB] = bytes(MIB) if is_zero else self.fresh(at, MIB)  # touched: real pages

    def fresh(self, at: int, size: int) -> bytes | bytearray:
        """New bytes of the kind that is there; instead of zeros, of the last."""
        if at < self.noise:
            return os.urandom(size)
        start = random.randrange((SAMPLE - size) // PAGE + 1) * PAGE
        made = bytearray(self.sample[start : start + size])
        for page in range(0, size, PAGE):
            made[page + 8 : page + 16] = os.urandom(8)
        return made


def change(view: memoryview, content: Content, pattern: str, chooser: random.Random) -> None:
    """5 % of all bytes get new ones; which, `chooser` says."""
    wanted = len(view) // 20
    if pattern == "contiguous":
        start = content.noise - int(wanted * content.noise / len(view)) // PAGE * PAGE  # as much of it random as of all
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
            view[at:end] = content.fresh(at, end - at)


def obey(view: memoryview, content: Content, line: str) -> None:
    """`line` is a word and a mark; the answer has the mark in it."""
    word, _, mark = line.partition(" ")
    if word in ("contiguous", "scattered", "pages"):
        change(view, content, word, random.Random())
        print(f"done {mark}.", flush=True)
    elif word == "digest":
        print(f"done {mark}. {hashlib.blake2b(view, digest_size=16).hexdigest()}.", flush=True)


def main() -> None:
    view = memoryview(bytearray(int(sys.argv[1]) * MIB))
    content = Content(len(view), int(sys.argv[3]) if len(sys.argv) > 3 else 15)
    content.fill(view)
    print("ready", flush=True)
    number, listening = 0, True
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    while True:
        number += 1
        if every and number % every == 0:
            change(view, content, "scattered", random.Random(1))  # always the same ones
        print(f"t {number} {time.time():.6f}", flush=True)
        if not listening:
            time.sleep(0.005)
        elif select.select([sys.stdin], [], [], 0.005)[0]:
            line = sys.stdin.readline()
            listening = bool(line)
            obey(view, content, line.strip())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        sys.stdout.buffer.write(heap())
