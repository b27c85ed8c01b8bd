"""The status file of the link: written by its process, and not taken for that of another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.config import Config
from cmdop_migrate.gateway import link_status
from cmdop_migrate.gateway.link_status import LinkStatus, StatusFile


@pytest.fixture
def settings(tmp_path: Path) -> Config:
    places = {"CMDOP_MIGRATE_STATE_DIR": str(tmp_path / "s"), "CMDOP_MIGRATE_RUN_DIR": str(tmp_path)}
    return config.load(environ={**places, "CMDOP_MIGRATE_CONFIG": os.devnull})


def test_status_is_up_only_when_connected_to_every_relay(settings: Config) -> None:
    assert link_status.read(settings) is None
    file = StatusFile(settings)
    for connected, relays, is_up in ((0, 0, False), (0, 1, False), (1, 2, False), (2, 2, True)):
        file.write(connected, relays)
        status = link_status.read(settings)
        assert status == LinkStatus(os.getpid(), connected, relays) and status.is_up == is_up


def test_a_closed_link_neither_deletes_nor_overwrites_the_status_of_the_next(settings: Config) -> None:
    old, path = StatusFile(settings), settings.run_dir / "link.json"
    old.write(1, 1)
    path.write_text(json.dumps({"pid": 1, "connected": 1, "relays": 1}))  # another process has written since
    old.close()
    old.write(0, 1)
    assert link_status.read(settings) == LinkStatus(1, 1, 1)
    path.unlink()
    own = StatusFile(settings)
    own.write(1, 1)
    own.close()
    assert not path.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"pid": "x", "connected": 1, "relays": 1}'])
def test_a_damaged_status_file_is_no_status(settings: Config, content: str) -> None:
    (settings.run_dir / "link.json").write_text(content)
    assert link_status.read(settings) is None


def test_an_unwritable_directory_is_ignored(settings: Config) -> None:
    settings.run_dir.rmdir()
    StatusFile(settings).write(1, 1)
    assert link_status.read(settings) is None
