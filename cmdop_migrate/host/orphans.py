"""End processes of sessions that no record describes: of a start, a restore or a trial whose command was killed.

Two kinds are left behind. The tree of a session whose starter and holder were both killed has no process that would end
it. And a holder that was stopped (SIGSTOP) while its command was killed keeps the session's lock, so that no other
command can correct its record. Neither has a record that says it runs here, so ending it loses nothing: what is in the
store stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from typing import TYPE_CHECKING

from cmdop_migrate import log
from cmdop_migrate.errors import Blocked
from cmdop_migrate.holder import cgroup
from cmdop_migrate.model import is_session_id

if TYPE_CHECKING:
    from cmdop_migrate.host.host import Host

ENDS_WITHIN = 2.0  # seconds until a process that was sent SIGKILL is gone
_LOCK = re.compile(r"/sessions/([0-9a-z]+)/holder\.lock$")
_RUNNING = ("live", "handing")  # phases of a session that its holder has adopted
_SWEPT = ("starting", *_RUNNING, "restoring")  # their groups are removed with their records
_log = log.get("session")


def end_stopped_holders(this_host: Host) -> None:
    """Kill every stopped holder that has not adopted its session and has lost its starter. Call it with the host's lock
    held, before the records are swept: the session lock that the holder held is free then."""
    try:
        holders = cgroup.pids(this_host.cgroup("holders"))
    except Blocked:
        return
    for pid in filter(_is_stopped, holders):
        session = _session_of(pid)
        if session is None or not _is_ours(this_host, session):
            continue
        record = this_host.load(session)
        if (record is not None and record.phase in _RUNNING) or _has_starter(session, holders):
            continue
        _log.warning("session %s: its holder is stopped and its command is dead: killed", session)
        _kill(pid)


def end_trees(this_host: Host) -> None:
    """Remove the cgroup of every session that has no record, or is on record as parked or exited, unless a process
    holds its lock: its holder is about to end, or it is being restored. Call it with the host's lock held."""
    try:
        top = os.path.dirname(this_host.cgroup("any"))
        groups = os.listdir(top)
    except (Blocked, FileNotFoundError, NotADirectoryError):
        return
    for session in filter(is_session_id, groups):
        record = this_host.load(session)
        if (record is not None and record.phase in _SWEPT) or not _is_ours(this_host, session):
            continue
        lock = None
        if this_host.directory(session).exists():
            lock = this_host.take(session)
            if lock is None:
                continue
        try:
            _log.warning("session %s: processes that no record describes are killed", session)
            cgroup.remove(os.path.join(top, session))
        finally:
            if lock is not None:
                os.close(lock)


def _is_ours(this_host: Host, session: str) -> bool:
    """Tell whether this version may judge the session: not if it has a record that cannot be read."""
    return this_host.load(session) is not None or not (this_host.directory(session) / "session.json").exists()


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def _session_of(pid: int) -> str | None:
    """Return the session whose lock this process has open."""
    for path in _open_files(pid):
        if match := _LOCK.search(path):
            return match.group(1)
    return None


def _has_starter(session: str, holders: list[int]) -> bool:
    """Tell whether a process other than holders and their children has the session's lock open."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in holders and _session_of(int(name)) == session:
            return True
    return False


def _open_files(pid: int) -> list[str]:
    paths = []
    with contextlib.suppress(OSError):  # it has just ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                paths.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return paths


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        watch = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            select.select([watch], [], [], ENDS_WITHIN)
        finally:
            os.close(watch)
