"""Changes that a session makes after CRIU was started for its dump, and before the freeze."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.crash.witness import finished, stopped
from tests.support import disk
from tests.support.host import Host

WATCHER = """
import ctypes, os, select, sys
libc = ctypes.CDLL(None)
fd = libc.inotify_init1(0)
for line in sys.stdin:
    word = line.strip()
    if word == "watch":
        os.makedirs("/var/deep/down")
        assert libc.inotify_add_watch(fd, b"/var/deep/down", 0x100) == 1
        print("it", "watches", flush=True)
    else:
        open("/var/deep/down/" + word, "w").close()
        heard = bool(select.select([fd], [], [], 5)[0])
        print(word, "heard", heard, flush=True)
"""


def test_checkpoint_with_a_watch_added_after_the_first_check(host: Host) -> None:
    host.start(sys.executable, "-c", WATCHER, name="w")
    with stopped(host, "freeze", "checkpoint", "w") as (cli, _):
        host.cm_json("send", "w", "watch", "--enter")
        host.wait_for("w", "it watches")
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    host.cm_json("restore", "w")
    host.cm_json("send", "w", "new", "--enter")
    host.wait_for("w", "new heard True")


def test_processes_started_and_ended_during_the_checkpoint(host: Host) -> None:
    host.start("bash", "--norc", name="w")
    host.cm_json("send", "w", "sleep 1001 & sleep 1002 &", "--enter")
    host.wait_for("w", r"\[2\] \d+")
    with stopped(host, "freeze", "checkpoint", "w") as (cli, _):
        host.cm_json("send", "w", "kill %1; sleep 1003 & cd /var; word=fresh", "--enter")
        host.wait_for("w", r"\[3\] \d+")
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    host.cm_json("restore", "w")
    host.cm_json("send", "w", "jobs -r; echo $PWD $word", "--enter")
    host.wait_for("w", "/var fresh")
    tree = [one["command"] for one in host.cm_json("show", "w")["tree"]]
    assert sorted(tree)[-2:] == ["sleep 1002", "sleep 1003"], tree


MAPPER = """
import mmap, sys
with open(sys.argv[1], "wb") as file:
    file.write(bytes(4096))
file = open(sys.argv[1], "r+b")
memory = mmap.mmap(file.fileno(), 4096)
print("it", "maps", flush=True)
for line in sys.stdin:
    word = line.strip().encode()
    if word != b"look":
        memory[:len(word)] = word
    print("there:", open(sys.argv[1], "rb").read(6).decode("latin-1"), memory[:6].decode("latin-1"), flush=True)
"""


@pytest.mark.parametrize("who", ["ann", "dev"])
def test_writes_through_a_mapping_on_another_mount_are_captured(host: Host, tmp_path: Path, who: str) -> None:
    """No time stamp tells of the second write: its page was writable already. Like a home directory, of a user called dev."""
    with disk.tmpfs(tmp_path / "home", 1 << 20) as home:
        (home / who).mkdir()
        host.start(sys.executable, "-c", MAPPER, str(home / who / "db"), name="m")
        host.wait_for("m", "it maps")
        host.cm_json("send", "m", "first.", "--enter")
        host.wait_for("m", "there: first. first.")
        time.sleep(0.1)
        host.cm_json("checkpoint", "m", "--leave-running")
        host.cm_json("send", "m", "second", "--enter")
        host.wait_for("m", "there: second second")
        host.cm_json("checkpoint", "m")
        host.cm_json("restore", "m")
        host.cm_json("send", "m", "look", "--enter")
        host.wait_for("m", "look\\s+there: second second")
        host.cm_json("kill", "m")


READER = """
import sys
file = open(sys.argv[1])
print("it", "has", "it", flush=True)
for line in sys.stdin:
    print("read:", file.read(), flush=True)
"""


def test_host_file_on_another_mount_must_be_unchanged(host: Host, tmp_path: Path) -> None:
    """As on the first one: what a session has open must not be another file when it comes back."""
    with disk.tmpfs(tmp_path / "home", 1 << 20) as home:
        (home / "data").write_text("as it was")
        host.start(sys.executable, "-c", READER, str(home / "data"), name="m")
        host.wait_for("m", "it has it")
        host.cm_json("checkpoint", "m")
        (home / "data").write_text("otherwise")
        refused = host.cm("--json", "restore", "m")
        assert refused.returncode == 4 and str(home / "data").encode() in refused.stdout
        (home / "data").write_text("as it was")
        host.cm_json("restore", "m")
        host.cm_json("send", "m", "go", "--enter")
        host.wait_for("m", "read: as it was")
        host.cm_json("kill", "m")
