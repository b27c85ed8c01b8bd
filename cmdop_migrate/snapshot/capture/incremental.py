"""What the rounds of one move know of each other, where the kernel tells which pages were written since the last one.

CRIU asks the kernel to begin anew when it has dumped a session, and dumps the next time only what was written since; of
the rest it says that it is in the parent. Whole windows of that are the chunks of the last round, by their names; the
rest of a window in which something was written is read from the session, which stands still.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from cmdop_migrate.criu.install import find
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.criu.page_server import Target
from cmdop_migrate.holder.start import KEPT
from cmdop_migrate.images.write.previous_round import Earlier
from cmdop_migrate.util import proc

FEATURE = "mem_dirty_track"


class Rounds:
    """`earlier` is the memory of the last round, None before the first."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the session's; CRIU's own images of the last round stay in it until `close`."""
        self._kept = directory / KEPT
        self.earlier: Earlier | None = None
        self.close()

    @property
    def parent(self) -> str | None:
        """For CRIU, beside its new images: what it is to compare with."""
        return f"../{KEPT}" if self.earlier is not None else None

    def keep(self, images: Path, earlier: Earlier) -> None:
        self.close()
        (images / "parent").unlink(missing_ok=True)  # CRIU's way to the round before, which is gone now
        images.rename(self._kept)
        self.earlier = earlier

    def close(self) -> None:
        self.earlier = None
        shutil.rmtree(self._kept, ignore_errors=True)


def are_told(criu: Criu) -> bool:
    """Whether this kernel tracks writes."""
    return FEATURE in find.features(criu, (FEATURE,))


class StillMemory:
    """Pages of processes that stand still, by their pids inside the session."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._files: dict[int, int] = {}
        for pid in pids:
            inner = _inner(pid)
            if inner is not None:
                self._files[inner] = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, target: Target, vaddr: int, into: memoryview) -> None:
        """OSError when there is no such process, or no such page."""
        if target.id not in self._files:
            raise OSError(f"process {target.id} of the session is gone")
        while into:
            done = os.preadv(self._files[target.id], [into], vaddr)
            if not done:
                raise OSError(f"process {target.id} has no memory at {vaddr:#x}")
            into, vaddr = into[done:], vaddr + done

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _inner(pid: int) -> int | None:
    try:
        return proc.inner_pid(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
