"""Decide what a session sees of this host: of which file systems it gets views, and what is hidden from it.

All of it belongs to the host and is set up again where a session is restored;
only `upper`, what the session itself changed, travels.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate.util.paths import RESOLV, SPECIAL, is_under

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "vfat", "exfat", "ntfs3")
_OTHER = ("overlay", "tmpfs", "nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "erofs", "squashfs")
REAL = frozenset({*_LOCAL, *_OTHER})
# File systems that the kernel refuses as the upper layer of an overlay.
NOT_UPPER = frozenset({"overlay", "nfs", "nfs4", "cifs", "smb3", "9p", "vfat", "exfat", "ntfs3", "squashfs", "erofs"})
# File systems that it refuses as a lower layer: they compare names in their own way.
NOT_LOWER = frozenset({"vfat", "exfat", "ntfs3", "cifs", "smb3"})
RESOLVED = "/run/systemd/resolve/resolv.conf"


@dataclass(frozen=True)
class Mount:
    """Describe one mount point and its kind of file system."""

    point: str
    kind: str


def parse_mounts(mountinfo: str) -> list[Mount]:
    """Return the mounts in the text of /proc/self/mountinfo, the topmost at each point, outer before inner. Pure. Of
    the characters that separate words or lines, the kernel escapes blanks, tabs and newlines only: others may be in a
    name."""
    found: dict[str, Mount] = {}
    for line in filter(None, mountinfo.split("\n")):
        left, _, right = line.partition(" - ")
        point = (
            left.split(" ")[4]
            .encode("utf-8", "surrogateescape")
            .decode("unicode_escape")
            .encode("latin-1")
            .decode("utf-8", "surrogateescape")
        )
        found[point] = Mount(point, right.split(" ")[0])
    return [found[point] for point in sorted(found)]


def layers(mounts: Iterable[Mount], hidden: Iterable[str], shares: Iterable[str]) -> list[str]:
    """Return the mount points of which the session gets a copy-on-write view, `/` first. Pure."""
    left_out = (*SPECIAL, *hidden, *shares)
    others = [
        mount.point
        for mount in mounts
        if mount.point != "/" and mount.kind in REAL and not any(is_under(mount.point, top) for top in left_out)
    ]
    return ["/", *others]


def read_layers(hidden: Iterable[str], shares: Iterable[str]) -> list[str]:
    """Return the mount points of this host of which a session gets a copy-on-write view, `/` first."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape"))
    return [point for point in layers(mounts, hidden, shares) if os.path.isdir(point)]


def mount_of(path: str) -> Mount:
    """Return the mount that `path`, free of symbolic links, lies on."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape"))
    return max((mount for mount in mounts if is_under(path, mount.point)), key=lambda mount: len(mount.point))


def resolv_conf(gateway: str | None) -> str | None:
    """Return the resolv.conf that a session needs, or None if the host's own is visible and usable.

    The host's own is not visible if it is a link into /run, of which a session
    has its own, or a file mounted over another, as in a container.
    """
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape"))
    unseen = os.path.realpath(RESOLV).startswith("/run/") or any(mount.point == RESOLV for mount in mounts)
    return resolv_text(_read(RESOLV), _read(RESOLVED), unseen, gateway)


def resolv_text(text: str, resolved: str, unseen: bool, gateway: str | None) -> str | None:
    """Return the text for `resolv_conf`. Pure. `gateway` is None for a session on the host's own network, where the
    host's loopback works too. `resolved` names the servers behind a resolver on the loopback."""
    servers = _servers(text)
    if gateway is None or (servers and not any(_is_loopback(server) for server in servers)):
        return text if unseen else None
    upstream = [server for server in _servers(resolved) if not _is_loopback(server)]
    usable = [server for server in servers if not _is_loopback(server)] or upstream or [gateway]
    rest = [line for line in text.splitlines() if line.split()[:1] in (["search"], ["domain"], ["options"])]
    return "\n".join([*(f"nameserver {server}" for server in usable), *rest]) + "\n"


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
