"""State that the version before left on disk is read by this one: store, lease register, keys, records, journals.

The golden state is always read. Restoring with CRIU depends on the machine that made the image, so that part runs the
version before from git, on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate.lease.registry import open_lease
from tests.crash.witness import Witness
from tests.support import old_version
from tests.support.host import Host, a_host, pair

COMPARED = ("session", "name", "host", "state", "token", "command", "created", "note")


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[tuple[Host, Host, dict[str, Any]]]:
    """The hosts of the golden state, and what the version before said about it."""
    if os.geteuid() != 0:
        pytest.skip("sessions need root")
    facts = old_version.extract_golden(tmp_path)
    a, b = old_version.golden_hosts(tmp_path)
    try:
        yield a, b, facts
    finally:
        a.close()
        b.close()


@pytest.fixture
def old_package(tmp_path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("sessions need root")
    if not old_version.has_commit():
        pytest.skip(f"commit {old_version.COMMIT[:12]} is not in this shallow clone: git fetch --unshallow")
    (tmp_path / "old").mkdir()
    return old_version.extract_package(tmp_path / "old")


def rows(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: {key: row[key] for key in COMPARED} for row in found}


def test_records_of_the_version_before_are_listed_as_it_listed_them(
    golden: tuple[Host, Host, dict[str, Any]],
) -> None:
    a, b, facts = golden
    before, now = rows(facts["host-a"]), rows(a.sessions())
    for name in ("parked", "ended", "killed", "moved"):
        assert now[name] == before[name]
    # Its holder ran when the copy was made, as when a host loses its power.
    assert before["running"]["state"] == "running" and now["running"]["state"] == "exited", now["running"]
    assert rows(b.sessions()) == rows(facts["host-b"])
    assert a.output("parked") == facts["output"] and "got-1-first" in facts["output"]
    assert a.cm_json("inputs", "parked")["inputs"] == facts["inputs"]
    assert [event["event"] for event in a.events()][:2] == ["started", "parked"]


def test_checkpoints_of_the_version_before_are_listed_and_verified(golden: tuple[Host, Host, dict[str, Any]]) -> None:
    a, _, facts = golden
    assert a.cm_json("checkpoints", "ls")["checkpoints"] == facts["checkpoints"]
    assert [one["tag"] for one in facts["checkpoints"]] == ["before-update", None, None]
    for one in facts["checkpoints"]:
        shown = a.cm_json("checkpoints", "show", one["checkpoint"])
        assert shown["session"] == one["session"] and shown["token"] == one["token"]
    verified = a.cm_json("checkpoints", "verify")["verified"]
    assert [(one["checkpoint"], one["problem"]) for one in verified] == [
        (one["checkpoint"], None) for one in facts["checkpoints"]
    ]


def test_leases_of_the_version_before_keep_their_tokens(golden: tuple[Host, Host, dict[str, Any]]) -> None:
    a, _, facts = golden
    sessions = {row["name"]: row["session"] for row in facts["host-a"]}
    leases = open_lease(a.extra["CMDOP_MIGRATE_LEASE"], proven=True)
    try:
        assert {sessions["running"], sessions["parked"], sessions["moved"]} <= set(leases.sessions())
        for name, one in facts["leases"].items():
            seen = leases.inspect(sessions[name])
            assert (seen.record.token if seen else 0) == one["token"], name
    finally:
        leases.close()
    for name, one in facts["leases"].items():
        shown = a.cm_json("lease", "show", sessions[name])
        assert {key: shown[key] for key in ("token", "host", "state", "ttl_s")} == {
            key: one[key] for key in ("token", "host", "state", "ttl_s")
        }, name


def test_a_session_parked_by_the_version_before_is_restored(tmp_path: Path, old_package: Path) -> None:
    (tmp_path / "h").mkdir()
    with a_host(tmp_path / "h") as host:
        old_version.run_old(host, old_package)
        one = Witness.start(host)
        saved = host.cm_json("checkpoint", one.name)
        old_version.run_new(host)
        (row,) = host.sessions()
        assert (row["state"], row["token"]) == ("parked", saved["token"])
        (listed,) = host.cm_json("checkpoints", "ls")["checkpoints"]
        assert listed["checkpoint"] == saved["checkpoint"] and listed["problem"] is None
        assert one.restore()["token"] == saved["token"] + 1
        again = host.cm_json("checkpoint", one.name)
        assert again["bytes"]["new"] < saved["bytes"]["new"], "packs of the version before are used again"
        one.restore()


def test_a_session_parked_by_the_version_before_is_restored_on_another_host(tmp_path: Path, old_package: Path) -> None:
    with pair(tmp_path, ttl="15s") as (a, b):
        old_version.run_old(a, old_package)
        one = Witness.start(a)
        a.cm_json("checkpoint", one.name)
        b.cm_json("restore", one.session, "--wait", "30s")
        Witness(b, one.name, one.session).assert_runs()
        a.fails("restore", one.session, status=5, code="fenced")
        old_version.run_new(a)


def test_a_session_started_by_the_version_before_runs_on_and_is_checkpointed(tmp_path: Path, old_package: Path) -> None:
    """An update of the package does not end sessions: their holders are processes of the version before."""
    (tmp_path / "h").mkdir()
    with a_host(tmp_path / "h") as host:
        old_version.run_old(host, old_package)
        one = Witness.start(host)
        old_version.run_new(host)
        one.assert_runs()
        host.cm_json("checkpoint", one.name)
        one.assert_parked()
        one.restore()
