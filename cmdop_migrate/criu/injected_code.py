"""Keep the instructions that CRIU injects into a process out of its memory image.

To run a system call in a process, CRIU writes instructions over the start of its first executable mapping, and restores
the bytes afterwards. It sends memory by reference (vmsplice, splice), so that a slow receiver reads the content that
the page has by then: repeatedly, for a moment, CRIU's own instructions. In a statically linked program that page may be
the vDSO, and its image could not be restored; in other programs a few bytes were lost.

Therefore that page is read while the session is frozen, before CRIU changes it, and replaces the content that arrives
for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cmdop_migrate.criu.page_server import PAGE
from cmdop_migrate.util import proc

_KERNEL = 1 << 63  # addresses from here on are the kernel's (vsyscall)


class Code(NamedTuple):
    """Describe the page of a process to which CRIU writes its instructions."""

    vaddr: int
    content: bytes


def note(pids: Iterable[int]) -> Mapping[int, Code]:
    """Read that page of each of these frozen processes. Return them by the pids inside the session."""
    pages = {}
    for pid in pids:
        try:
            vaddr = first_executable(pid)
            if vaddr is not None:
                with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                    memory.seek(vaddr)
                    pages[proc.inner_pid(pid)] = Code(vaddr, memory.read(PAGE))
        except OSError:
            continue  # it has ended, and CRIU dumps no memory of it; or the page cannot be read, not by CRIU either
    return pages


def first_executable(pid: int) -> int | None:
    """Return the address at which CRIU runs its system calls in this process, None if it has no memory. Raise
    OSError."""
    with open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            addresses, permissions = line.split(None, 2)[:2]
            vaddr = int(addresses.partition(b"-")[0], 16)
            if permissions[2:3] == b"x" and vaddr < _KERNEL:
                return vaddr
    return None
