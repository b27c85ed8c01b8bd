"""A failure of CRIU, as a person reads it, and where its log is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.cli import render
from cmdop_migrate.errors import CriuFailed
from cmdop_migrate.host import resources


def test_the_end_of_a_log_is_printed_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    render.failure(CriuFailed("the dump failed: no space\n(00.1) Error\t7\n(00.2) \x1b[2J", "See it."), as_json=False)
    assert capsys.readouterr().err.splitlines() == [
        "cmdop-migrate: the dump failed: no space",
        "    (00.1) Error  7",
        "    (00.2) \\x1b[2J",
        "  See it.",
    ]


def test_each_session_keeps_the_log_of_its_last_failure(tmp_path: Path) -> None:
    settings = config.load(environ={"CMDOP_MIGRATE_STATE_DIR": str(tmp_path / "s"), "CMDOP_MIGRATE_CONFIG": os.devnull})
    settings.log_file.parent.mkdir(parents=True)
    images = tmp_path / "dump"
    images.mkdir()
    for session, text in (("one", "first"), ("two", "other"), ("one", "second")):
        (images / "dump.log").write_text(text)
        error = CriuFailed("the dump failed", f"See {images}/dump.log")
        error.passing = session == "two"
        kept = resources.keep_log(error, images, settings, "dump", session)
        assert kept.passing == error.passing
        assert kept.hint == f"See {settings.log_file.parent}/criu-dump-{session}.log"
    logs = {path.name: path.read_text() for path in settings.log_file.parent.iterdir()}
    assert logs == {"criu-dump-one.log": "second", "criu-dump-two.log": "other"}


def test_only_the_latest_logs_are_kept(tmp_path: Path) -> None:
    settings = config.load(environ={"CMDOP_MIGRATE_STATE_DIR": str(tmp_path), "CMDOP_MIGRATE_CONFIG": os.devnull})
    settings.log_file.parent.mkdir(parents=True)
    for number in range(resources.KEPT_LOGS):
        old = settings.log_file.with_name(f"criu-dump-{number}.log")
        old.touch()
        os.utime(old, (number, number))
    (tmp_path / "restore.log").write_text("new")
    resources.keep_log(CriuFailed("x"), tmp_path, settings, "restore", "new")
    left = {path.name for path in settings.log_file.parent.iterdir()}
    assert len(left) == resources.KEPT_LOGS and "criu-dump-0.log" not in left and "criu-restore-new.log" in left
