"""One session, twenty times to the store and back: nothing drifts, nothing is left on the host."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.support import session_diff
from tests.support.host import Host, mounts, until, veths_of
from tests.support.program_session import Program

ROUNDS = 20
HOLDS = """
import os, socket, threading, time
data = os.urandom(1 << 20)
a, b = socket.socketpair(); a.send(b"waiting")
l = socket.create_server(("127.0.0.1", 7500)); c = socket.create_connection(("127.0.0.1", 7500)); s, _ = l.accept()
c.send(b"in flight")
f = open("/root/file", "w"); f.write("x" * 1000); f.flush()
g = open("/root/gone", "w"); g.write("y" * 1000); g.flush(); os.unlink("/root/gone")
threading.Thread(target=time.sleep, args=(1e6,)).start()
print("holding", flush=True); time.sleep(1e6)
"""


def size_of(top: Path) -> int:
    """Without what SQLite has written ahead: it begins anew at 1,000 pages, or when the agent leaves, whichever is
    first."""
    return sum(one.lstat().st_size for one in top.rglob("*") if one.is_file() and one.name != "lease.db-wal")


def on_the_host(host: Host, session: str) -> dict[str, int]:
    """What would grow if something stayed behind each time."""
    holder = host.holder(session)
    return {
        "mounts": sum(f"{host.dir}/" in line for line in mounts()),
        "interfaces": len(veths_of(host.subnet) & set(os.listdir("/sys/class/net"))),
        "cgroups": len([one for one in os.scandir(host.group()) if one.is_dir()]),
        "descriptors of the holder": len(os.listdir(f"/proc/{holder}/fd")),
        "processes": len(host.pids(session)) + len(os.listdir(f"/proc/{holder}/task")),
        "sockets": len(list(host.run.iterdir())),
        "files of the session": sum(1 for _ in (host.state / "sessions" / session).rglob("*")),
    }


def test_twenty_rounds(host: Host) -> None:
    with Program(host, "bash", "--norc") as bash:
        bash.type("PS1='> '; echo 0 > /root/n; sleep 1000 &\n")
        bash.see(r"\[1\]")
        bash.type(f"{sys.executable} -c '{HOLDS}' &\n")
        bash.see("holding")
        first = None
        saved = []
        for number in range(ROUNDS):
            before = bash.look()
            first = first or before
            saved.append(bash.park())
            bash.back()
            after = bash.look()
            session_diff.same(before, after)
            if number == 0:
                bare, disk = on_the_host(host, bash.session), size_of(host.state) - size_of(host.state / "store")
                stored = size_of(host.state / "store")
        lost, appeared = session_diff.differences(first or {}, after, [r"pid 2 map .*\[heap\]"])
        assert not lost and not appeared, (lost, appeared)
        left = on_the_host(host, bash.session)
        fds = "descriptors of the holder"  # one more or less: the agent may be connected to it just now
        assert abs(left.pop(fds) - bare.pop(fds)) <= 1
        assert left == bare
        grown = size_of(host.state) - size_of(host.state / "store") - disk
        assert grown < 256 << 10, f"{grown} bytes of disk beside the store"  # its logs and events
        ahead = host.state / "lease.db-wal"
        assert not ahead.exists() or ahead.stat().st_size < 8 << 20
        each = (size_of(host.state / "store") - stored) / (ROUNDS - 1)
        assert each < stored / 4, f"each round stores {each:.0f} bytes, the first {stored}"
        bash.type("jobs; fg %1\n")
        bash.see(r"\[1\]-? +Running +sleep 1000")
        bash.type("\x03echo end=$((2*21))\n")
        bash.see("end=42")
        assert [one["token"] for one in saved] == list(range(1, ROUNDS + 1))


def test_a_restored_session_still_ends_with_its_holder(host: Host) -> None:
    """No process outlives its holder, also after a restore: CRIU's worker is its parent only at first."""
    with Program(host, "bash", "--norc", "-c", "sleep 1000 & sleep 1001") as session:
        until(lambda: len(host.pids(session.session)) == 4)
        session.through()
        os.kill(host.holder(session.session), signal.SIGKILL)
        until(lambda: not host.pids(session.session), 5, "it ends with its holder")
        assert host.sessions()[0]["note"] == "its holder died"
