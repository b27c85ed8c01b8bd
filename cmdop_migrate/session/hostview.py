"""What of this host a session sees: which file systems it gets copies of, and what is hidden from it.

Everything here is host-bound and made anew where a session is restored; only
`upper`, what the session itself changed, travels.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "vfat", "exfat", "ntfs3")
_OTHER = ("overlay", "tmpfs", "nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "erofs", "squashfs")
REAL = frozenset({*_LOCAL, *_OTHER})
# What the kernel does not take as the upper layer of an overlay.
NOT_UPPER = frozenset({"overlay", "nfs", "nfs4", "cifs", "smb3", "9p", "vfat", "exfat", "ntfs3", "squashfs", "erofs"})
SPECIAL = ("/proc", "/sys", "/dev", "/run")
RESOLV = "/etc/resolv.conf"
RESOLVED = "/run/systemd/resolve/resolv.conf"


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str


def parse_mounts(mountinfo: str) -> list[Mount]:
    """Pure: /proc/self/mountinfo -> mounts, the topmost at each point, outer before inner."""
    found: dict[str, Mount] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = (
            left.split()[4]
            .encode("utf-8", "surrogateescape")
            .decode("unicode_escape")
            .encode("latin-1")
            .decode("utf-8", "surrogateescape")
        )
        found[point] = Mount(point, right.split()[0])
    return [found[point] for point in sorted(found)]


def is_under(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def layers(mounts: Iterable[Mount], hidden: Iterable[str], shares: Iterable[str]) -> list[str]:
    """Pure: mount points of which the session gets a copy-on-write view, `/` first."""
    left_out = (*SPECIAL, *hidden, *shares)
    others = [
        mount.point
        for mount in mounts
        if mount.point != "/" and mount.kind in REAL and not any(is_under(mount.point, top) for top in left_out)
    ]
    return ["/", *others]


def read_layers(hidden: Iterable[str], shares: Iterable[str]) -> list[str]:
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    return [point for point in layers(mounts, hidden, shares) if os.path.isdir(point)]


def mount_of(path: str) -> Mount:
    """The mount that `path`, free of links, lies on."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    return max((one for one in mounts if is_under(path, one.point)), key=lambda one: len(one.point))


def make_host_layer(top: str, points: Iterable[str], hidden: Iterable[str], resolv: str | None) -> dict[str, str]:
    """Fills `top` with a layer that goes between the host's files and the session's: whiteouts over what is
    private to this toolkit (keys, other sessions), and a resolv.conf that works from a network of its own.

    -> mount point -> directory under `top`, for the points that need one.
    """
    order = sorted(points, key=len, reverse=True)
    made: dict[str, str] = {}

    def place(path: str) -> str:
        point = next(one for one in order if is_under(path, one))
        if point not in made:
            made[point] = f"{top}/{len(made)}"
            _like(point, made[point])
        here, there = made[point], point
        for part in os.path.relpath(os.path.dirname(path), point).split("/"):
            here, there = f"{here}/{part}", f"{there}/{part}"
            if not os.path.lexists(here):
                _like(there, here)
        return f"{here}/{os.path.basename(path)}"

    for path in hidden:
        # Also what is not there yet: it must not appear in a running session when it is made.
        if os.path.isdir(os.path.dirname(path)) and not any(is_under(path, one) for one in SPECIAL):
            os.mknod(place(path), stat.S_IFCHR, os.makedev(0, 0))
    if resolv is not None:
        target = place(RESOLV)
        with open(target, "w", encoding="utf-8") as file:
            file.write(resolv)
        os.chmod(target, 0o644)
    return made


def _like(there: str, here: str) -> None:
    """A directory `here` that looks like `there`: where layers merge, the topmost one's owner and mode are seen."""
    info = os.stat(there)
    os.mkdir(here)
    os.chown(here, info.st_uid, info.st_gid)
    os.chmod(here, info.st_mode & 0o7777)
    os.utime(here, ns=(info.st_atime_ns, info.st_mtime_ns))


def read_resolv_conf(gateway: str | None) -> str | None:
    """The resolv.conf a session needs, or None when the host's own will do.

    The host's own cannot be seen when it is a link into /run, which a session
    has its own of, or a file mounted over another, as in a container.
    """
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    unseen = os.path.realpath(RESOLV).startswith("/run/") or any(one.point == RESOLV for one in mounts)
    return resolv_conf(_read(RESOLV), _read(RESOLVED), unseen, gateway)


def resolv_conf(text: str, resolved: str, unseen: bool, gateway: str | None) -> str | None:
    """Pure. `gateway` is None for a session on the host's own network, where the host's loopback works too.
    `resolved` names the servers behind a resolver on the loopback."""
    servers = _servers(text)
    if gateway is None or (servers and not any(_is_loopback(one) for one in servers)):
        return text if unseen else None
    upstream = [one for one in _servers(resolved) if not _is_loopback(one)]
    usable = [one for one in servers if not _is_loopback(one)] or upstream or [gateway]
    rest = [line for line in text.splitlines() if line.split()[:1] in (["search"], ["domain"], ["options"])]
    return "\n".join([*(f"nameserver {one}" for one in usable), *rest]) + "\n"


def _servers(text: str) -> list[str]:
    return [
        line.split()[1] for line in text.splitlines() if line.split()[:1] == ["nameserver"] and len(line.split()) > 1
    ]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
