"""What a drain writes down, and who it keeps out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.drain.drain import DrainOptions
from cmdop_migrate.drain.runner import DrainRunner
from cmdop_migrate.errors import Blocked
from cmdop_migrate.host import drain_journal
from cmdop_migrate.host.drain_journal import KEPT, Drain, Drains, Entry
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.host.move_journal import Moves
from cmdop_migrate.model import Exit, Record, Spec
from cmdop_migrate.util.self_exec import Worker
from cmdop_migrate.util.signals import Stop
from tests.support.host import until


def test_journal_remembers_where_each_session_went(tmp_path: Path) -> None:
    drains = Drains(tmp_path)
    assert drains.last() is None and drains.find("") is None
    made = drains.begin("host-a")
    made = drains.save(made.with_entry(Entry("a" * 24, "w", "going", "host-b")))
    made = drains.save(made.with_entry(Entry("a" * 24, "w", "moved", "host-b", facts={"token": 2})))
    found = Drains(tmp_path).find(made.id)
    assert found == made and [one.state for one in made.entries] == ["moved"]
    assert made.of("moved")[0].to_json() == {"session": "a" * 24, "name": "w", "to": "host-b", "token": 2}


def test_journal_skips_unreadable_drains_and_deletes_old_ones(tmp_path: Path) -> None:
    drains = Drains(tmp_path)
    for _ in range(KEPT + 3):
        last = drains.begin("host-a")
    assert len(drains.all()) == KEPT
    (tmp_path / "drains" / f"{last.id}.json").write_text("{")
    (tmp_path / "drains" / "new.json").write_text(json.dumps({"version": 2}))
    assert drains.find(last.id) is None and len(drains.all()) == KEPT - 1
    assert isinstance(drains.last(), Drain)


def test_second_drain_is_refused(tmp_path: Path) -> None:
    drains = Drains(tmp_path)
    with drains.alone(), pytest.raises(Blocked, match="already, by process"), Drains(tmp_path).alone():
        pass
    with drains.alone():
        pass


@pytest.mark.parametrize("text", ['{"drain": "x", "since": 1}', "{", "", '{"drain": 1}', "[]"])
def test_unreadable_drain_flag_still_refuses_sessions(tmp_path: Path, text: str) -> None:
    drain_journal.check_not_draining(tmp_path, "host-a")
    assert drain_journal.read_flag(tmp_path) is None
    (tmp_path / drain_journal.FLAG).write_text(text)
    assert drain_journal.read_flag(tmp_path) is not None
    with pytest.raises(Blocked, match="host-a is being drained"):
        drain_journal.check_not_draining(tmp_path, "host-a")
    drain_journal.clear_flag(tmp_path)
    drain_journal.clear_flag(tmp_path)
    drain_journal.check_not_draining(tmp_path, "host-a")


def test_worker_without_an_answer_is_reported_as_failed(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "s"), "--run-dir", str(tmp_path / "r"))
    worker = Worker(flags, ("migrate", "x", "--to", "y"))
    ended = until(worker.ended, 20)
    assert ended is not None and not ended.ok and ended.code in ("session_not_found", "not_root") and ended.message
    killed = Worker(flags, ("wait", "x"))
    killed._process.kill()
    ended = until(killed.ended, 20)
    assert ended is not None and not ended.ok and "killed by signal 9" in ended.message


def test_session_counts_as_moved_before_its_migration_journal_ends(tmp_path: Path) -> None:
    """Left over from a drain that was killed, it ends by itself: first the copy here goes, then the journal says so."""
    found = config.load(environ={"CMDOP_MIGRATE_STATE_DIR": str(tmp_path), "CMDOP_MIGRATE_CONFIG": os.devnull})
    records, drains = LocalHost(found), Drains(tmp_path)
    session = "a" * 24
    records.directory(session).mkdir(parents=True)
    spec = Spec(("true",), "/", "root", ())
    ended = Exit(None, "", 1.0, "moved", "host-b", 2)
    records.save(Record(session, "w", "host-a", 1, "exited", spec, 0.0, exit=ended))
    Moves(tmp_path, 60.0).begin(session, "w", "host-a", "b", 1)
    made = drains.begin("host-a")
    run = DrainRunner(records, drains, made, DrainOptions().limits(), (), Stop(), lambda _: None, [])
    run._find_out(Entry(session, "w", "going", "b"))
    assert [(one.state, one.to) for one in run.journal.entries] == [("moved", "b")]
