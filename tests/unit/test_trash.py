"""Trees that are set aside and removed later: of any depth, in bounded time, without following links."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from cmdop_migrate.holder import start
from cmdop_migrate.util import trash


@pytest.fixture
def bin_(tmp_path: Path) -> Path:
    return tmp_path / "trash"


def test_set_aside_renames_and_remove_empties(tmp_path: Path, bin_: Path) -> None:
    tree = tmp_path / "layers"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").write_text("x")
    inode = tree.stat().st_ino
    assert trash.set_aside(str(bin_), str(tree))
    assert not tree.exists() and [one.stat().st_ino for one in bin_.iterdir()] == [inode]
    assert trash.remove(str(bin_)) and trash.is_empty(str(bin_))


def test_nothing_to_set_aside(tmp_path: Path, bin_: Path) -> None:
    assert not trash.set_aside(str(bin_), str(tmp_path / "none"))
    assert trash.is_empty(str(bin_)) and trash.remove(str(bin_)) and not bin_.exists()


def test_links_are_removed_and_not_followed(tmp_path: Path, bin_: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(outside)
    trash.set_aside(str(bin_), str(tree))
    (bin_ / "link").symlink_to(outside)
    assert trash.remove(str(bin_), None) and trash.is_empty(str(bin_))
    assert (outside / "kept").exists()


def test_a_trash_that_is_a_link_is_left_alone(tmp_path: Path, bin_: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    bin_.symlink_to(outside)
    assert trash.remove(str(bin_), None) and (outside / "kept").exists()


def test_trees_of_any_depth(tmp_path: Path, bin_: Path) -> None:
    """Deeper than a path may be long, and than Python may recurse."""
    top = os.open(tmp_path, os.O_RDONLY)
    fd = top
    for _ in range(2000):
        os.mkdir("d" * 8, dir_fd=fd)
        inner = os.open("d" * 8, os.O_RDONLY, dir_fd=fd)
        if fd != top:
            os.close(fd)
        fd = inner
    os.close(fd)
    os.close(top)
    trash.set_aside(str(bin_), str(tmp_path / ("d" * 8)))
    assert trash.remove(str(bin_), None) and trash.is_empty(str(bin_))


def test_removal_time_is_bounded_and_the_next_call_continues(tmp_path: Path, bin_: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(500):
        (tree / str(number)).touch()
    trash.set_aside(str(bin_), str(tree))
    assert not trash.remove(str(bin_), 0.0)
    left = sum(len(os.listdir(one)) for one in bin_.iterdir())
    assert 0 < left < 500
    assert trash.remove(str(bin_), None) and trash.is_empty(str(bin_))


def test_one_remover_at_a_time(tmp_path: Path, bin_: Path) -> None:
    (tmp_path / "tree").mkdir()
    trash.set_aside(str(bin_), str(tmp_path / "tree"))
    fd = os.open(bin_, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert trash.remove(str(bin_)) and not trash.is_empty(str(bin_))
    os.close(fd)
    assert trash.remove(str(bin_)) and trash.is_empty(str(bin_))


def test_a_session_s_layers_are_set_aside_and_its_images_removed_at_once(tmp_path: Path, bin_: Path) -> None:
    directory = tmp_path / "sessions" / "id"
    for name in ("layers", "root", "images"):
        (directory / name).mkdir(parents=True)
        (directory / name / "file").touch()
    start.remove_files(str(directory))
    assert os.listdir(directory) == []
    assert len(os.listdir(bin_)) == 2
    assert trash.make_room(str(tmp_path), 0) > 0 and len(os.listdir(bin_)) == 2, "there was room"
    trash.make_room(str(tmp_path), 1 << 62)
    assert trash.is_empty(str(bin_))
