"""Check that the page to which CRIU writes its instructions is known in advance."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.criu import injected_code
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.snapshot import checkpoint
from cmdop_migrate.snapshot.capture import dump
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions
from tests.support.host import Host
from tests.support.program_session import Program

# Statically linked at any address: the vDSO may come before all of its own mappings.
STATIC = "echo 'int pause(void); int main() { for (;;) pause(); }' > s.c; gcc -static-pie -o s s.c"


def test_noted_page_is_the_one_criu_writes_to(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed: scripts/setup --test")
    noted: dict[int, injected_code.Code] = {}
    logs: list[str] = []
    note, run = injected_code.note, dump.Dump._dump

    def note_too(pids: list[int]) -> Mapping[int, injected_code.Code]:
        noted.update(note(pids))
        return noted

    def run_too(self: dump.Dump, *more: object) -> None:
        run(self, *more)  # type: ignore[arg-type]
        logs.append(Path(self._images, "dump.log").read_text(errors="replace"))

    monkeypatch.setattr(injected_code, "note", note_too)
    monkeypatch.setattr(dump.Dump, "_dump", run_too)
    for key, value in host.env().items():
        monkeypatch.setenv(key, value)
    start = f"cd /root; {STATIC}; for i in 1 2 3 4 5 6; do ./s & done; python3 -qc 'input()' & echo rea''dy; sleep 1000"
    with Program(host, "bash", "-c", start) as session:
        session.see("ready")
        checkpoint.checkpoint(LocalHost(config.load()), session.session, CheckpointOptions(leave_running=True))
        (log,) = logs
        addresses = [int(one, 16) for one in re.findall(r"Parasite syscall_ip at (0x[0-9a-f]+)", log)]
        assert len(addresses) >= 9 and sorted(addresses) == sorted(one.vaddr for one in noted.values())
        assert all(len(one.content) == 4096 and one.content[:2] != b"\x0f\x05" for one in noted.values())
