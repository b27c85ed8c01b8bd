"""Check the facts of this host for `doctor`, without side effects: the same facts always give the same checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cmdop_migrate.preflight.facts.machine import Facts
from cmdop_migrate.units import show_size

Level = Literal["ok", "degraded", "missing"]

# Kernel options without which sessions cannot be created or dumped, and the purpose of each.
NEEDED_OPTIONS = {
    "CHECKPOINT_RESTORE": "CRIU",
    "NAMESPACES": "sessions",
    "PID_NS": "sessions",
    "NET_NS": "sessions",
    "IPC_NS": "sessions",
    "UTS_NS": "sessions",
    "OVERLAY_FS": "the session's own files",
    "UNIX_DIAG": "dumping unix sockets",
    "INET_DIAG": "dumping TCP sockets",
    "FHANDLE": "dumping inotify",
}
# Kernel options without which some feature is missing, and the feature.
WANTED_OPTIONS = {
    "INET_DIAG_DESTROY": "resetting outside connections",
    "INET_UDP_DIAG": "dumping UDP sockets",
    "NETLINK_DIAG": "dumping netlink sockets",
    "PACKET_DIAG": "dumping packet sockets",
}
NEEDED_NAMESPACES = ("pid", "mnt", "net", "ipc", "uts")
NEEDED_CAPABILITIES = (
    "CAP_SYS_ADMIN",
    "CAP_NET_ADMIN",
    "CAP_SYS_PTRACE",
    "CAP_SYS_CHROOT",
    "CAP_DAC_OVERRIDE",
    "CAP_CHOWN",
    "CAP_FOWNER",
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_KILL",
    "CAP_MKNOD",
)
# File systems without the whiteouts and trusted xattrs that an overlay's upper layer needs.
NO_UPPER = ("overlay", "nfs", "nfs4", "cifs", "smb3", "vfat", "exfat", "9p", "aufs", "squashfs", "iso9660")
DISK_LEAST, DISK_GOOD = 256 << 20, 2 << 30
MEMORY_LEAST, MEMORY_GOOD = 64 << 20, 512 << 20


@dataclass(frozen=True)
class Check:
    """Describe the result of one check. `fatal`: sessions or moves cannot work until `fix` is done."""

    name: str
    level: Level
    message: str
    fix: str = ""
    fatal: bool = False


Rule = Callable[[Facts], Check]


def run(facts: Facts) -> list[Check]:
    """Run every rule, in the order in which problems should be fixed."""
    return [rule(facts) for rule in RULES]


def usable(checks: Sequence[Check]) -> bool:
    """Tell whether no check is fatal."""
    return not any(check.fatal for check in checks)


def _ok(name: str, message: str) -> Check:
    return Check(name, "ok", message)


def _fatal(name: str, message: str, fix: str) -> Check:
    return Check(name, "missing", message, fix, fatal=True)


def _root(facts: Facts) -> Check:
    if facts.root:
        return _ok("root", "running as root")
    return _fatal("root", "not running as root: some of the following could not be checked", "Run it with sudo.")


def _criu(facts: Facts) -> Check:
    if facts.criu.version:
        return _ok("criu", f"CRIU {facts.criu.version} ({facts.criu.source}) works on kernel {facts.release}")
    reasons = "; ".join(facts.criu.problems) or "none is installed"
    return _fatal("criu", f"no CRIU that works on kernel {facts.release}: {reasons}", "Run cmdop-migrate doctor --fix.")


def _kernel(facts: Facts) -> Check:
    options = facts.kernel_options
    if not options:
        return _ok("kernel", f"{facts.release}; it does not publish its options, CRIU's own check is used instead")
    lacking = [f"CONFIG_{name} ({what})" for name, what in NEEDED_OPTIONS.items() if name not in options]
    if lacking:
        message = f"{facts.release} is built without {', '.join(lacking)}"
        return _fatal("kernel", message, "Boot the distribution's own kernel, or build these in.")
    lacking = [f"CONFIG_{name} ({what})" for name, what in WANTED_OPTIONS.items() if name not in options]
    if lacking:
        message = f"{facts.release} is built without {', '.join(lacking)}"
        return Check("kernel", "degraded", message, "Boot a kernel with these, or avoid such sockets in sessions.")
    return _ok("kernel", f"{facts.release} has every option needed")


def _namespaces(facts: Facts) -> Check:
    lacking = [name for name in NEEDED_NAMESPACES if name not in facts.namespaces]
    if lacking:
        return _fatal(
            "namespaces", f"the kernel has no {', '.join(lacking)} namespaces", "Boot a kernel that has them."
        )
    return _ok("namespaces", ", ".join(NEEDED_NAMESPACES))


def _capabilities(facts: Facts) -> Check:
    name = "capabilities"
    lacking = [each for each in NEEDED_CAPABILITIES if each not in facts.capabilities]
    if lacking:
        fix = "Run as root on the host itself, or in a container that has them."
        return _fatal(name, f"lacking {', '.join(lacking)}", fix)
    if "CAP_SYS_RESOURCE" not in facts.capabilities:
        return Check(
            name,
            "degraded",
            "root lacks CAP_SYS_RESOURCE here: CRIU cannot read the limits of another user's process; a session with "
            "any non-root process (--user, sudo -u, nginx workers, postgres) cannot be checkpointed; all-root ones can",
            "Give this machine or container CAP_SYS_RESOURCE, or run only root's processes in sessions that must move.",
        )
    return _ok(name, "all that sessions and CRIU need")


def _cgroup(facts: Facts) -> Check:
    if facts.cgroup2 is None:
        fix = "Run mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1."
        return _fatal("cgroup2", "cgroup v2 is not mounted", fix)
    if "rw" not in facts.cgroup2.options:
        message = f"cgroup v2 at {facts.cgroup2.point} is mounted read-only"
        return _fatal("cgroup2", message, f"Run mount -o remount,rw {facts.cgroup2.point}.")
    return _ok("cgroup2", f"at {facts.cgroup2.point}")


def _overlay(facts: Facts) -> Check:
    if not facts.overlay:
        return _fatal("overlay", "the kernel has no overlay filesystem", "Boot a kernel with CONFIG_OVERLAY_FS.")
    return _ok("overlay", "supported")


def _state(facts: Facts) -> Check:
    state = facts.state
    if state.kind in NO_UPPER or state.kind.startswith("fuse"):
        message = f"{state.path} is on {state.kind}, which cannot hold a session's files"
        return _fatal("state_dir", message, "Set state_dir to a directory on a local disk (ext4, xfs, btrfs).")
    if facts.root and not state.writable:
        return _fatal("state_dir", f"{state.path} cannot be written", "Remount it, or set state_dir elsewhere.")
    if state.kind == "tmpfs":
        message = f"{state.path} is on tmpfs: sessions' files are kept in memory and are lost at a reboot"
        return Check("state_dir", "degraded", message, "Set state_dir to a directory on disk.")
    return _ok("state_dir", f"{state.path} on {state.kind or 'an unnamed filesystem'}")


def _disk(facts: Facts) -> Check:
    free, path = facts.state.free, facts.state.path
    message = f"{show_size(free)} free at {path}"
    if free < DISK_LEAST:
        return _fatal("disk", message, f"Free at least {show_size(DISK_LEAST)}.")
    if free < DISK_GOOD:
        return Check("disk", "degraded", message, f"Free {show_size(DISK_GOOD)} or more: checkpoints spill to it.")
    return _ok("disk", message)


def _memory(facts: Facts) -> Check:
    message = f"{show_size(facts.memory_available)} available"
    if facts.memory_available < MEMORY_LEAST:
        return _fatal("memory", message, "End some programs, or add memory.")
    if facts.memory_available < MEMORY_GOOD:
        return Check("memory", "degraded", message, "A checkpoint works best with 512 MiB to spare.")
    return _ok("memory", message)


def _loopback(facts: Facts) -> Check:
    if facts.network.loopback_up:
        return _ok("loopback", "up")
    return _fatal("loopback", "lo is down, and CRIU does not start without it", "Run ip link set lo up.")


def _veth(facts: Facts) -> Check:
    if facts.tools.get("ip") is None:
        return _fatal("veth", "ip is not installed", "Install iproute2, or run cmdop-migrate doctor --fix.")
    if facts.network.veth is None:
        return Check("veth", "degraded", "not checked", "Run as root.")
    if not facts.network.veth:
        fix = "Boot a kernel with CONFIG_VETH, or start sessions with --net host."
        return Check("veth", "missing", "the kernel cannot create veth devices: no private network for sessions", fix)
    return _ok("veth", "supported")


def _nat(facts: Facts) -> Check:
    if facts.tools.get("nft") is None:
        fix = "Install nftables, or run cmdop-migrate doctor --fix."
        return Check(
            "nat", "missing", "nft is not installed: sessions with a private network reach nothing outside", fix
        )
    if facts.network.nat is None:
        return Check("nat", "degraded", "not checked", "Run as root.")
    if not facts.network.nat:
        message = "nftables cannot masquerade on this kernel: sessions with a private network reach nothing outside"
        return Check("nat", "missing", message, "Boot a kernel with CONFIG_NFT_MASQ, or use --net host.")
    if facts.network.forward_dropped_by:
        chains = ", ".join(facts.network.forward_dropped_by)
        message = f"forwarded packets are dropped by policy in {chains}: private networks may reach nothing outside"
        return Check("nat", "degraded", message, "Accept the sessions' subnet (setting `subnet`) in that chain.")
    forward = "is on" if facts.network.ip_forward else "is off, `run` turns it on"
    return _ok("nat", f"nftables can masquerade; ip_forward {forward}")


def _userfaultfd(facts: Facts) -> Check:
    is_known = facts.criu.version is not None
    if facts.userfaultfd and (not is_known or "uffd-noncoop" in facts.criu.features):
        return _ok("userfaultfd", "supported: restores start before their memory has arrived")
    fix = "Boot a kernel with CONFIG_USERFAULTFD for lazy restores."
    return Check("userfaultfd", "degraded", "not supported: every restore waits for all of its memory", fix)


def _dirty_tracking(facts: Facts) -> Check:
    if "mem_dirty_track" in facts.criu.features or (
        facts.criu.version is None and "MEM_SOFT_DIRTY" in facts.kernel_options
    ):
        return _ok("dirty_tracking", "supported: --pre-ship reads only what was written since its last round")
    if facts.criu.version is None and not facts.kernel_options:
        return Check("dirty_tracking", "degraded", "unknown without CRIU", "Run cmdop-migrate doctor --fix.")
    message = "the kernel does not track changed pages: --pre-ship rounds read all memory, and ship only what changed"
    return Check("dirty_tracking", "degraded", message, "Boot a kernel with CONFIG_MEM_SOFT_DIRTY, or accept it.")


def _init(facts: Facts) -> Check:
    return _tool(facts, "tini-static", "tini", "the init of every session")


def _tar(facts: Facts) -> Check:
    return _tool(facts, "tar", "tar", "CRIU packs tmpfs content with it")


def _tool(facts: Facts, tool: str, package: str, purpose: str) -> Check:
    path = facts.tools.get(tool)
    if path:
        return _ok(tool, path)
    fix = f"Install the package {package}, or run cmdop-migrate doctor --fix."
    return _fatal(tool, f"not installed ({purpose})", fix)


RULES: tuple[Rule, ...] = (
    _root,
    _criu,
    _kernel,
    _namespaces,
    _capabilities,
    _cgroup,
    _overlay,
    _state,
    _init,
    _tar,
    _loopback,
    _veth,
    _nat,
    _userfaultfd,
    _dirty_tracking,
    _disk,
    _memory,
)
