"""The host of these tests has no way out: programs that update themselves or report usage reach nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, a_host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host whose sessions reach nothing but themselves: neither the outside nor a service of this machine."""
    if os.geteuid() != 0:
        pytest.skip("sessions need root")
    with a_host(tmp_path) as one:
        table = f"cm_programs_{os.getpid()}"
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority -10; ip saddr {one.subnet} drop; }}\n"
            for hook in ("forward", "input")
        )
        subprocess.run(["nft", f"table inet {table} {{\n{chains}}}"], check=True)
        try:
            yield one
        finally:
            subprocess.run(["nft", "delete", "table", "inet", table], check=False)
