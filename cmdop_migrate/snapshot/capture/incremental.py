"""Keep the state between the pre-copy rounds of one move, where the kernel tracks which pages were written.

CRIU resets the kernel's dirty bits after each dump, and the next time dumps only the pages written since; it marks the
others as being in the parent dump. A whole window of unwritten pages is taken over from the last round by its chunk
name; the unwritten pages of a window in which others were written are read from the frozen session.
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
from cmdop_migrate.images.write.previous_round import PreviousRound
from cmdop_migrate.util import proc

FEATURE = "mem_dirty_track"


class PreCopyRounds:
    """Keep the last pre-copy round. `earlier` is its memory, None before the first round."""

    def __init__(self, directory: Path) -> None:
        """Keep CRIU's own images of the last round in the session's `directory` until `close`."""
        self._kept = directory / KEPT
        self.earlier: PreviousRound | None = None
        self.close()

    @property
    def parent(self) -> str | None:
        """Return the path of the last round's images relative to the new ones, as CRIU's parent; None before the first
        round."""
        return f"../{KEPT}" if self.earlier is not None else None

    def keep(self, images: Path, earlier: PreviousRound) -> None:
        """Replace the last round by the one whose CRIU images are in `images`, which is moved."""
        self.close()
        (images / "parent").unlink(missing_ok=True)  # CRIU's link to the round before, which is removed now
        images.rename(self._kept)
        self.earlier = earlier

    def close(self) -> None:
        """Remove the last round."""
        self.earlier = None
        shutil.rmtree(self._kept, ignore_errors=True)


def tracks_writes(criu: Criu) -> bool:
    """Return whether this kernel tracks writes for CRIU."""
    return FEATURE in find.features(criu, (FEATURE,))


class FrozenMemory:
    """Read pages of frozen processes, by their pids inside the session."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._files: dict[int, int] = {}
        for pid in pids:
            inner_pid = _inner_pid(pid)
            if inner_pid is not None:
                self._files[inner_pid] = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, target: Target, vaddr: int, into: memoryview) -> None:
        """Fill `into` with the memory at `vaddr`. Raises OSError if there is no such process, or no such page."""
        if target.id not in self._files:
            raise OSError(f"process {target.id} of the session is gone")
        while into:
            done = os.preadv(self._files[target.id], [into], vaddr)
            if not done:
                raise OSError(f"process {target.id} has no memory at {vaddr:#x}")
            into, vaddr = into[done:], vaddr + done

    def close(self) -> None:
        """Close the memory files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _inner_pid(pid: int) -> int | None:
    try:
        return proc.inner_pid(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
