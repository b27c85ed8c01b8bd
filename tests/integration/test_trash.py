"""End sessions with many files without waiting: the files are moved to the trash, and a later command removes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import CM, Host, until

MANY = 300
PROGRAM = f"""
import os
os.makedirs("/srv/many")
for number in range({MANY}):
    open(f"/srv/many/{{number}}", "w").close()
print("made", flush=True)
while input():
    print("have", len(os.listdir("/srv/many")), flush=True)
"""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def files_below(path: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(path))


def test_a_parked_session_s_files_are_set_aside_and_removed_later(host: Host) -> None:
    session = host.start(sys.executable, "-c", PROGRAM, name="t")["session"]
    host.wait_for("t", "made")
    trash, layers = host.state / "trash", host.state / "sessions" / session / "layers"
    trash.mkdir()
    with locked(trash):  # as if removing took forever
        host.cm_json("checkpoint", "t")
        assert not layers.exists() and files_below(trash) >= MANY
        host.cm_json("restore", "t")
        host.ok("send", "t", "x", "--enter")
        host.wait_for("t", f"have {MANY}")
        host.ok("kill", "t")
    host.ok("ls")  # no other process removes them now: this command finishes it
    until(lambda: os.listdir(trash) == [], 20, "the trash is emptied")


@pytest.mark.parametrize("verb", ["restore", "kill"])
def test_restore_and_kill_wait_for_the_lock_of_a_holder_that_is_ending(host: Host, verb: str) -> None:
    session = host.start("sleep", "1000", name="t")["session"]
    host.cm_json("checkpoint", "t")
    log = host.state / "log" / "cmdop-migrate.log"
    with locked(host.state / "sessions" / session / "holder.lock"):
        started = subprocess.Popen(
            [*CM, verb, "t"],
            env=host.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
        )
        waiting = b"waiting until another process releases"
        until(lambda: started.poll() is not None or waiting in log.read_bytes(), 20, "it waits for the lock")
        assert started.poll() is None, started.communicate()
    out, err = started.communicate(timeout=60)
    assert started.returncode == 0, (out, err)
    assert bool(host.pids(session)) is (verb == "restore")
