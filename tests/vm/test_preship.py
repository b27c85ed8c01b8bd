"""Sending ahead: only what the kernel says was written is read again, and where it does not say, deduplication finds it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.host import until
from tests.vm.machines import Machines, VmHost

pytestmark = pytest.mark.timeout(1500)
MIB = 32
# Writes a word into another page of its memory every few ms, all the time. On a line of input: whether all of its memory
# is what it was at first, and what it wrote since. By itself alone, from what it can work out anew.
WORKING = f"""
import random, select, sys
def fresh(): return bytearray(random.Random(1).randbytes({MIB} << 20))
held, written, number = fresh(), {{}}, 0
print("ready", flush=True)
while True:
    number += 1
    page = number * 7919 % (len(held) // 4096 // 16)  # its working set: a sixteenth of it
    held[page * 4096 : page * 4096 + 8] = written[page] = number.to_bytes(8, "big")
    if select.select([sys.stdin], [], [], 0.02)[0]:
        word, wanted = sys.stdin.readline().strip(), fresh()
        for page, data in written.items():
            wanted[page * 4096 : page * 4096 + 8] = data
        print("intact" if wanted == held else "CHANGED", word, len(written), flush=True)
"""


def moved(a: VmHost, b: VmHost, tracking: str) -> dict[str, Any]:
    """One session from host-a to host-b, two rounds ahead."""
    session = a.start("python3", "-c", WORKING, name=tracking)["session"]
    a.wait_for(session, "ready")
    env = {"CMDOP_MIGRATE_DIRTY_TRACKING": tracking}
    facts = a.cm_json("migrate", tracking, "--to", "host-b", "--pre-ship", "2", env=env, timeout=900)
    b.ok("send", session, "there", "--enter")
    b.wait_for(session, "intact there")
    until(lambda: not a.session_pids(session), 60, "nothing of it is left on host-a")
    assert a.shell(f"ls /var/lib/cmdop-migrate/sessions/{session}* | grep -c images || true").strip() == "0"
    return facts


def test_by_the_kernels_word_and_by_deduplication(vms: Machines) -> None:
    a, b = vms.hosts
    tracks = [one for one in a.cm_json("doctor")["checks"] if one["name"] == "dirty_tracking"]
    assert tracks and tracks[0]["level"] == "ok", tracks
    told, found = moved(a, b, "auto"), moved(a, b, "off")
    print()
    for how, one in (("the kernel's word", told), ("deduplication", found)):
        phases, new = one["phases"], one["bytes"]["new"] / 2**20
        print(
            f"  by {how}: frozen {one['frozen_s']:.2f} s, dump {phases['dump']:.2f} s, {new:.1f} MiB sent frozen; "
            f"ahead {phases['pre_ship_1']:.1f} and {phases['pre_ship_2']:.1f} s"
        )
    memory = found["bytes"]["memory"]
    assert memory > MIB << 20
    for one in (told, found):
        assert one["bytes"]["new"] < memory / 4, "most of it had gone ahead"
