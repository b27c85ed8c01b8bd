"""Namespaces and cgroups inside the session."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.plantings.base import (
    NEWCGROUP,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWTIME,
    NEWUSER,
    NEWUTS,
    Planting,
    alive,
    call,
    child,
    kept,
    libc,
    planting,
    same,
    unshare,
)


def _namespace(flags: int, name: str) -> Planting:
    pid = child(lambda: unshare(flags))
    yield
    alive(pid)
    same(os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"), True)


@planting
def user_namespace() -> Planting:
    return _namespace(NEWUSER, "user")


@planting
def mount_namespace() -> Planting:
    return _namespace(NEWNS, "mnt")


@planting
def mount_namespace_with_tmpfs() -> Planting:
    def work() -> None:
        unshare(NEWNS)
        os.makedirs("/mnt/t")
        same(libc.mount(b"none", b"/mnt/t", b"tmpfs", 0, None), 0)
        open("/mnt/t/file", "w").write("inside")

    pid = child(work)
    yield
    same(open(f"/proc/{pid}/root/mnt/t/file").read(), "inside")
    same(os.listdir("/mnt/t"), [])


@planting
def uts_namespace() -> Planting:
    return _namespace(NEWUTS, "uts")


@planting
def ipc_namespace() -> Planting:
    return _namespace(NEWIPC, "ipc")


@planting
def net_namespace() -> Planting:
    return _namespace(NEWNET, "net")


@planting
def cgroup_namespace() -> Planting:
    return _namespace(NEWCGROUP, "cgroup")


@planting
def time_namespace() -> Planting:
    def work() -> None:
        unshare(NEWTIME)
        pid = child(lambda: None)
        kept.append(pid)

    pid = child(work)
    yield
    alive(pid)


@planting
def time_namespace_for_children() -> Planting:
    pid = child(lambda: unshare(NEWTIME))
    yield
    alive(pid)


@planting
def pid_namespace() -> Planting:
    def work() -> None:
        unshare(NEWPID)
        kept.append(child(lambda: None))

    pid = child(work)
    yield
    alive(pid)


@planting
def pid_namespace_for_children() -> Planting:
    pid = child(lambda: unshare(NEWPID))
    yield
    alive(pid)


@planting
def proc_namespace_file() -> Planting:
    fds = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("net", "mnt", "pid", "uts", "ipc", "user")]
    yield
    for fd in fds:
        call(308, fd, 0) if fd != fds[5] else None


@planting
def namespace_without_process() -> Planting:
    """As `ip netns` keeps one: by a descriptor alone."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        unshare(NEWNET)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    yield
    same(call(308, fd, NEWNET), 0)


@planting
def named_network() -> Planting:
    subprocess.run(["ip", "netns", "add", "inner"], check=True)
    yield
    same("inner" in os.listdir("/run/netns"), True)


@planting
def left_its_cgroup() -> Planting:
    os.makedirs("/mnt/c")
    same(libc.mount(b"none", b"/mnt/c", b"cgroup2", 0, None), 0)

    def work() -> None:
        with open("/mnt/c/cgroup.procs", "w") as file:
            file.write("0")

    pid = child(work)
    yield
    alive(pid)


@planting
def own_sub_cgroup() -> Planting:
    os.makedirs("/mnt/c")
    same(libc.mount(b"none", b"/mnt/c", b"cgroup2", 0, None), 0)
    place = "/mnt/c" + open("/proc/self/cgroup").read().split("::")[1].strip() + "/inner"
    os.mkdir(place)

    def work() -> None:
        with open(f"{place}/cgroup.procs", "w") as file:
            file.write("0")

    pid = child(work)
    yield
    alive(pid)
