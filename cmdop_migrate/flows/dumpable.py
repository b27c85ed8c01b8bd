"""What is known beforehand to make a dump fail: said while the session runs, not after it stood frozen."""

from __future__ import annotations

import os
from pathlib import Path

from cmdop_migrate import log
from cmdop_migrate.errors import Blocked
from cmdop_migrate.model import Record
from cmdop_migrate.session import cgroup

CAP_SYS_RESOURCE = 24
_log = log.get("checkpoint")


def check(group: str, record: Record) -> None:
    """Blocked with the reason and the way out, or nothing."""
    pids = cgroup.pids(group)
    others = [pid for pid in pids if _uid(pid) not in (0, None)]
    if others and not _can(CAP_SYS_RESOURCE):
        names = ", ".join(sorted({_name(pid) for pid in others})[:5])
        raise Blocked(
            f"session {record.name!r} has processes of other users than root ({names}), and root lacks"
            " CAP_SYS_RESOURCE on this machine: CRIU cannot read their limits",
            "Give this machine CAP_SYS_RESOURCE, or run only root's processes in sessions that must move.",
        )
    own = None if record.pid is None else _namespace(record.pid)
    for pid in pids:
        if own is not None and _namespace(pid) not in (own, None):
            raise Blocked(
                f"{_name(pid)} (pid {pid}) in session {record.name!r} is in a pid namespace of its own (a container, or"
                " a sandboxed browser, inside the session), which CRIU cannot dump",
                "End the inner container before the checkpoint.",
            )
        _check_fds(pid, record)


def _check_fds(pid: int, record: Record) -> None:
    try:
        links = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        events = [fd for fd, link in links.items() if link == "anon_inode:[eventfd]"]
        if any("eventfd-semaphore: 1" in Path(f"/proc/{pid}/fdinfo/{fd}").read_text() for fd in events):
            _log.warning("%s (pid %d): an eventfd made as a semaphore will not be one after a restore", _name(pid), pid)
    except OSError:
        return
    if "anon_inode:[io_uring]" in links.values():
        raise Blocked(
            f"{_name(pid)} (pid {pid}) in session {record.name!r} uses io_uring, which CRIU cannot dump",
            "Run it without: many programs have a switch (node: UV_USE_IO_URING=0), or end it first.",
        )


def _can(capability: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _uid(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return str(pid)
