"""Keep the instructions that CRIU injects into a process out of its memory image.

To run a system call in a process, CRIU writes instructions over the start of
its first executable mapping, and puts the bytes back afterwards. It sends
memory by reference (vmsplice, splice), so that a receiver which is not quick
reads what is there by then: for a moment, again and again, CRIU's own
instructions. In a statically linked program that place may be the vDSO, and its
image could not be restored; elsewhere a few bytes of the program were lost.

Therefore that page is noted while the session is frozen, before CRIU touches it,
and replaces what arrives for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cmdop_migrate.criu.page_server import PAGE

_KERNEL = 1 << 63  # addresses from here on are the kernel's (vsyscall)


class Code(NamedTuple):
    """The page of a process that CRIU writes to."""

    vaddr: int
    content: bytes


def note(pids: Iterable[int]) -> Mapping[int, Code]:
    """Read that page of each process; they are frozen. The keys are the pids inside the session."""
    found = {}
    for pid in pids:
        try:
            vaddr = first_executable(pid)
            if vaddr is not None:
                with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                    memory.seek(vaddr)
                    found[_number_inside(pid)] = Code(vaddr, memory.read(PAGE))
        except OSError:
            continue  # it has ended, and CRIU dumps no memory of it; or the page cannot be read, by CRIU neither
    return found


def first_executable(pid: int) -> int | None:
    """Return the address at which CRIU runs its system calls in this process, None if it has no memory."""
    with open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            addresses, permissions = line.split(None, 2)[:2]
            vaddr = int(addresses.partition(b"-")[0], 16)
            if permissions[2:3] == b"x" and vaddr < _KERNEL:
                return vaddr
    return None


def _number_inside(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        return next(int(line.split()[-1]) for line in status if line.startswith("NSpid:"))
