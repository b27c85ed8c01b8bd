"""Directories beside those of the sessions that are not sessions: a copy made by an admin, fsck's lost+found."""

from __future__ import annotations

import shutil

from tests.crash.witness import Witness
from tests.support.host import Host, until


def test_a_copy_of_a_session_s_directory_is_not_taken_for_it(host: Host) -> None:
    """The copy's record says live, and no process holds the copy's lock: that must not count as the session's death."""
    one = Witness.start(host)
    sessions = host.state / "sessions"
    shutil.copytree(sessions / one.session, sessions / f"{one.session}.bak", ignore=shutil.ignore_patterns("root"))
    (sessions / "lost+found").mkdir()
    (sessions / "lost+found" / "#1234").write_text("somebody's")
    rows = host.sessions()
    assert one.record()["phase"] == "live"
    assert [row["state"] for row in rows] == ["running"]
    one.assert_runs()
    assert host.cm_json("lease", "show", one.name)["state"] == "held"
    assert (sessions / "lost+found" / "#1234").exists()
    host.ok("kill", one.name)
    until(lambda: one.record()["phase"] == "exited")
    assert (sessions / f"{one.session}.bak" / "session.json").exists()
    for name in (f"{one.session}.bak", "lost+found"):
        shutil.rmtree(sessions / name)
