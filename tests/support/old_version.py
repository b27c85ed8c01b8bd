"""Provide the version before: its package, taken from git, and a golden copy of the state that it left on disk.

`tests/golden/state-0.1.0.tar.gz` holds a store, a lease register, keys, the state directories of two hosts, and `facts.json`:
what the commands of that version said about them. `python -m tests.support.old_version` makes it again, as root, in a
mount namespace without mounts of this machine, which would be part of the records. Nothing in the copy is secret: its
key seals only its own store.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.support.host import PROJECT, Host, pair, until

# The last commit before every module moved. The commits between it and that version's last (231d73d) change no code.
COMMIT = "4b8f3a2848b203788bdd1b5f36a6d2c11c9c1047"
GOLDEN = PROJECT / "tests" / "golden" / "state-0.1.0.tar.gz"
ECHO = "n=0; while read line; do n=$((n+1)); echo got-$n-$line; done"
KEPT = ("keys", "store", "lease", "host-a/s", "host-b/s")
NOT_KEPT = ("log", "cache", "lock")


def has_commit() -> bool:
    """Return whether this clone holds the version before; a shallow clone does not."""
    found = subprocess.run(
        ["git", "-C", PROJECT, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, check=False
    )
    return found.returncode == 0


def extract_package(directory: Path) -> Path:
    """Put the package of the version before into `directory`, for PYTHONPATH."""
    packed = subprocess.run(
        ["git", "-C", PROJECT, "archive", COMMIT, "cmdop_migrate"], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(directory, filter="data")
    return directory


def run_old(host: Host, package: Path) -> None:
    """Let the following commands of `host` be those of the version before."""
    host.extra["PYTHONPATH"] = str(package)


def run_new(host: Host) -> None:
    """Let the following commands of `host` be those of this version; the agent of the version before is ended."""
    del host.extra["PYTHONPATH"]
    host.kill_agent()


def extract_golden(directory: Path) -> dict[str, Any]:
    """Put the golden state into `directory`; return what the version before said about it."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(directory, filter="data")
    facts: dict[str, Any] = json.loads((directory / "facts.json").read_text())
    return facts


def golden_hosts(directory: Path) -> tuple[Host, Host]:
    """Return the two hosts whose state `extract_golden` put into `directory`."""
    shared = {
        "CMDOP_MIGRATE_STORE": f"file://{directory}/store",
        "CMDOP_MIGRATE_LEASE": f"sqlite://{directory}/lease/lease.db",
        "CMDOP_MIGRATE_KEY_FILE": f"{directory}/keys",
    }
    return Host(directory / "host-a", name="host-a", extra=dict(shared)), Host(
        directory / "host-b", name="host-b", extra=dict(shared)
    )


def make_state(a: Host, b: Host) -> dict[str, Any]:
    """Leave sessions that are parked, ended, killed, moved and running; return what the commands say about them."""
    a.start("sh", "-c", ECHO, name="parked")
    a.cm_json("send", "parked", "first", "--enter")
    a.wait_for("parked", "got-1-first")
    a.cm_json("checkpoint", "parked", "--carry", "none", "--tag", "before-update")
    a.start("sh", "-c", "exit 7", name="ended")
    until(lambda: {"exited", "parked"} == {row["state"] for row in a.sessions()}, 20, "the session ends")
    a.start("sleep", "1000", name="killed")
    a.cm_json("kill", "killed", "--signal", "KILL")
    a.start("sh", "-c", ECHO, name="moved")
    a.cm_json("checkpoint", "moved", "--carry", "none")
    b.cm_json("restore", "moved")
    b.cm_json("checkpoint", "moved", "--carry", "none")
    a.start("sh", "-c", ECHO, name="running")
    a.cm_json("send", "running", "typed", "--enter")
    a.wait_for("running", "got-1-typed")
    return {
        "host-a": a.sessions(),
        "host-b": b.sessions(),
        "checkpoints": a.cm_json("checkpoints", "ls")["checkpoints"],
        "leases": {row["name"]: a.cm_json("lease", "show", row["session"]) for row in a.sessions()},
        "inputs": a.cm_json("inputs", "parked")["inputs"],
        "output": a.output("parked"),
    }


def write_golden() -> None:
    """Make the golden state with the version before. Agents end first: a copy of what they write would be torn."""
    with (
        tempfile.TemporaryDirectory() as made,
        tempfile.TemporaryDirectory() as old,
        pair(Path(made), ttl="15s") as (a, b),
        tarfile.open(GOLDEN, "w:gz") as archive,
    ):
        package = extract_package(Path(old))
        for host in (a, b):
            run_old(host, package)
        facts = make_state(a, b)
        for host in (a, b):
            host.kill_agent()
        with sqlite3.connect(f"{made}/lease/lease.db") as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()
        (Path(made) / "facts.json").write_text(json.dumps(facts, indent=1))
        for name in (*KEPT, "facts.json"):
            archive.add(f"{made}/{name}", name, filter=_kept)


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out logs, caches, sockets, the layers of running sessions and this machine's users."""
    parts = Path(member.name).parts
    if len(parts) > 2 and (parts[2] in NOT_KEPT or "layers" in parts):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


if __name__ == "__main__":
    if len(sys.argv) == 1:  # again, without the mounts and the search path of this machine
        bare = (
            "for at in $(awk '{print $5}' /proc/self/mountinfo | grep -E '^/(tmp|mnt|work)/'); do umount -l $at; done"
        )
        command = [sys.executable, "-m", "tests.support.old_version", "bare"]
        environ = {**os.environ, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        wrapped = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{bare}; exec "$@"', "sh", *command]
        sys.exit(subprocess.run(wrapped, cwd=PROJECT, env=environ, check=False).returncode)
    write_golden()
