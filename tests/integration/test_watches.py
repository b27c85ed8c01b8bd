"""Which file is watched, where others have the same number on another file system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cmdop_migrate.session import inotify_watches

PROGRAM = """
import ctypes, os, subprocess, sys
for name in ("a", "b", "c"):
    os.mkdir(name)
    subprocess.run(["mount", "-t", "tmpfs", "t", name], check=True)
    os.makedirs(name + "/with space")
assert len({os.stat(name + "/with space").st_ino for name in "abc"}) == 1
libc = ctypes.CDLL(None)
assert libc.inotify_add_watch(libc.inotify_init1(0), os.fsencode(sys.argv[1] + "/with space"), 0x100) == 1
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_watch_on_the_session_s_own_file_system(tmp_path: Path, name: str) -> None:
    command = ["unshare", "-m", sys.executable, "-c", PROGRAM, name]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        found = inotify_watches.find([process.pid], [])
        process.kill()
    assert list(found.paths.values()) == [f"{tmp_path}/{name}/with space"] and not found.lost
