"""Make small disks for tests, and fill them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def tmpfs(place: Path, size: int) -> Iterator[Path]:
    """Mount a small disk. Its name keeps it out of what a host counts as left behind."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "host-t", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Fill a disk to the last byte; return the file that takes up the room."""
    ballast = place / "ballast"
    with ballast.open("wb", 0) as file, contextlib.suppress(OSError):
        for step in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(step))
    return ballast
