"""Records on a full disk: a process keeps a record it could not write only until another process writes that record."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.host.host import Host as LocalHost
from cmdop_migrate.model import Record, Spec, new_session_id
from tests.support.disk import fill, tmpfs


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk")
@pytest.mark.parametrize("phase", ["live", "handing"])
def test_who_could_not_write_it_down_does_not_hold_on_to_it(tmp_path: Path, phase: str) -> None:
    """An agent runs for months: a session that is back must not be over for it."""
    with tmpfs(tmp_path / "s", 4 << 20) as disk:
        environ = {"CMDOP_MIGRATE_STATE_DIR": str(disk), "CMDOP_MIGRATE_RUN_DIR": str(tmp_path / "r")}
        records, others = (LocalHost(config.load(os.devnull, environ=environ)) for _ in range(2))
        records.prepare()
        spec = Spec(("sleep",), "/", "root", ())
        lost = Record(new_session_id(), "w", "host-t", 1, "starting", spec, 1.0)
        os.close(records.claim(lost))
        lost = replace(lost, phase=phase, checkpoint="c" * 24)  # type: ignore[arg-type]  # one of them
        records.save(lost)
        ballast = fill(disk)
        records.sweep()
        known = records.load(lost.session)
        assert known is not None and known.phase == ("exited" if phase == "live" else "parked")
        assert others.load(lost.session) == lost, "it could be written"
        ballast.unlink()
        back = replace(lost, phase="live", token=2, pid=os.getpid())
        others.save(back)
        assert records.load(lost.session) == back
