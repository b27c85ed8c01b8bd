"""Test the file layer through a real overlay: change everything, capture, re-create, compare the merged views."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cmdop_migrate.errors import Blocked
from cmdop_migrate.holder import sandbox
from cmdop_migrate.images.files.capture import capture
from cmdop_migrate.images.files.file_table import WHITEOUT, parse
from cmdop_migrate.images.files.unpack import restore
from cmdop_migrate.images.files.walk import measure
from cmdop_migrate.session import files_in_use
from tests.support.file_tree import remove_tree, snapshot
from tests.support.memory_chunks import MemoryChunks, blocks

Mount = Callable[..., Path]
OFF = "redirect_dir=off,metacopy=off,index=off"  # of sessions that were started before directories could be renamed
ON = sandbox.OVERLAY_OPTIONS + sandbox.ONE_DEVICE


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Mount]:
    """Mount an overlay of tmp/lower with the named upper; unmount all afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    mounted: list[Path] = []

    def mount(upper: str, options: str = OFF) -> Path:
        view, work = tmp_path / f"{upper}-view", tmp_path / f"{upper}-work"
        for directory in (tmp_path / upper, view, work):
            directory.mkdir(exist_ok=True)
        layers = f"lowerdir={tmp_path / 'lower'},upperdir={tmp_path / upper},workdir={work},{options}"
        done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, view], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no overlay here: {done.stderr}")
        mounted.append(view)
        return view

    yield mount
    for view in reversed(mounted):
        subprocess.run(["umount", view], check=True)
    for place in tmp_path.iterdir():  # pytest's own clean-up cannot delete a tree this deep
        remove_tree(place)


def _lower(root: Path) -> None:
    for name in ("gone", "changed", "moved", "mode", "owner"):
        (root / "etc").mkdir(parents=True, exist_ok=True)
        (root / "etc" / name).write_text(f"lower {name}\n")
    for name in ("replaced", "emptied", "kept", "renamed"):
        (root / name / "sub").mkdir(parents=True)
        (root / name / "file").write_text(name)
        (root / name / "sub" / "deep").write_text(name)
    os.link(root / "etc" / "owner", root / "etc" / "owner-link")


def _change(view: Path) -> None:
    """Do one of everything a session may do to its files."""
    etc = view / "etc"
    (etc / "gone").unlink()
    (etc / "changed").write_text("upper\n")
    (etc / "moved").rename(etc / "moved-to")
    (etc / "mode").chmod(0o4755)
    os.chown(etc / "owner", 1234, 5678)
    for name in ("replaced", "emptied", "renamed"):
        subprocess.run(["rm", "-r", view / name], check=True)
    (view / "replaced").mkdir()
    (view / "replaced" / "new").write_text("only this")
    (view / "emptied").mkdir(mode=0o711)
    (view / "kept" / "sub" / "deep").unlink()
    new = view / "new"
    new.mkdir(mode=0o2775)
    os.chown(new, 0, 4321)
    (new / "setuid").write_bytes(b"#!/bin/sh\n")
    os.chown(new / "setuid", 1000, 1000)
    (new / "setuid").chmod(0o6755)
    # user::rwx user:1000:r-- group::r-x mask::r-x other::---
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, perm, who)
        for tag, perm, who in (
            (1, 7, 2**32 - 1),
            (2, 4, 1000),
            (4, 5, 2**32 - 1),
            (16, 5, 2**32 - 1),
            (32, 0, 2**32 - 1),
        )
    )
    os.setxattr(new, "system.posix_acl_default", acl)
    (new / "inherits").write_text("acl")
    (new / "acl").write_text("acl")
    os.setxattr(new / "acl", "system.posix_acl_access", acl)
    os.setxattr(new / "acl", "user.note", b"\x00\xff raw")
    # cap_net_raw+ep, revision 2
    os.setxattr(new / "setuid", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0))
    os.setxattr(new / "setuid", "trusted.mine", b"kept")
    (new / "one").write_bytes(os.urandom(100_000))
    os.link(new / "one", new / "two")
    os.link(new / "one", view / "three")
    (new / "sub").mkdir()
    os.link(new / "one", new / "sub" / "four")
    with (new / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 30)
        for offset in (0, 300 << 20, (1 << 30) - 4096):
            sparse.seek(offset)
            sparse.write(b"page" * 1024)
    with (new / "ends-in-hole").open("wb") as sparse:
        sparse.write(b"x" * 5000)
        sparse.truncate(3 << 20)
    (new / "large").write_bytes(os.urandom((5 << 20) + 77))
    (new / "empty").touch()
    (new / "ünïcode ☃").write_text("snow")
    (Path(os.fsdecode(os.fsencode(new) + b"/raw \xff\xfe\n\\"))).write_text("bytes")
    (new / ("n" * 255)).write_text("long")
    os.mkfifo(new / "fifo", 0o640)
    os.link(new / "fifo", new / "fifo-too")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(new / "socket"))
    (new / "loop-a").symlink_to("loop-b")
    (new / "loop-b").symlink_to("loop-a")
    os.lchown(new / "loop-a", 77, 88)
    os.setxattr(new / "loop-a", "trusted.on-a-link", b"1", follow_symlinks=False)
    (new / "up").symlink_to("../../../../etc/passwd")
    os.mknod(new / "null", 0o20666, os.makedev(1, 3))
    deep = os.open(new, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=deep))
    os.close(deep)
    many = view / "many"
    many.mkdir()
    for number in range(5000):
        (many / f"f{number}").write_bytes(b"%d" % number * (number % 97))
    os.utime(many / "f1", ns=(1, 1_234_567_890_123_456_789))
    os.utime(many / "f2", ns=(1, -5_000_000_001))


