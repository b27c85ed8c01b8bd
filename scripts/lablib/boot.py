"""A node's first process: in namespaces and a cgroup of its own, with its own mounts, under an init that reaps.

The machine sees it as one process; killed, everything of the node dies with it.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cmdop_migrate.holder import cgroup, syscalls
from cmdop_migrate.holder.syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_REC, mount
from scripts.lablib.model import LabTrouble

NEWCGROUP = 0x02000000
ALL = syscalls.NEWNS | syscalls.NEWUTS | syscalls.NEWIPC | syscalls.NEWPID | syscalls.NEWNET | NEWCGROUP
INIT = "/usr/bin/tini-static"  # of the package tini, which sessions need too
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = "/srv/root"  # of a disk of the node's own: the machine's /root may hold the very interpreter
ENVIRON = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Room:
    """What a node finds. `binds` are seen at their second path; a target that is missing is made."""

    name: str
    group: str
    log: Path
    command: tuple[str, ...]
    binds: tuple[tuple[str, str], ...] = ()
    empty: tuple[str, ...] = ("/run",)
    env: Mapping[str, str] = field(default_factory=lambda: dict(ENVIRON))


class Booting:
    """A node whose mounts stand and whose cable may be laid; `go` lets it run."""

    def __init__(self, name: str, pid: int, said: int, go: int) -> None:
        self.name, self.pid, self._said, self._go = name, pid, said, go

    def go(self) -> None:
        """Returns once its init runs."""
        try:
            word = os.read(self._said, 1 << 16)
            if word == b"ready":
                os.write(self._go, b"go")
                word = os.read(self._said, 1 << 16)  # end of file: it has become its init
        finally:
            os.close(self._said)
            os.close(self._go)
        if word:
            raise LabTrouble(f"{self.name} does not start: {word.decode(errors='replace')}")


def boot(room: Room) -> Booting:
    """Call it without other threads: it forks."""
    said, say = os.pipe()
    wait, go = os.pipe()
    pid_out, pid_in = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between == 0:
        for fd in (said, go, pid_out):
            os.close(fd)
        _between(room, pid_in, say, wait)
    for fd in (say, wait, pid_in):
        os.close(fd)
    with os.fdopen(pid_out, "rb") as reader:
        word = reader.read()
    os.waitpid(between, 0)
    if not word:
        raise LabTrouble(f"{room.name} does not start: {os.read(said, 1 << 16).decode(errors='replace')}")
    return Booting(room.name, int(word), said, go)


def _between(room: Room, pid_in: int, say: int, wait: int) -> None:
    """Never returns. Only what is forked after the unshare is in the new pid namespace."""
    try:
        os.setsid()
        cgroup.join(room.group)
        syscalls.unshare(ALL)
        pid = os.fork()
        if pid:
            os.write(pid_in, str(pid).encode())
            os._exit(0)
        os.close(pid_in)
        _become(room, say, wait)
    except BaseException:  # noqa: BLE001 - a forked child must never run on into its parent's code
        os.write(say, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _become(room: Room, say: int, wait: int) -> None:
    socket.sethostname(room.name)
    os.umask(0o022)
    log = os.open(room.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)  # its place is covered soon
    _mount(room)
    os.chdir("/")
    os.write(say, b"ready")
    if os.read(wait, 2) != b"go":
        os._exit(1)  # who started us is gone
    null = os.open(os.devnull, os.O_RDWR)
    for fd, to in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, to)
    os.execve(INIT, [INIT, "--", *room.command], dict(room.env))


def _mount(room: Room) -> None:
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Held open before anything is covered: a source may lie where something else is about to be mounted.
    sources = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source, _ in room.binds]
    for covered in ("/proc", "/sys"):  # not only covered: who reads the list of mounts would find the machine's cgroups
        syscalls.umount(covered, syscalls.MNT_DETACH)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for place in room.empty:
        mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777" if place == "/tmp" else "mode=755")
    for fd, (_, target) in zip(sources, room.binds, strict=True):
        if not os.path.exists(target):
            _make_target(target, like=f"/proc/self/fd/{fd}")
        mount(f"/proc/self/fd/{fd}", target, None, MS_BIND)
        os.close(fd)


def _make_target(target: str, like: str) -> None:
    if os.path.isdir(like):
        os.makedirs(target)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o600))
