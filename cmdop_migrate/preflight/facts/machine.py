"""Read the facts of this host. Nothing here changes the host or decides anything."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Bits of the capability sets in /proc/PID/status, for the capabilities that matter to sessions.
CAPABILITIES: Mapping[str, int] = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_CHROOT": 18,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_MKNOD": 27,
    "CAP_SETFCAP": 31,
    "CAP_CHECKPOINT_RESTORE": 40,
}
TOOLS = ("tini-static", "tar", "ip", "nft", "apt-get")
# Directories that need not be in PATH, for example under cron.
_SEARCH = os.pathsep.join(("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"))
_NAT = 'table ip probe { chain out { type nat hook postrouting priority 100; oifname != "lo" masquerade; }; }'
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 1


@dataclass(frozen=True)
class CriuFacts:
    """Describe the CRIU that would be used, as the caller found it. `version` None: no CRIU works, for these
    reasons."""

    version: str | None = None
    source: str = ""
    features: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mount:
    """Describe one line of mountinfo."""

    point: str
    kind: str
    options: frozenset[str]


@dataclass(frozen=True)
class Space:
    """Describe the place of `state_dir`: its nearest existing directory, the filesystem there, and bytes free."""

    path: str
    kind: str
    writable: bool
    free: int


@dataclass(frozen=True)
class Network:
    """Describe the network of the host. None: unknown, because probing it needs root and the tools."""

    loopback_up: bool
    veth: bool | None
    nat: bool | None
    ip_forward: bool
    forward_dropped_by: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Describe one host. `kernel_options` is empty when the kernel does not publish them."""

    root: bool
    release: str
    cgroup2: Mount | None
    overlay: bool
    userfaultfd: bool
    namespaces: frozenset[str]
    capabilities: frozenset[str]
    tools: Mapping[str, str | None]
    state: Space
    network: Network
    memory_available: int
    kernel_options: Mapping[str, str] = field(default_factory=dict)
    criu: CriuFacts = field(default_factory=CriuFacts)


def gather(state_dir: Path, criu: CriuFacts) -> Facts:
    """Return the facts of this host. Takes some tens of milliseconds and changes nothing."""
    release = os.uname().release
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape"))
    root = os.geteuid() == 0
    return Facts(
        root=root,
        release=release,
        cgroup2=next((mount for mount in mounts if mount.kind == "cgroup2"), None),
        overlay=_filesystem("overlay", release),
        # The sysctl exists if the system call does. Its value concerns processes without CAP_SYS_PTRACE only.
        userfaultfd=Path("/proc/sys/vm/unprivileged_userfaultfd").exists(),
        namespaces=frozenset(os.listdir("/proc/self/ns")),
        capabilities=parse_capabilities(Path("/proc/self/status").read_text(encoding="utf-8")),
        tools={name: shutil.which(name) or shutil.which(name, path=_SEARCH) for name in TOOLS},
        state=_space(state_dir, mounts),
        network=_network(root),
        memory_available=parse_meminfo(Path("/proc/meminfo").read_text(encoding="utf-8")).get("MemAvailable", 0),
        kernel_options=_kernel_options(release),
        criu=criu,
    )


def parse_mountinfo(text: str) -> list[Mount]:
    """Parse /proc/PID/mountinfo, in the order mounted; paths unescaped."""
    mounts = []
    for line in text.split("\n"):  # a name may contain other line ends
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        mounts.append(Mount(point, rest[0], frozenset(fields[5].split(","))))
    return mounts


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """Return the mount of a path: the longest mount point above it, the last one where several are stacked."""
    above = [mount for mount in mounts if path == mount.point or path.startswith(mount.point.rstrip("/") + "/")]
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def parse_capabilities(status: str) -> frozenset[str]:
    """Return the names of the effective capabilities."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    mask = int(match[1], 16) if match else 0
    return frozenset(name for name, bit in CAPABILITIES.items() if mask >> bit & 1)


def parse_meminfo(text: str) -> dict[str, int]:
    """Return bytes by name."""
    return {m[1]: int(m[2]) * 1024 for m in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def parse_kernel_options(text: str) -> dict[str, str]:
    """Return {"VETH": "m"} for `CONFIG_VETH=m`. Options that are off are not included."""
    return {match[1]: match[2] for match in re.finditer(r"^CONFIG_(\w+)=(\S+)", text, re.MULTILINE)}


def parse_forward_drops(listing: str) -> tuple[str, ...]:
    """Return the nftables chains that drop forwarded packets by policy, as `family table chain`."""
    chains = []
    for item in json.loads(listing).get("nftables", []):
        chain = item.get("chain", {})
        if chain.get("hook") == "forward" and chain.get("policy") == "drop" and chain.get("family") in ("ip", "inet"):
            chains.append(f"{chain['family']} {chain['table']} {chain['name']}")
    return tuple(chains)


def _space(state_dir: Path, mounts: list[Mount]) -> Space:
    existing = next(path for path in (state_dir, *state_dir.parents) if path.exists()).resolve()
    mount = mount_of(str(existing), mounts)
    writable = os.access(existing, os.W_OK)
    return Space(str(existing), mount.kind if mount else "", writable, shutil.disk_usage(existing).free)


def _network(root: bool) -> Network:
    forward = Path("/proc/sys/net/ipv4/ip_forward")
    return Network(
        loopback_up=_loopback_up(),
        veth=_in_new_netns(["ip", "link", "add", "p0", "type", "veth", "peer", "name", "p1"]) if root else None,
        nat=_in_new_netns(["nft", "-f", "-"], _NAT) if root else None,
        ip_forward=forward.exists() and forward.read_text(encoding="ascii").strip() == "1",
        forward_dropped_by=_forward_drops() if root else (),
    )


def _loopback_up() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        except OSError:
            return False
    return bool(struct.unpack_from("16sH", answer)[1] & _IFF_UP)


def _in_new_netns(argv: list[str], given: str = "") -> bool | None:
    """Tell whether a command succeeds in a network namespace that is removed with it; None if a tool is missing."""
    tool = shutil.which(argv[0], path=_SEARCH)
    unshare = shutil.which("unshare", path=_SEARCH)
    if tool is None or unshare is None:
        return None
    return _ran([unshare, "--net", tool, *argv[1:]], given) is not None


def _forward_drops() -> tuple[str, ...]:
    nft = shutil.which("nft", path=_SEARCH)
    listing = _ran([nft, "-j", "list", "chains"]) if nft else None
    return parse_forward_drops(listing) if listing else ()


def _ran(argv: list[str], given: str = "") -> str | None:
    try:
        done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=30.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _filesystem(name: str, release: str) -> bool:
    listed = Path("/proc/filesystems").read_text(encoding="ascii").split()
    return name in listed or _loadable(name, release)


def _loadable(module: str, release: str) -> bool:
    for index in ("modules.dep", "modules.builtin"):
        file = Path("/lib/modules") / release / index
        if file.exists() and re.search(rf"/{module}\.ko", file.read_text(encoding="utf-8", errors="replace")):
            return True
    return False


def _kernel_options(release: str) -> dict[str, str]:
    packed = Path("/proc/config.gz")
    if packed.exists():
        return parse_kernel_options(gzip.decompress(packed.read_bytes()).decode("utf-8", "replace"))
    for file in (Path(f"/boot/config-{release}"), Path(f"/lib/modules/{release}/config")):
        if os.access(file, os.R_OK):
            return parse_kernel_options(file.read_text(encoding="utf-8", errors="replace"))
    return {}
