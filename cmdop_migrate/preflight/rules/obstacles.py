"""List the kinds of process state that CRIU cannot dump or restore, with a message and a fix for each.

Each row of KINDS is tested: `tests/integration/test_plan_truth.py` creates it, and asserts that the dump or the restore
fails where a row here blocks, and that both work for all other state that it creates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Obstacle:
    """Describe an obstacle in a session. `what` completes the message of its kind. `pid` 0: it belongs to no
    process."""

    kind: str
    what: str = ""
    pid: int = 0
    command: str = ""


@dataclass(frozen=True)
class Kind:
    """Describe one kind of obstacle. `check` groups kinds for the plan page and `--accept`. `text` follows the name of
    the process, or of the session. `passing`: it usually ends by itself soon, and `--wait-quiet` waits for that."""

    check: str
    text: str
    fix: str
    passing: bool = False
    blocks: bool = True


_CLOSE = "Close it, or end the process."
_NAMESPACE = "End the container or sandbox before the checkpoint."

KINDS: dict[str, Kind] = {
    "namespace": Kind("namespaces", "is in a {0} namespace of its own, which CRIU cannot dump", _NAMESPACE, True),
    "kept_namespace": Kind(
        "namespaces",
        "keeps the namespace {0} open, which contains no process of the session: CRIU cannot dump it",
        _CLOSE,
    ),
    "shared_memory": Kind(
        "shared_memory",
        "shares its memory with its parent, pid {0} (a program just being started, or clone with CLONE_VM), which CRIU"
        " cannot dump",
        "Try again in a moment, or with --wait-quiet 30s.",
        True,
    ),
    "shared_place": Kind(
        "shared_memory",
        "shares its working directory with its parent, pid {0} (clone with CLONE_FS), which CRIU cannot dump",
        "End the process.",
    ),
    "dead_leader": Kind(
        "threads", "has ended its first thread while others run, which CRIU cannot dump", "End the process."
    ),
    "trap": Kind("signals", "has a SIGTRAP pending, which CRIU cannot dump", "Let it handle the signal, or end it."),
    "deadline": Kind(
        "scheduling",
        "is scheduled with SCHED_DEADLINE, which CRIU cannot restore",
        "Give it another policy: chrt --other --pid 0 PID",
    ),
    "outside_cgroup": Kind(
        "cgroup",
        "has left the session's cgroup and would not be frozen with it",
        "Write its pid to cgroup.procs of the session's cgroup, or end it.",
    ),
    "sub_cgroup": Kind(
        "cgroup",
        "has cgroups below its own, which are not restored: {0}. Their processes are restored in the session's own",
        "Create them again after the restore; a hook can do that.",
        blocks=False,
    ),
    "memfd_program": Kind(
        "programs",
        "was executed from a memfd ({0}), which CRIU cannot restore",
        "Let it run from a file, or end it.",
    ),
    "descriptor": Kind("descriptors", "has a descriptor that CRIU cannot dump: {0}", _CLOSE),
    "message_queue": Kind(
        "message_queues", "has the POSIX message queue {0} open, which CRIU cannot dump", "Close and unlink it."
    ),
    "message_queues": Kind(
        "message_queues", "has POSIX message queues, which CRIU cannot dump: {0}", "Unlink them (rm /dev/mqueue/NAME)."
    ),
    "packet_pipe": Kind("descriptors", "has a pipe in packet mode (O_DIRECT), which CRIU cannot dump", _CLOSE),
    "alarm_timer": Kind("descriptors", "has a timerfd that wakes the machine (clock {0}), CRIU cannot dump it", _CLOSE),
    "epoll": Kind(
        "descriptors",
        "watches a file with epoll (descriptor {0}) that it has closed and another process keeps open: CRIU cannot find"
        " it",
        "Remove it from the epoll set before closing it, or end the process.",
    ),
    "path_socket": Kind("descriptors", "has the socket {0} open with O_PATH, which CRIU cannot dump", _CLOSE),
    "thread_file": Kind(
        "thread_files",
        "has {0} open, a file of one thread in /proc: CRIU opens files before it creates the threads",
        "Close it; a program that reads /proc closes it soon.",
        True,
    ),
    "hidden_file": Kind(
        "hidden_files",
        "has {0} open or as its working directory, which is hidden by a mount over it",
        "Unmount the file system that hides it, or close it.",
    ),
    "detached_file": Kind(
        "hidden_files",
        "has {0} open on a file system that is mounted nowhere in the session",
        "Close it, or mount that file system again.",
    ),
    "secret_memory": Kind("mappings", "has secret memory (memfd_secret), which CRIU cannot read", "End the process."),
    "huge_pages": Kind(
        "mappings",
        "maps huge pages (MAP_HUGETLB), of which this machine has none: CRIU cannot dump the mapping",
        "Reserve some (vm.nr_hugepages), or run the program without.",
    ),
    "corked": Kind(
        "waiting_sockets", "holds back a datagram (UDP_CORK), which CRIU cannot dump", "Uncork the socket.", True
    ),
    "netlink_news": Kind(
        "waiting_sockets",
        "has not read messages that its netlink socket received, which CRIU cannot dump",
        "Let the program read them, or end it.",
        True,
    ),
    "unaccepted": Kind(
        "waiting_sockets",
        "listens on {0} and has not accepted a connection that has sent data or was closed: CRIU cannot dump it",
        "Let the program accept it.",
        True,
    ),
    "outside_unix": Kind(
        "outside_sockets",
        "is connected by a unix socket to {0}, outside of the session",
        "Close that connection (often dbus, docker.sock, ssh-agent or X11), or end the process.",
    ),
    "foreign_unix": Kind(
        "outside_sockets",
        "has a unix socket from outside of the session: a process outside created it, or connected to it",
        "Close that connection, or end the process.",
    ),
    "host_service": Kind(
        "outside_sockets",
        "sends datagrams to {0}, a service of the host, which must also run where the session is restored",
        "Run that service there too, or end the process.",
        blocks=False,
    ),
    "bpf_filter": Kind("descriptors", "has a socket with a BPF program attached, which CRIU cannot dump", _CLOSE),
    "mount": Kind(
        "mounts", "has a file system mounted that CRIU cannot restore: {0}", "Unmount it inside the session."
    ),
    "lost_mount": Kind(
        "mounts",
        "has a file system mounted that will not be mounted after a restore: {0}",
        "Mount it again after the restore.",
        blocks=False,
    ),
}

# (check, what it examines, the general fix), in the order of the checks.
CHECKS: tuple[tuple[str, str, str], ...] = (
    ("namespaces", "a user, time, uts, ipc or cgroup namespace inside the session", _NAMESPACE),
    ("shared_memory", "processes that share memory: vfork in progress, CLONE_VM", "Try again in a moment."),
    ("threads", "a process whose first thread has ended", "End the process."),
    ("signals", "a pending SIGTRAP", "Let it handle the signal, or end it."),
    ("scheduling", "SCHED_DEADLINE", "Give it another policy: chrt --other --pid 0 PID"),
    ("cgroup", "processes that have left the session's cgroup, cgroups created below it", "Move them back."),
    ("programs", "programs executed from a memfd", "Let it run from a file, or end it."),
    (
        "descriptors",
        "perf_event, bpf, userfaultfd, seccomp and landlock descriptors, pidfds of threads, packet pipes, alarm"
        " timers, closed files in an epoll set, O_PATH sockets",
        _CLOSE,
    ),
    ("message_queues", "POSIX message queues", "Close and unlink them."),
    ("thread_files", "open files below /proc/PID/task/TID", "Close it; `--wait-quiet` waits for that."),
    ("hidden_files", "open files hidden by a mount, or on an unmounted file system", "Unmount, or close it."),
    ("mappings", "secret memory, huge pages where the machine has none", "End the process."),
    (
        "waiting_sockets",
        "corked UDP, unread netlink messages, unaccepted unix connections with data or closed",
        "Wait until it has ended: --wait-quiet 30s.",
    ),
    ("outside_sockets", "unix connections to processes outside of the session", "Close the connection."),
    ("mounts", "file systems mounted by the session that CRIU cannot restore", "Unmount them first."),
)
