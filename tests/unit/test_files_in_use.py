"""What processes hold, while they come and go."""

from __future__ import annotations

import os
from pathlib import Path

from cmdop_migrate.session import files_in_use


def test_a_process_that_has_ended_is_skipped(tmp_path: Path) -> None:
    """A process on its way out is listed still, but the kernel shows its mounts no more: EINVAL, not ENOENT."""
    layers = files_in_use.Layers(("/",), (tmp_path,))
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        found = files_in_use.look([pid, os.getpid()], layers)
    finally:
        os.waitpid(pid, 0)
    assert any("python" in path for path in found.mapped)
