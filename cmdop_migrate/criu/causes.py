"""The failures people meet, by the words CRIU's log has for them. A table and nothing else; `logs` reads it.

Order matters: of two rules that fit one line, the first counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    name: str
    pattern: re.Pattern[str]
    cause: str  # {0}, {1}: what the pattern's groups caught
    fix: str


def _rule(name: str, pattern: str, cause: str, fix: str) -> Rule:
    return Rule(name, re.compile(pattern), cause, fix)


_SAME_FILES = (
    "Restore with --carry opened (the file then travels with the checkpoint), or make the two hosts' files equal."
)
_NEWER = "Run `cmdop-migrate doctor --fix`, which fetches a CRIU that works on this kernel."
_VERIFY = "Run `cmdop-migrate checkpoints verify`, and restore again from the store."
_CLOSE = "End the program that has it open, or let it close it, and try again."

RULES: tuple[Rule, ...] = (
    # The kernel and this CRIU
    _rule(
        "vdso", r"vdso: (Unexpected|Failed)|kerndat_vdso_fill", "this CRIU is too old for this kernel (vDSO)", _NEWER
    ),
    _rule(
        "socket_options",
        r"Can't get 1:(16|34) opt",
        "this CRIU is too old for this kernel: it cannot read socket options (CRIU < 4.2 on Linux >= 6.16)",
        _NEWER,
    ),
    _rule(
        "lo_down",
        r"Unable to connect a socket: Network is unreachable|kerndat_tcp_repair failed",
        "the loopback interface is down where CRIU runs",
        "Run `ip link set lo up` in this host's network namespace.",
    ),
    _rule("kerndat", r"kerndat_(\w+) failed", "this kernel lacks what CRIU needs ({0})", _NEWER),
    _rule(
        "privilege",
        r"CRIU needs (?:to have )?.*CAP_|needs to run as root|CAP_\w+ .*(?:missing|required)",
        "CRIU lacks the privileges it needs",
        "Run as root, outside of a container that drops capabilities.",
    ),
    # The tree
    _rule(
        "rlimit",
        r"Can't get rlimit \d+: Operation not permitted",
        "this machine lacks CAP_SYS_RESOURCE, so CRIU cannot read the limits of a process of another user",
        "Use a host that has the capability (an ordinary one, or a VM), or run everything in the session as root.",
    ),
    _rule(
        "outside_cgroup",
        r"Unseizable non-zombie (\d+) found",
        "process {0} belongs to the session but has left its cgroup, so it was not frozen",
        "Move it back (write its pid to the session's cgroup.procs), or end it.",
    ),
    _rule(
        "traced",
        r"Unable to interrupt task: (\d+) \(Operation not permitted\)",
        "process {0} is being traced by another program (gdb, strace) or is gone",
        "Detach the debugger and try again.",
    ),
    _rule(
        "freeze_timeout",
        r"Timeout reached|Unable to freeze (?:cgroup|tasks)|Freezer .*timed? ?out",
        "the session could not be frozen in time",
        "A process may hang in the kernel (state D, see `cmdop-migrate show`); wait for it or end it, then try again.",
    ),
    _rule(
        "session_gone",
        r"BUG at criu/cgroup\.c|Can't open \d+'s? .*No such process|zombie \d+ .*found while seizing",
        "the session's root process has ended",
        "See what it printed last with `cmdop-migrate output`.",
    ),
    _rule(
        "nested_pidns",
        r"Can't dump nested pid namespace for (\d+)",
        "process {0} is in a pid namespace of its own (a container or a sandboxed browser inside the session)",
        "End the inner container before the checkpoint.",
    ),
    _rule(
        "nested_ns",
        r"Can't dump nested (\w+) namespace|(?:User|user) namespaces? (?:is|are) not supported",
        "a process is in a nested namespace that CRIU cannot dump",
        "End the inner container before the checkpoint.",
    ),
    _rule(
        "compat",
        r"Can't dump task \d+ running in (?:unsupported|compat)|compat.*not supported",
        "a 32-bit process is in the session and this CRIU cannot dump those",
        "End the 32-bit program before the checkpoint.",
    ),
    _rule(
        "seccomp",
        r"[Ss]eccomp.*(?:not supported|unsupported|[Cc]an't|Failed)",
        "a process has a seccomp filter CRIU cannot carry",
        "End that program (often a sandboxed browser) before the checkpoint.",
    ),
    # Descriptors and memory
    _rule(
        "io_uring",
        r"\[io_uring\]",
        "a process uses io_uring, which CRIU cannot dump",
        "Switch it off in that program (node: UV_USE_IO_URING=0; others have a setting) and restart it.",
    ),
    _rule("gpu", r"/dev/(?:nvidia|dri|kfd)\S*", "a process uses a GPU, which CRIU cannot dump here", _CLOSE),
    _rule("memory_kind", r"Unknown shit \d+ \((.+)\)", "a process maps memory CRIU cannot dump: {0}", _CLOSE),
    _rule(
        "anon_inode",
        r"Can't dump file (\d+) of that type \[\d+\] \(anon (?:anon_inode:)?(.+)\)",
        "descriptor {0} of a process is a {1}, which CRIU cannot dump",
        _CLOSE,
    ),
    _rule(
        "device",
        r"Can't dump file (\d+) of that type \[\d+\] \((chr|blk) (\d+:\d+)\)",
        "descriptor {0} of a process is the device {1} {2}, which belongs to this host",
        _CLOSE,
    ),
    _rule(
        "file_kind",
        r"Can't dump file (\d+) of that type",
        "descriptor {0} of a process is of a kind CRIU cannot dump",
        _CLOSE,
    ),
    _rule(
        "ghost_limit",
        r"Can't dump ghost file (\S+) of (\d+) size",
        "{0} is deleted but still open, and at {1} bytes larger than may be carried",
        "Let the program close it, or raise the limit for deleted files.",
    ),
    _rule(
        "link_remap",
        r"(?:Can't|can't) (?:create )?link.?remap|linkat.*(?:failed|Can't)",
        "an open file was renamed away or unlinked, and CRIU cannot give it a name to carry it under",
        _CLOSE,
    ),
    _rule(
        "inotify",
        r"fsnotify:.*Can't dump that handle|Can't find .* in irmap",
        "a process watches a file or folder (inotify) whose path CRIU could not find",
        "End the watcher, or name the folder it watches.",
    ),
    _rule(
        "unix_stream",
        r"Can't dump half of stream unix connection(?:\. name: .*; peer name: (.*))?",
        "a process is connected to a service of this host over a unix socket ({0})",
        "Close that connection (often dbus, docker.sock, ssh-agent or X11) and try again.",
    ),
    _rule(
        "unix_external",
        r"External socket (?:is used|found in image)",
        "a process has a unix socket whose other end is outside the session",
        "Close that connection and try again.",
    ),
    _rule(
        "tcp",
        r"Connected TCP socket, consider using --tcp-established",
        "a TCP connection is open that was not expected",
        "Report this: TCP connections are to be handled before the dump.",
    ),
    _rule("tcp_inflight", r"In-flight connection", "a TCP connection was just being made", "Try again."),
    _rule(
        "socket_kind",
        r"Unknown socket collected \(family (\d+)\)|[Uu]nsupported (?:socket|protocol|proto) ?(\S*)",
        "a process has a socket of a family CRIU cannot dump ({0})",
        _CLOSE,
    ),
    _rule(
        "file_lock",
        r"(?:Some file locks are hold|file.?lock).*(?:--file-locks|[Cc]an't|unsupported|[Ff]ailed)",
        "a file lock could not be carried",
        "Let the program release the lock (leases are not supported), and try again.",
    ),
    _rule(
        "tty",
        r"tty: (?:Found dangling tty|Don't have tty to inherit|No task found with sid|ctty inheritance detected)",
        "a process holds a terminal that is not the session's own",
        "Start it inside the session, not attached to another terminal, and try again.",
    ),
    _rule(
        "tty_index",
        r"tty: (?:Unable to open|Can't open) .*(?:ptmx|index)",
        "a terminal of the session could not be made again",
        "Check that devpts can be mounted on this host.",
    ),
    # Files on restore
    _rule(
        "build_id",
        r"File (\S+) has bad build-ID",
        "/{0} is another build here than where the session was dumped",
        _SAME_FILES,
    ),
    _rule(
        "file_size",
        r"File (\S+) has bad size (\d+) \(expect (\d+)\)",
        "/{0} is {1} bytes here and was {2} when the session was dumped",
        _SAME_FILES,
    ),
    _rule(
        "file_mode",
        r"File (\S+) has bad mode (\d+) \(expect (\d+)\)",
        "/{0} has mode {1} here and had {2}",
        _SAME_FILES,
    ),
    _rule(
        "file_missing", r"Can't open file (\S+)(?: on restore)?: No such file", "/{0} does not exist here", _SAME_FILES
    ),
    _rule("cwd", r"Can't open cwd", "the working directory of a process does not exist here", _SAME_FILES),
    # Mounts and network
    _rule(
        "mount_root",
        r"mnt: \d+:\.?(\S+) doesn't have a proper root mount",
        "{0} is a mount of the host that the session was not given as shared",
        "Unmount it inside the session, or start sessions with `--share` for it.",
    ),
    _rule(
        "mount_mapping",
        r"No mapping for (\S+) mountpoint|Failed to open_tree (\S+):",
        "a folder the session shares with its host is not there ({0}{1})",
        "Create it on this host, then restore again.",
    ),
    _rule(
        "mount_fs",
        r"mnt: (?:FS mnt|Unsupported|Mount) .*(?:unsupported|dev .* unsupported id|is not supported)",
        "a kind of filesystem is mounted in the session that CRIU cannot carry",
        "Unmount it inside the session.",
    ),
    _rule(
        "mount",
        r"mnt(?:-v2)?: Can't (?:mount|bind-mount|remount)(?: at)? ?(\S*)",
        "a mount of the session could not be made again ({0})",
        "See the log; the filesystem may be missing on this host.",
    ),
    _rule(
        "link_taken",
        r"Can't restore link: -17|reported by netlink: File exists",
        "a network interface of that name exists already",
        "Remove the left-over interface (`ip link del NAME`), then restore again.",
    ),
    _rule(
        "link",
        r"net: Can't restore link: (-\d+)",
        "a network interface could not be made again ({0})",
        "Run `cmdop-migrate doctor`.",
    ),
    _rule(
        "address",
        r"Can't bind.*(?:Cannot assign requested address|Address already in use)",
        "a socket's address is not free or not there on this host",
        "With --net host, free the port on this host first; or run sessions in a private network.",
    ),
    # The machine
    _rule(
        "pid_taken",
        r"Can't fork for (\d+): File exists|Pid (\d+) do not match expected",
        "pid {0}{1} of the session is taken by another process",
        "End the process that has it, or restore on another host.",
    ),
    _rule(
        "cpu",
        r"cpu: .*(?:not supported on host|do not match|does not match)|instruction capabilities do not match",
        "this CPU lacks features the session may already use",
        "Restore on a host whose CPU has at least those of the first.",
    ),
    _rule(
        "no_space",
        r"No space left on device|Disk quota exceeded",
        "there is no space left for the images",
        "Free space where state_dir is, then try again.",
    ),
    _rule(
        "no_memory",
        r"Cannot allocate memory|Out of memory",
        "memory ran out",
        "Free memory on this host, then try again.",
    ),
    _rule(
        "too_many_files",
        r"Too many open files",
        "CRIU ran out of file descriptors",
        "Raise `ulimit -n` for cmdop-migrate.",
    ),
    _rule(
        "apparmor",
        r"(?:apparmor|lsm|selinux).*(?:[Cc]an't|[Ff]ailed|not found|mismatch)",
        "a security profile (AppArmor, SELinux) the session ran under is missing or refuses",
        "Load the same profile on this host.",
    ),
    # Images and pages
    _rule(
        "page_server",
        r"Can't write pages to socket|The page server doesn't answer|Can't send PSI",
        "the receiver of the memory pages gave up before CRIU had sent them all",
        "Look above for what made it give up; then try again.",
    ),
    _rule(
        "lazy_socket",
        r"connect to lazy-pages\.socket failed",
        "the process that serves memory on demand is not running",
        "Restore again.",
    ),
    _rule(
        "lazy_lost",
        r"Remote side closed connection|Error reading data from page server",
        "the source of the memory pages went away before all were in place",
        "The checkpoint is intact: restore it again.",
    ),
    _rule(
        "uffd",
        r"(?:Lazy pages are not available|Unable to open an userfaultfd)",
        "this kernel does not let us fill memory on demand (userfaultfd)",
        "Restore without --lazy.",
    ),
    _rule(
        "image_missing",
        r"Unexpected EOF on \(empty-image\)|Can't open (?:image|file) (\S+\.img)|Can't open dir",
        "an image file is missing",
        _VERIFY,
    ),
    _rule(
        "image_damaged",
        r"[Mm]agic doesn't match|Read \d+ bytes while \d+ expected|Unexpected EOF|Failed unpacking",
        "an image file is damaged",
        _VERIFY,
    ),
    _rule(
        "pages_missing", r"Can't read pages data|no pagemap covers", "memory pages are missing from the images", _VERIFY
    ),
    _rule(
        "permission",
        r"(?:Permission denied|Operation not permitted)",
        "this machine does not let CRIU do it",
        "Run `cmdop-migrate doctor`; in a container, give it more capabilities.",
    ),
)
