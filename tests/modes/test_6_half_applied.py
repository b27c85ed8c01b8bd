"""Mode 6: moved in the middle of a change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.modes import record
from tests.modes.conftest import Sign
from tests.support.host import Host
from tests.support.host_pair import World

PROGRAM = """
import fcntl, sqlite3, subprocess, sys
base = sqlite3.connect("/root/books.db", isolation_level=None, timeout=0.1)
base.execute("create table moves (account text, amount int)")
base.execute("begin immediate")
base.execute("insert into moves values ('a', -10)")
half = open("/root/half", "w"); fcntl.flock(half, fcntl.LOCK_EX); half.write("one "); half.flush()
print("half done", flush=True)
sys.stdin.readline()
other = "import sqlite3; sqlite3.connect('/root/books.db', isolation_level=None, timeout=0.1).execute('begin immediate')"
done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
print("others:", done.stderr.splitlines()[-1] if done.returncode else "lock lost", flush=True)
base.execute("insert into moves values ('b', 10)"); base.execute("commit")
half.write("two"); half.close()
print("sum", *base.execute("select sum(amount), count(*) from moves").fetchone(), open("/root/half").read(), flush=True)
sys.stdin.readline()
"""


def held(host: Host, session: str) -> list[dict[str, Any]]:
    """Open files and locks, as `show` lists them; a pid is another on another host."""
    rows = host.cm_json("show", session)["open_files"]
    return [{key: row[key] for key in ("path", "access", "offset", "locks")} for row in rows]


def test_an_open_transaction_and_its_locks_go_along(world: World, tmp_path: Path, sign: Sign) -> None:
    a, b = world.a, world.b
    hook = tmp_path / "hook"
    hook.write_text(f'#!/bin/sh\necho "$CMDOP_MIGRATE_HOOK" >> {tmp_path}/heard\n')
    hook.chmod(0o755)
    options = ("--hook", f"pre-freeze={hook}", "--hook", f"post-restore={hook}")
    session = a.start(sys.executable, "-c", PROGRAM, name="w", options=options)["session"]
    a.wait_for("w", "half done")
    before = held(a, session)
    locks = {Path(row["path"]).name: row["locks"] for row in before}
    assert locks["half"] == ["FLOCK WRITE"] and any(one.startswith("POSIX WRITE") for one in locks["books.db"])
    a.ok("migrate", "w", "--to", "host-b")
    assert held(b, session) == before, "the same files at the same place, under the same locks"
    ran = [(one["host"], one["of"]) for host in (a, b) for one in record.events(host, session, "hook_ran")]
    assert ran == [("host-a", "pre-freeze"), ("host-b", "post-restore")]
    assert (tmp_path / "heard").read_text().split() == ["pre-freeze", "post-restore"]
    b.ok("send", session, "go on", "--enter")
    b.wait_for(session, "others: sqlite3.OperationalError: database is locked")
    b.wait_for(session, "sum 0 2 one two")
    sign(held=before, hooks=[f"{kind} on {host}" for host, kind in ran], then="committed once, whole")
