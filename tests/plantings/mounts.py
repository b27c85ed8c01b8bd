"""File systems that the session mounted itself."""

from __future__ import annotations

import ctypes
import os
import subprocess

from tests.plantings.base import Planting, libc, planting, same


@planting
def tmpfs_mount() -> Planting:
    os.makedirs("/mnt/t")
    same(libc.mount(b"none", b"/mnt/t", b"tmpfs", 0, None), 0)
    open("/mnt/t/file", "w").write("inside")
    yield
    same(open("/mnt/t/file").read(), "inside")


@planting
def bind_mount() -> Planting:
    os.makedirs("/mnt/b")
    os.makedirs("/root/bound")
    open("/root/bound/file", "w").write("bound")
    same(libc.mount(b"/root/bound", b"/mnt/b", None, 4096, None), 0)
    yield
    same(open("/mnt/b/file").read(), "bound")


@planting
def bind_mount_of_file() -> Planting:
    open("/root/one", "w").write("one")
    open("/root/two", "w").write("two")
    same(libc.mount(b"/root/one", b"/root/two", None, 4096, None), 0)
    yield
    same(open("/root/two").read(), "one")


@planting
def overlay_mount() -> Planting:
    same(libc.mount(b"none", b"/mnt", b"tmpfs", 0, None), 0)
    for name in "lumo":
        os.makedirs(f"/mnt/{name}")
    options = b"lowerdir=/mnt/l,upperdir=/mnt/u,workdir=/mnt/m"
    if libc.mount(b"overlay", b"/mnt/o", b"overlay", 0, options):
        raise OSError(ctypes.get_errno(), "overlay")
    open("/mnt/o/file", "w").write("over")
    yield
    same(open("/mnt/o/file").read(), "over")
    same(open("/mnt/u/file").read(), "over")


@planting
def overlay_mount_over_root() -> Planting:
    for name in "lumo":
        os.makedirs(f"/root/{name}")
    same(libc.mount(b"none", b"/root/u", b"tmpfs", 0, None), 0)
    os.makedirs("/root/u/u")
    os.makedirs("/root/u/w")
    options = b"lowerdir=/root/l,upperdir=/root/u/u,workdir=/root/u/w"
    if libc.mount(b"overlay", b"/root/o", b"overlay", 0, options):
        raise OSError(ctypes.get_errno(), "overlay")
    yield
    open("/root/o/file", "w").write("over")


@planting
def ramfs_mount() -> Planting:
    os.makedirs("/mnt/r")
    same(libc.mount(b"none", b"/mnt/r", b"ramfs", 0, None), 0)
    yield
    same(os.path.ismount("/mnt/r"), True)


def _simple_mount(kind: bytes) -> Planting:
    os.makedirs("/mnt/x")
    if libc.mount(b"none", b"/mnt/x", kind, 0, None):
        raise OSError(ctypes.get_errno(), f"mount {kind!r}")
    yield
    same(os.path.ismount("/mnt/x"), True)


@planting
def proc_mount() -> Planting:
    return _simple_mount(b"proc")


@planting
def sysfs_mount() -> Planting:
    return _simple_mount(b"sysfs")


@planting
def devpts_mount() -> Planting:
    return _simple_mount(b"devpts")


@planting
def debugfs_mount() -> Planting:
    return _simple_mount(b"debugfs")


@planting
def tracefs_mount() -> Planting:
    return _simple_mount(b"tracefs")


@planting
def securityfs_mount() -> Planting:
    return _simple_mount(b"securityfs")


@planting
def fusectl_mount() -> Planting:
    return _simple_mount(b"fusectl")


@planting
def bpf_mount() -> Planting:
    return _simple_mount(b"bpf")


@planting
def hugetlbfs_mount() -> Planting:
    return _simple_mount(b"hugetlbfs")


@planting
def cgroup2_mount() -> Planting:
    return _simple_mount(b"cgroup2")


@planting
def binfmt_mount() -> Planting:
    return _simple_mount(b"binfmt_misc")


@planting
def configfs_mount() -> Planting:
    return _simple_mount(b"configfs")


@planting
def pstore_mount() -> Planting:
    return _simple_mount(b"pstore")


@planting
def devtmpfs_mount() -> Planting:
    return _simple_mount(b"devtmpfs")


@planting
def fuse_mount_of_dead_server() -> Planting:
    os.makedirs("/mnt/f")
    subprocess.run(["mknod", "/root/fuse", "c", "10", "229"], check=True)
    fd = os.open("/root/fuse", os.O_RDWR)
    os.unlink("/root/fuse")
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"x", b"/mnt/f", b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "fuse")
    os.close(fd)
    yield


@planting
def tracefs_in_debugfs() -> Planting:
    os.makedirs("/mnt/x")
    same(libc.mount(b"none", b"/mnt/x", b"debugfs", 0, None), 0)
    os.listdir("/mnt/x/tracing")
    yield