def test_changed_overlay_round_trips(tmp_path: Path, overlay: Mount) -> None:
    _lower(tmp_path / "lower")
    view = overlay("upper")
    _change(view)
    before = snapshot(view)
    chunks = MemoryChunks()
    taken = capture(tmp_path / "upper", chunks)
    again = parse(taken.table.serialise())
    assert again == taken.table

    (tmp_path / "second").mkdir()
    restore(again, chunks, tmp_path / "second")

    assert snapshot(tmp_path / "second") == snapshot(tmp_path / "upper")
    assert snapshot(overlay("second")) == before
    assert snapshot(view) == before, "capturing changed the session's own files"
    assert blocks(tmp_path / "second" / "new" / "sparse") <= 64 << 10
    assert blocks(tmp_path / "second" / "new" / "ends-in-hole") <= 64 << 10
    assert sum(entry.kind == WHITEOUT for entry in again.entries) >= 4
    assert chunks.submitted < 30, "small files share chunks"


def test_restored_layer_captures_to_the_same_table(tmp_path: Path, overlay: Mount) -> None:
    """Require equal bytes, so that many rounds of checkpoint and restore do not drift."""
    _lower(tmp_path / "lower")
    view = overlay("upper")
    _change(view)
    chunks = MemoryChunks()
    first = capture(tmp_path / "upper", chunks).table
    (tmp_path / "second").mkdir()
    restore(first, chunks, tmp_path / "second")
    new = chunks.new_bytes
    assert capture(tmp_path / "second", chunks).table.serialise() == first.serialise()
    assert chunks.new_bytes == new


def test_host_bound_overlay_xattrs_are_not_captured(tmp_path: Path, overlay: Mount) -> None:
    _lower(tmp_path / "lower")
    view = overlay("upper")
    (view / "etc" / "changed").write_text("copied up")
    (view / "emptied" / "file").unlink()
    upper = tmp_path / "upper"
    os.setxattr(upper / "etc" / "changed", "trusted.overlay.origin", b"\x00\xfb\x01")
    os.setxattr(upper / "etc", "trusted.overlay.impure", b"y")
    os.setxattr(upper / "etc", "trusted.overlay.overlay.opaque", b"y")
    names = {name for entry in capture(upper, MemoryChunks()).table.entries for name, _ in entry.xattrs}
    assert names == {"trusted.overlay.overlay.opaque"}


