"""Build the requests to CRIU from values, without side effects, so that a table can test it.

CRIU resolves descriptor numbers in a request (`images_dir_fd`, `work_dir_fd`) through /proc of the process that
*created* the socket pair, not of the one that spawned the worker: that process must live and keep them open. `pages_fd`
is different: it is inherited, so its number is the worker's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.criu.rpc import CgroupMode, NetworkLock, ReqType, encode

GHOST_LIMIT = 256 << 20
FREEZE_SECONDS = 10
LOG_LEVEL = 4


@dataclass(frozen=True)
class SharedMount:
    """Describe a mount of the host that the session sees: at `inside` in the session, named `key` for CRIU, at `host`
    on the host."""

    key: str
    inside: str
    host: str


@dataclass(frozen=True)
class DumpSpec:
    """Describe the options of one dump. All other options are the same for every session."""

    pid: int
    images_dir_fd: int
    root: str
    # A cgroup frozen before the request stays frozen. If CRIU freezes it, that takes a poll of 100 ms more.
    freeze_cgroup: str | None = None
    leave_running: bool = False
    pages_fd: int | None = None  # our page server; without it CRIU writes pages-*.img itself
    track: bool = False  # have the kernel track which pages are written from now on; not every kernel can
    parent: str | None = None  # images of the last dump with `track`, relative to images_dir: dump changed pages only
    shared: tuple[SharedMount, ...] = ()
    external: tuple[str, ...] = ()  # other external resources, in CRIU's syntax
    ghost_limit: int = GHOST_LIMIT  # largest deleted but open file that is dumped
    freeze_seconds: int = FREEZE_SECONDS
    log_file: str = "dump.log"
    log_level: int = LOG_LEVEL
    work_dir_fd: int | None = None


@dataclass(frozen=True)
class RestoreSpec:
    """Describe the options of one restore."""

    images_dir_fd: int
    root: str
    veths: tuple[tuple[str, str], ...] = ()  # (name inside, name of the host's end)
    shared: tuple[SharedMount, ...] = ()
    external: tuple[str, ...] = ()
    inherit_fds: tuple[tuple[str, int], ...] = ()  # (key, number in the worker)
    join_ns: tuple[tuple[str, str], ...] = ()  # (kind, path of the namespace file)
    lazy_pages: bool = False
    sibling: bool = True  # the restored root becomes a child of the worker's parent
    log_file: str = "restore.log"
    log_level: int = LOG_LEVEL
    work_dir_fd: int | None = None


def dump(spec: DumpSpec) -> dict[str, Any]:
    """Return the `req` message for a dump."""
    opts = _common(spec.images_dir_fd, spec.root, spec.log_file, spec.log_level, spec.work_dir_fd)
    opts.update(
        pid=spec.pid,
        leave_running=spec.leave_running,
        ghost_limit=spec.ghost_limit,
        timeout=spec.freeze_seconds,
        # Without this option a connection in a listener's backlog fails the whole dump. Its client gets a reset.
        tcp_skip_in_flight=True,
    )
    if spec.freeze_cgroup is not None:
        opts["freeze_cgroup"] = spec.freeze_cgroup
    if spec.pages_fd is not None:
        opts["ps"] = {"fd": spec.pages_fd}
    if spec.track:
        opts["track_mem"] = True
    if spec.parent is not None:
        opts["parent_img"] = spec.parent
    _external(opts, [f"mnt[{mount.inside}]:{mount.key}" for mount in spec.shared], spec.external)
    return {"type": ReqType.DUMP, "opts": opts}


def restore(spec: RestoreSpec) -> dict[str, Any]:
    """Return the `req` message for a restore."""
    opts = _common(spec.images_dir_fd, spec.root, spec.log_file, spec.log_level, spec.work_dir_fd)
    opts.update(
        rst_sibling=spec.sibling,
        lazy_pages=spec.lazy_pages,
        weak_sysctls=True,  # another kernel may lack a sysctl, which must not fail the restore
    )
    if spec.inherit_fds:
        opts["inherit_fd"] = [{"key": key, "fd": fd} for key, fd in spec.inherit_fds]
    if spec.join_ns:
        opts["join_ns"] = [{"ns": kind, "ns_file": path} for kind, path in spec.join_ns]
    words = [f"mnt[{mount.key}]:{mount.host}" for mount in spec.shared]
    words += [f"veth[{inside}]:{outside}" for inside, outside in spec.veths]
    _external(opts, words, spec.external)
    return {"type": ReqType.RESTORE, "opts": opts}


def wire(request: Mapping[str, Any]) -> bytes:
    """Encode a `req` message."""
    return encode("req", request)


def _common(images_dir_fd: int, root: str, log_file: str, log_level: int, work_dir_fd: int | None) -> dict[str, Any]:
    opts: dict[str, Any] = {
        "images_dir_fd": images_dir_fd,
        "root": root,
        "log_file": log_file,
        "log_level": log_level,
        "notify_scripts": True,
        "orphan_pts_master": True,  # the PTY master is the holder's, outside the tree
        "shell_job": False,
        "tcp_established": True,  # loopback connections; connections to other hosts were reset earlier
        "ext_unix_sk": True,  # datagram sockets to a host service (syslog); CRIU refuses stream sockets in any case
        "file_locks": True,
        "link_remap": True,
        "evasive_devices": True,
        # Dump watches by path: the file handles that CRIU would dump otherwise refer to inodes of this host.
        "force_irmap": True,
        "manage_cgroups_mode": CgroupMode.IGNORE,  # we create the session's cgroup
        "network_lock": NetworkLock.SKIP,  # no outside connection exists any more
    }
    if work_dir_fd is not None:
        opts["work_dir_fd"] = work_dir_fd
    return opts


def _external(opts: dict[str, Any], words: list[str], more: tuple[str, ...]) -> None:
    if words or more:
        opts["external"] = [*words, *more]
