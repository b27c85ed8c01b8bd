"""The host of these tests has no way out: programs that update themselves or report usage reach nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import Host, a_host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host whose sessions reach nothing but themselves: neither the outside nor a service of this machine."""
    if os.geteuid() != 0:
        pytest.skip("sessions need root")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, tmp_path, ignore_errors=True)  # up to 1 GB for an agent; pytest would keep it
        one = stack.enter_context(a_host(tmp_path))
        table = f"cm_programs_{os.getpid()}"
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority -10; ip saddr {one.subnet} drop; }}\n"
            for hook in ("forward", "input")
        )
        subprocess.run(["nft", f"table inet {table} {{\n{chains}}}"], check=True)
        stack.callback(subprocess.run, ["nft", "delete", "table", "inet", table], check=False)
        yield one
