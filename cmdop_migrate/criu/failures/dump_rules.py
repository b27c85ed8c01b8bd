"""List the known failures of this host and of a dump: the kernel, the process tree, descriptors and memory."""

from __future__ import annotations

from cmdop_migrate.criu.failures.rule import CLOSE, NEWER, Rule, rule

DUMP_RULES: tuple[Rule, ...] = (
    # The kernel and this CRIU
    rule("vdso", r"vdso: (Unexpected|Failed)|kerndat_vdso_fill", "this CRIU is too old for this kernel (vDSO)", NEWER),
    rule(
        "socket_options",
        r"Can't get 1:(16|34) opt",
        "this CRIU is too old for this kernel: it cannot read socket options (CRIU < 4.2 on Linux >= 6.16)",
        NEWER,
    ),
    rule(
        "lo_down",
        r"Unable to connect a socket: Network is unreachable|kerndat_tcp_repair failed",
        "the loopback interface is down where CRIU runs",
        "Run `ip link set lo up` in this host's network namespace.",
    ),
    rule("kerndat", r"kerndat_(\w+) failed", "this kernel lacks a feature that CRIU needs ({0})", NEWER),
    rule(
        "privilege",
        r"CRIU needs (?:to have )?.*CAP_|needs to run as root|CAP_\w+ .*(?:missing|required)",
        "CRIU lacks the privileges it needs",
        "Run as root, outside of a container that drops capabilities.",
    ),
    # The tree
    rule(
        "rlimit",
        r"Can't get rlimit \d+: Operation not permitted",
        "this machine lacks CAP_SYS_RESOURCE, so CRIU cannot read the limits of a process of another user",
        "Use a host that has the capability (an ordinary one, or a VM), or run everything in the session as root.",
    ),
    rule(
        "pending_trap",
        r"Can't dump the (\d+) thread with a pending SIGTRAP",
        "process {0} has a SIGTRAP pending, which CRIU cannot dump",
        "Let it handle the signal, or end it, and try again.",
    ),
    rule(
        "outside_cgroup",
        r"Unseizable non-zombie (\d+) found",
        "process {0} belongs to the session but has left its cgroup, so it was not frozen",
        "Move it back (write its pid to the session's cgroup.procs), or end it.",
    ),
    rule(
        "traced",
        r"Unable to interrupt task: (\d+) \(Operation not permitted\)",
        "process {0} is being traced by another program (gdb, strace) or has ended",
        "Detach the debugger and try again.",
        passing=True,
    ),
    rule(
        "shared_memory",
        r"Can't make VM id for (\d+)",
        "process {0} shares its memory with another one",
        "It may just be starting a program: try again.",
        passing=True,
    ),
    rule(
        "dead_leader",
        r"Zombies with threads are not supported",
        "a process has ended its first thread while others run",
        "End that process, and try again.",
    ),
    rule(
        "freeze_timeout",
        r"Timeout reached|Unable to freeze (?:cgroup|tasks)|Freezer .*timed? ?out",
        "the session could not be frozen in time",
        "A process may hang in the kernel (state D, see `cmdop-migrate show`); wait for it or end it, then try again.",
        passing=True,
    ),
    rule(
        "session_gone",
        r"BUG at criu/cgroup\.c|Can't open \d+'s? .*No such process|zombie \d+ .*found while seizing",
        "the session's root process has ended",
        "See what it printed last with `cmdop-migrate output`.",
    ),
    rule(
        "nested_pidns",
        r"Can't dump nested pid namespace for (\d+)",
        "process {0} is in a pid namespace of its own (a container or a sandboxed browser inside the session)",
        "End the inner container before the checkpoint.",
        passing=True,
    ),
    rule(
        "nested_ns",
        r"Can't dump nested (\w+?)(?:_for_children)? namespace(?: for (\d+))?"
        r"|(?:User|user) namespaces? (?:is|are) not supported",
        "process {1} is in a {0} namespace of its own, which CRIU cannot dump",
        "End the inner container before the checkpoint.",
        passing=True,
    ),
    rule(
        "kept_namespace",
        r"No NS ID with kid (\d+)",
        "a process keeps a namespace open that contains no process of the session",
        CLOSE,
    ),
    rule(
        "compat",
        r"Can't dump task \d+ running in (?:unsupported|compat)|compat.*not supported",
        "a 32-bit process is in the session, which this CRIU cannot dump",
        "End the 32-bit program before the checkpoint.",
    ),
    rule(
        "seccomp",
        r"[Ss]eccomp.*(?:not supported|unsupported|[Cc]an't|Failed)",
        "a process has a seccomp filter that CRIU cannot dump",
        "End that program (often a sandboxed browser) before the checkpoint.",
    ),
    # Descriptors and memory
    rule(
        "io_uring",
        r"\[io_uring\]|parasite\.c:\d+\): send_fds failed \(-22\)",  # the kernel does not let it be sent over a socket
        "a process uses io_uring, which CRIU cannot dump",
        "Switch it off in that program (node: UV_USE_IO_URING=0; others have a setting) and restart it.",
    ),
    rule("gpu", r"/dev/(?:nvidia|dri|kfd)\S*", "a process uses a GPU, which CRIU cannot dump here", CLOSE),
    rule("memory_kind", r"Unknown shit \d+ \((.+)\)", "a process maps memory CRIU cannot dump: {0}", CLOSE),
    rule(
        "anon_inode",
        r"Can't dump file (\d+) of that type \[\d+\] \(anon (?:anon_inode:)?(.+)\)",
        "descriptor {0} of a process is a {1}, which CRIU cannot dump",
        CLOSE,
    ),
    rule(
        "device",
        r"Can't dump file (\d+) of that type \[\d+\] \((chr|blk) (\d+:\d+)\)",
        "descriptor {0} of a process is the device {1} {2}, which belongs to this host",
        CLOSE,
    ),
    rule(
        "file_kind",
        r"Can't dump file (\d+) of that type",
        "descriptor {0} of a process is of a kind CRIU cannot dump",
        CLOSE,
    ),
    rule(
        "ghost_limit",
        r"Can't dump ghost file (\S+) of (\d+) size",
        "{0} is deleted but still open, and with {1} bytes larger than the limit for such files",
        "Let the program close it, or raise the limit for deleted files.",
    ),
    rule(
        "link_remap",
        r"(?:Can't|can't) (?:create )?link.?remap|linkat.*(?:failed|Can't)",
        "an open file was renamed or unlinked, and CRIU cannot create a link to it",
        CLOSE,
    ),
    rule(
        "inotify",
        r"fsnotify:.*Can't dump that handle|Can't find .* in irmap",
        "a process watches a file or folder (inotify) whose path CRIU could not find",
        "Let the program remove the watch, or end it, and try again.",
    ),
    rule(
        "unix_stream",
        r"Can't dump half of stream unix connection(?:\. name: .*; peer name: (.*))?",
        "a process is connected to a service of this host over a unix socket ({0})",
        "Close that connection (often dbus, docker.sock, ssh-agent or X11) and try again.",
    ),
    rule(
        "unix_external",
        r"External socket (?:is used|found in image)|Unix socket \d+ (?:not found|without peer)",
        "a process has a unix socket whose other end is outside the session",
        "Close that connection and try again.",
    ),
    rule(
        "tcp",
        r"Connected TCP socket, consider using --tcp-established",
        "a TCP connection is open that was not expected",
        "Report this: TCP connections should have been handled before the dump.",
    ),
    rule(
        "unix_waiting",
        r"Non-empty write queue on an in-flight socket|Found a closed in-flight socket|Dangling connection",
        "a connection to a unix socket has sent data or was closed before it was accepted",
        "Let the program accept it, and try again.",
        passing=True,
    ),
    rule(
        "corked",
        r"Can't dump corked dgram socket",
        "a program holds back a datagram (UDP_CORK), which CRIU cannot dump",
        "Try again when it is sent.",
        passing=True,
    ),
    rule(
        "netlink_news",
        r"netlink: The socket has data to read",
        "a program has not read the messages that its netlink socket received",
        "Try again when it has read them.",
        passing=True,
    ),
    rule(
        "message_queues",
        r"mqueue isn't empty",
        "the session has POSIX message queues, which CRIU cannot dump",
        "Unlink them (rm /dev/mqueue/NAME), and try again.",
    ),
    rule("packet_pipe", r"packetized mode for pipes", "a pipe is in packet mode (O_DIRECT)", CLOSE),
    rule(
        "bpf_filter",
        r"Can't get socket filter len: Permission denied",
        "a socket has a BPF program attached, which CRIU cannot dump",
        CLOSE,
    ),
    rule(
        "epoll",
        r"Dump eventpoll \(pid: (\d+)\) failed",
        "process {0} watches a file with epoll that it has closed",
        CLOSE,
    ),
    rule(
        "hidden_file",
        r"Open files on overmounted mounts are not supported yet;.*path=(\S+)"
        r"|Can't lookup mount=\d+ for fd=\S+ path=(\S+)"
        r"|Unaccessible path opened",
        "a process has a file open that is hidden by a mount or on an unmounted file system ({0}{1})",
        "Unmount the file system that hides it, or close the file, and try again.",
    ),
    rule(
        "sched_policy",
        r"Inconsistent sched params received",
        "a process has a scheduling policy that CRIU cannot restore",
        "Give it another policy before the checkpoint (chrt).",
    ),
    rule(
        "memfd_program",
        r"No entry for reg-file-ID",
        "a program was executed from a memfd, which CRIU cannot restore",
        "End that program before the checkpoint.",
    ),
    rule("tcp_inflight", r"In-flight connection", "a TCP connection was being established", "Try again.", passing=True),
    rule(
        "socket_kind",
        r"Unknown socket collected \(family (\d+)\)|[Uu]nsupported (?:socket|protocol|proto) ?(\S*)",
        "a process has a socket of a family CRIU cannot dump ({0})",
        CLOSE,
    ),
    rule(
        "file_lock",
        r"(?:Some file locks are hold|file.?lock).*(?:--file-locks|[Cc]an't|unsupported|[Ff]ailed)",
        "a file lock could not be dumped",
        "Let the program release the lock (leases are not supported), and try again.",
    ),
    rule(
        "tty",
        r"tty: (?:Found dangling tty|Don't have tty to inherit|No task found with sid|ctty inheritance detected)",
        "a process has a terminal open whose other end CRIU did not find in the session",
        "End that process, or let it close the terminal, and try again.",
    ),
    rule(
        "tty_index",
        r"tty: (?:Unable to open|Can't open) .*(?:ptmx|index)",
        "a terminal of the session could not be restored",
        "Check that devpts can be mounted on this host.",
    ),
)
