"""The benchmark runs, small, and says what it promises to say. No figure is judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.host import PROJECT


@pytest.mark.skipif(os.geteuid() != 0, reason="sessions need root")
def test_bench_sessions() -> None:
    argv = [sys.executable, "scripts/py/bench.py", "sessions", "--sessions", "2", "--keys", "20"]
    done = subprocess.run([*argv, "--json"], cwd=PROJECT, capture_output=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["benchmark"] == "sessions" and found["machine"]["cpus"]
    names = [one["name"] for one in found["figures"]]
    assert [name.split(",")[0].split(" (")[0] for name in names] == ["start"] * 2 + ["holder"] * 2 + ["echo"] * 6
    assert all(one["unit"] in ("s", "ms", "MiB") for one in found["figures"])
    assert len(subprocess.run(argv, cwd=PROJECT, capture_output=True, timeout=60, check=True).stdout.splitlines()) == 13


def test_bench_crowd() -> None:
    argv = [sys.executable, "-m", "scripts.benchlib", "crowd", "--checkpoints", "8", "--ms", "1", "--json"]
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["checkpoints"] == 8 and len(found["rows"]) == 4
    assert all(one["ratio"] == one["ours_s"] / one["one_by_one_s"] > 0 for one in found["rows"])


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_bench_netlink() -> None:
    argv = [sys.executable, "-m", "scripts.benchlib", "netlink", "--rounds", "1", "--json"]
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("by hand", "pyroute2"):
        assert found["network"][name]["fastest_s"] > 0 and found["unix sockets"][name]["fastest_s"] > 0
    assert any("abstract" in names for names in found["unix sockets"]["differing_names"])
