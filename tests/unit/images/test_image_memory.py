"""Test that a large image through a stuck store keeps memory bounded and does not delay the input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, random, sys, threading
from pathlib import Path
from cmdop_migrate.images.format.keys import KeyRing, new_key
from cmdop_migrate.images.write.writer import ImageWriter, WriterOptions
from cmdop_migrate.storage.memory import MemoryStore

gate, puts = threading.Event(), []

class Stuck(MemoryStore):
    def put(self, name, data):
        if name.startswith("packs/"):
            gate.wait()
            puts.append(len(data))
            data = b""
        super().put(name, data)

writer = ImageWriter(Stuck(), KeyRing((new_key(),)), "abcd", Path(sys.argv[1]),
    options=WriterOptions(defer=sys.argv[3] == "later"))
writer.begin()
half, text = random.Random(1).randbytes(1 << 19), b"some text " * 26214 + bytes(4)
writer.feed.open("process-1")
for at in range(int(sys.argv[2])):
    block = bytearray(half + bytes(1 << 18) + text)
    for page in range(0, 3 << 18, 4096):
        if not (1 << 19) <= page < (3 << 18):
            block[page : page + 4] = at.to_bytes(4, "little")
    block[3 << 18 : (3 << 18) + 4] = at.to_bytes(4, "little")
    writer.feed.run(at << 20, 256, 4, True)
    left, vaddr = memoryview(block), at << 20
    while left:
        room = writer.feed.window(vaddr, len(left))
        room[:] = left[: len(room)]
        vaddr, left = vaddr + len(room), left[len(room) :]
writer.end_input()
early = len(puts)
gate.set()
found = writer.commit(1)
# Not ru_maxrss: that of a child begins with what its parent had when it started it.
peak = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({
    "early": early, "puts": len(puts), "memory": found.sizes["memory"], "new": found.sizes["new"],
    "spilled": writer._uploads.spilled, "peak": peak,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", ["now", "later"])
def test_memory_use_is_bounded_with_a_stuck_store(tmp_path: Path, work: str):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}

    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "1024", work]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["early"] == 0, "the input was consumed before one pack was stored"
    assert seen["memory"] == 1 << 30 and seen["new"] > 500 << 20
    assert seen["spilled"] > 300 << 20 if work == "now" else seen["spilled"] == 0, "once is enough"
    assert seen["peak"] < 256 << 20
    assert list(tmp_path.iterdir()) == []
