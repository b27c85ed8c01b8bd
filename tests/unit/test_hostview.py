"""What a session sees of its host, from mountinfo to the layer that hides what is private."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from cmdop_migrate.holder import cgroup
from cmdop_migrate.holder.sandbox import make_host_layer
from cmdop_migrate.preflight.facts import machine
from cmdop_migrate.session import files_in_use, host_mounts, inotify_watches
from cmdop_migrate.session.host_mounts import Mount, layers, parse_mounts, resolv_text
from cmdop_migrate.util.paths import is_under

MOUNTINFO = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:5 / /dev rw - devtmpfs none rw
24 22 0:20 / /proc rw - proc proc rw
25 22 254:1 / /home rw shared:1 master:2 - ext4 /dev/vdb rw
26 25 0:30 / /home/a\\040b\\134c rw - tmpfs t rw
27 22 0:31 / /home/\u00fc rw - xfs x rw
28 22 0:32 / /data rw - fuse.sshfs s rw
29 22 0:33 / /data rw - nfs4 s rw
30 22 0:34 / /run/user/0 rw - tmpfs t rw
31 22 0:35 / /var/lib/cm/x rw - tmpfs t rw
32 22 0:36 / /share/inner rw - ext4 t rw
"""


def test_parse_mounts() -> None:
    mounts = parse_mounts(MOUNTINFO)
    assert mounts[0] == Mount("/", "ext4")
    points = {mount.point: mount.kind for mount in mounts}
    assert points["/home/a b\\c"] == "tmpfs" and points["/home/\u00fc"] == "xfs"
    assert points["/data"] == "nfs4"  # the topmost of two
    broken = b"26 25 0:30 / /home/\xff rw - tmpfs t rw".decode("utf-8", "surrogateescape")
    assert parse_mounts(broken) == [Mount("/home/\udcff", "tmpfs")]


@pytest.mark.parametrize("odd", ["\u00a0", "\u0085", "\u2028", "\r", "\x0b", "\x0c", "\x1c", "\u3000"])
def test_parse_mounts_reads_any_mount_point_name(tmp_path: Path, odd: str) -> None:
    """What Python takes for the end of a word or line, and the kernel does not."""
    assert parse_mounts(f"26 25 0:30 / /a{odd}b rw - tmpfs t rw\n") == [Mount(f"/a{odd}b", "tmpfs")]
    assert machine.parse_mountinfo(f"26 25 0:30 / /a{odd}b rw - tmpfs t rw\n")[0].point == f"/a{odd}b"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_mounts_with_odd_names_are_seen(tmp_path: Path) -> None:
    points = [tmp_path / f"a{odd}b" for odd in ("\u00a0", "\u0085", "\u2028", "\r", "\x0c", " ")]
    try:
        for point in points:
            point.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "test-mounts", str(point)], check=True)
        assert {str(one) for one in points} <= set(host_mounts.read_layers([], []))
        assert all(host_mounts.mount_of(str(one)).point == str(one) for one in points)
        pid = os.getpid()
        assert {str(one) for one in points} <= inotify_watches._read_mounts(pid).devices.keys()
        assert cgroup.mount_point() and files_in_use._mounts(pid)
    finally:
        for point in points:
            subprocess.run(["umount", str(point)], check=False)


def test_layers() -> None:
    found = layers(parse_mounts(MOUNTINFO), hidden=["/var/lib/cm"], shares=["/share"])
    assert found == ["/", "/data", "/home", "/home/a b\\c", "/home/\u00fc"]


@pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts are device nodes")
def test_host_layer_hides_and_looks_alike(tmp_path: Path) -> None:
    tree, top = tmp_path / "tree", tmp_path / "top"
    for path in (tree / "var/lib/private", tree / "mnt/inner", top):
        path.mkdir(parents=True)
    (tree / "var/lib").chmod(0o1751)
    os.chown(tree / "var/lib", 12, 34)
    hidden = [str(tree / "var/lib/private"), str(tree / "mnt/inner/later"), "/run/x", str(tree / "no/such/parent/x")]
    made = make_host_layer(str(top), [str(tree), str(tree / "mnt")], hidden, None)
    assert set(made) == {str(tree), str(tree / "mnt")}
    for point, path in ((tree, "var/lib/private"), (tree / "mnt", "inner/later")):
        info = os.stat(f"{made[str(point)]}/{path}")
        assert stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
    copy = os.stat(f"{made[str(tree)]}/var/lib")
    assert (stat.S_IMODE(copy.st_mode), copy.st_uid, copy.st_gid) == (0o1751, 12, 34)


@pytest.mark.parametrize(
    ("text", "resolved", "unseen", "gateway", "expected"),
    [
        ("nameserver 10.0.0.1\n", "", False, "100.64.0.1", None),
        ("nameserver 10.0.0.1\n", "", True, "100.64.0.1", "nameserver 10.0.0.1\n"),
        ("nameserver 127.0.0.53\nsearch x.y\n", "nameserver 9.9.9.9\n", True, "100.64.0.1",
         "nameserver 9.9.9.9\nsearch x.y\n"),
        ("nameserver 127.0.0.1\noptions edns0\n", "", False, "100.64.0.1", "nameserver 100.64.0.1\noptions edns0\n"),
        ("nameserver 127.0.0.1\nnameserver 10.0.0.2\n", "", False, "100.64.0.1", "nameserver 10.0.0.2\n"),
        ("", "", False, "100.64.0.1", "nameserver 100.64.0.1\n"),
        ("nameserver 127.0.0.53\n", "", False, None, None),
        ("nameserver 127.0.0.53\n", "", True, None, "nameserver 127.0.0.53\n"),
    ],
)  # fmt: skip
def test_resolv_conf(text: str, resolved: str, unseen: bool, gateway: str | None, expected: str | None) -> None:
    assert resolv_text(text, resolved, unseen, gateway) == expected


def test_mount_of() -> None:
    assert host_mounts.mount_of("/proc/self").kind == "proc"
    assert is_under("/a/b", "/a") and is_under("/a", "/") and not is_under("/ab", "/a")
