"""Where watched files are searched for, and what is passed to CRIU about them."""

from __future__ import annotations

import itertools
import os
import struct
from pathlib import Path

import pytest

from cmdop_migrate.criu.image import watched_paths
from cmdop_migrate.criu.protobuf import fields, records
from cmdop_migrate.session import inotify_watches


def test_shallow_places_come_before_deep_ones_and_dependencies_last(tmp_path: Path) -> None:
    for place in ("node_modules/a/b", "src/deep/deeper", "zoo"):
        (tmp_path / place).mkdir(parents=True)
    found = [path.removeprefix(f"{tmp_path}/") for path in inotify_watches._below(str(tmp_path), set(), deep=True)]
    assert found.index("zoo") < found.index("src/deep") < found.index("src/deep/deeper")
    assert found.index("src/deep/deeper") < found.index("node_modules/a") < found.index("node_modules/a/b")


def test_usual_places_are_searched_before_the_depths_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's root under `tmp_path`, in which this process seems to work in /here."""
    for place in ("here/1/2/3", "etc", "var/log", "far/away/below"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.setattr(os, "readlink", lambda _: "/here")
    found = list(inotify_watches._candidates([os.getpid()], str(tmp_path), [], ["/known"], set()))
    order = [
        found.index(f"{tmp_path}{path}")
        for path in ("/known", "/here/1", "/etc", "/var/log", "/here/1/2/3", "/far/away/below")
    ]
    assert order == sorted(order)


def test_only_files_with_a_wanted_number_are_looked_at(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    wanted = (tmp_path / "7").stat().st_ino
    assert list(inotify_watches._below(str(tmp_path), {wanted}, deep=False)) == [str(tmp_path), f"{tmp_path}/7"]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("pos:\t0\ninotify wd:1 ino:1f sdev:2d mask:2 ignored_mask:0 fhandle-bytes:8 f_handle:00\n", {(0x2D, 0x1F)}),
        ("fanotify flags:2 event-flags:0\nfanotify ino:a sdev:800001 mflags:0 mask:2\n", {(0x800001, 0xA)}),
        ("fanotify flags:2 event-flags:0\nfanotify mnt_id:2c mflags:0 mask:2 ignored_mask:0\n", set()),
    ],
)
def test_watched_files_are_read_from_fdinfo(info: str, expected: set[inotify_watches.Key]) -> None:
    assert inotify_watches.parse(info) == inotify_watches.Marks(frozenset(expected))


def test_a_watch_on_a_whole_file_system_is_reported() -> None:
    assert inotify_watches.parse("fanotify flags:2 event-flags:0\nfanotify sdev:2d mflags:100 mask:2\n").others


def test_the_search_ends_when_its_time_is_over(tmp_path: Path) -> None:
    wanted = {(1, 1)}
    mounts = inotify_watches._Mounts({"/": 1}, {1: "overlay"})
    endless = (f"{tmp_path}/{number}" for number in iter(int, 1))
    assert not inotify_watches._look_at(endless, "", wanted, mounts, 0.0, inotify_watches.Watched())
    assert wanted == {(1, 1)}


def test_device_inode_and_path_are_passed_to_criu(tmp_path: Path) -> None:
    watched_paths.write(tmp_path, {(0x2D, 7): "/srv/ä", (0x800001, 1 << 40): "/a"})
    data = (tmp_path / watched_paths.NAME).read_bytes()
    assert struct.unpack_from("<II", data) == (0x55105940, 0x57004059)
    assert [[field.encoded[1:] for field in fields(entry)] for entry in records(data)] == [
        [b"\x2d", b"\x07", b"\x07" + "/srv/ä".encode()],
        [b"\x81\x80\x80\x04", b"\x80\x80\x80\x80\x80\x20", b"\x02/a"],
    ]
    watched_paths.remove(tmp_path)
    assert not list(tmp_path.iterdir())
    watched_paths.write(tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_the_root_and_the_targets_of_links_are_candidates(tmp_path: Path) -> None:
    for place in ("here/inner", "far/modules/a", "near/b"):
        (tmp_path / place).mkdir(parents=True)
    for number in range(5):
        (tmp_path / "here" / f"file{number}").touch()
    (tmp_path / "here" / "absolute").symlink_to("/far/modules")
    (tmp_path / "here" / "relative").symlink_to("../near")
    (tmp_path / "here" / "inside").symlink_to("inner")
    (tmp_path / "here" / "above").symlink_to("..")
    found = set(inotify_watches._link_targets(f"{tmp_path}/here", str(tmp_path)))
    assert found == {f"{tmp_path}/far/modules", f"{tmp_path}/near"}


def test_a_large_directory_does_not_starve_the_others() -> None:
    endless = (f"/large/{number}" for number in itertools.count())
    found = list(itertools.islice(inotify_watches._in_turn([endless, iter(["/a", "/b"]), iter(["/c"])]), 2000))
    assert {"/a", "/b", "/c"} <= set(found)
    assert list(inotify_watches._in_turn([iter("ab"), iter(""), iter("c")])) == ["a", "b", "c"]