def test_renamed_directories_round_trip_and_can_be_renamed_again(tmp_path: Path, overlay: Mount) -> None:
    _lower(tmp_path / "lower")
    view = overlay("upper", ON)
    (view / "kept").rename(view / "kept-elsewhere")
    (view / "new").mkdir()
    (view / "renamed" / "sub").rename(view / "new" / "below")
    (view / "renamed").rename(view / "new" / "renamed")
    (view / "renamed").mkdir()  # has nothing of what it was
    (view / "new" / "below" / "deep").write_text("changed")
    chunks = MemoryChunks()
    for number in range(3):
        before, upper = snapshot(view), tmp_path / view.name.removesuffix("-view")
        assert sorted(before)[:2] == [b"", b"emptied"] and before[b"new/renamed/file"] and b"renamed/file" not in before
        table = capture(upper, chunks).table
        again = parse(table.serialise())
        (tmp_path / f"copy{number}").mkdir()
        restore(again, chunks, tmp_path / f"copy{number}")
        assert capture(tmp_path / f"copy{number}", chunks).table.serialise() == table.serialise()
        view = overlay(f"copy{number}", ON)
        assert snapshot(view) == before
        (view / "new" / "renamed").rename(view / f"round{number}")
        (view / f"round{number}").rename(view / "new" / "renamed")


def test_layer_without_redirects_is_the_same_with_redirects_enabled(tmp_path: Path, overlay: Mount) -> None:
    _lower(tmp_path / "lower")
    view = overlay("upper")
    _change(view)
    before = snapshot(view)
    chunks = MemoryChunks()
    (tmp_path / "second").mkdir()
    restore(parse(capture(tmp_path / "upper", chunks).table.serialise()), chunks, tmp_path / "second")
    again = overlay("second", ON)
    assert snapshot(again) == before
    (again / "kept").rename(again / "moved")
    assert (again / "moved" / "file").read_text() == "kept"


@pytest.mark.parametrize("note", ["redirect", "metacopy", "something-new"])
def test_file_that_depends_on_lower_names_is_refused(tmp_path: Path, overlay: Mount, note: str) -> None:
    (tmp_path / "lower").mkdir()
    overlay("upper")
    (tmp_path / "upper" / "file").touch()
    os.setxattr(tmp_path / "upper" / "file", f"trusted.overlay.{note}", b"/etc")
    with pytest.raises(Blocked, match=note):
        capture(tmp_path / "upper", MemoryChunks())


def test_capture_does_not_cross_a_mount_inside_the_layer(tmp_path: Path, overlay: Mount) -> None:
    (tmp_path / "lower").mkdir()
    overlay("upper")
    inside = tmp_path / "upper" / "mnt"
    inside.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", inside], check=True)
    try:
        with pytest.raises(Blocked, match="mnt"):
            capture(tmp_path / "upper", MemoryChunks())
        assert measure(tmp_path / "upper", exclude={b"mnt"}).files == 1
    finally:
        subprocess.run(["umount", inside], check=True)


@pytest.mark.parametrize("name", ["db", "dev/db", "run/db", "two\nlines", "db (deleted)", "back\\012slash"])
def test_file_changed_through_a_mapping_is_detected(tmp_path: Path, overlay: Mount, name: str) -> None:
    """Change a file without a timestamp: an undetected change would be restored from the previous checkpoint."""
    (tmp_path / "lower").mkdir()
    view = overlay("upper")
    (view / name).parent.mkdir(exist_ok=True)
    (view / name).write_bytes(bytes(4096))
    (tmp_path / "root-upper").mkdir()
    layers = files_in_use.Layers(("/", str(view)), (tmp_path / "root-upper", tmp_path / "upper"))
    with (view / name).open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        memory[0] = 7
        found = files_in_use.look([os.getpid()], layers)
    assert (1, os.fsencode(name)) in found.written
