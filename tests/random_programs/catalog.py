"""List every kind of state the generator may give to a process, with its weight and whether the plan has to refuse it.

`inside/` has the code that builds each kind, under the same name. SWITCHES has what is left out until it works.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    name: str
    weight: float = 1.0
    early: bool = True  # may be built before the process forks, so that its children have it, too
    repeat: bool = True  # a process may have several
    terminal: bool = False  # needs a controlling terminal
    blocked: bool = False  # the plan has to refuse it


def _kinds(names: str, **options: object) -> Iterable[Kind]:
    return [Kind(name, **options) for name in names.split()]  # type: ignore[arg-type]


MEMORY = [
    *_kinds("anon_private anon_untouched anon_shared memfd file_private file_shared file_deleted untouchable holes"),
    *_kinds("reservation", weight=2),
    *_kinds("wipe_on_fork dont_fork huge_pages no_huge_pages dont_dump mergeable locked grows_down system_v_memory"),
]
FILES = [
    *_kinds("regular", weight=3),
    *_kinds("deleted replaced linked renamed unnamed host_file path_only directory directory_deleted usual_devices"),
    *_kinds("linked_unlinked deleted_sparse proc_files namespace_files signal_owner"),
    *_kinds("posix_lock", early=False),
    *_kinds("flock ofd_lock"),
    *_kinds("file_lease write_lease", weight=0.5),
    *_kinds("inotify inotify_files"),
]
IPC = [
    *_kinds("pipe", weight=3),
    *_kinds("pipe_ended fifo fifo_deleted eventfd timerfd epoll pidfd system_v high_numbers"),
    *_kinds("signalfd", repeat=False),
    *_kinds("epoll_moved", weight=0.5),
]
SOCKETS = [
    *_kinds("unix_stream tcp", weight=2),
    *_kinds(
        "unix_listener unix_unaccepted unix_listener_deleted unix_half_closed unix_peer_closed unix_dgram unix_seqpacket"
    ),
    *_kinds("unix_dgram_named descriptors_in_flight tcp6 tcp_half_closed tcp_peer_closed tcp_unbound udp udp6"),
    *_kinds("netlink packet_socket ping raw_socket", weight=0.5),
]
TERMINALS = [
    *_kinds("pty_pair pty_master_only"),
    *_kinds("pty_queued pty_slave_only"),
    *_kinds("dev_tty own_tty_again", terminal=True, weight=2),
]
STATES = [
    *_kinds("zombie threads pending_signals handlers itimer posix_timer", early=False, repeat=False),
    *_kinds("alternate_stack scheduling controls limits place seccomp capabilities", early=False, repeat=False),
    *_kinds("deleted_cwd daemon chroot shares_files sleeper", early=False, repeat=False),
    *_kinds("undumpable io_priority timer_slack", early=False, repeat=False, weight=0.3),
]
EXOTIC = [
    *_kinds("io_uring perf bpf userfault message_queue secret_memory", blocked=True),
    *_kinds("pid_namespace user_namespace time_namespace traced", blocked=True, early=False, repeat=False),
    *_kinds("pipe_packets vsock mptcp device memfd_program deleted_watch udp_corked", blocked=True),
    *_kinds("unix_unaccepted_data shares_place", blocked=True, early=False),
]
CATALOG: dict[str, Kind] = {kind.name: kind for kind in (*MEMORY, *FILES, *IPC, *SOCKETS, *TERMINALS, *STATES, *EXOTIC)}


@dataclass(frozen=True)
class Switch:
    """Kinds of state, and features of the tree, that wait for a change of the project; `on` once that is there.

    Features of the tree: terminal (a process that leads a pty of its own), foreground, typed, stop_TTIN, stop_TTOU."""

    on: bool
    names: str
    waits_for: str


SWITCHES = (
    Switch(True, "dev_tty", "open descriptors of /dev/tty"),
    Switch(True, "own_tty_again", "the foreground group, where a process has opened its terminal by name"),
    Switch(True, "stop_TTIN stop_TTOU", "jobs that the terminal stopped"),
    Switch(True, "terminal", "the controlling terminal of processes below a second terminal's first"),
    Switch(True, "inotify_files", "inotify on regular files"),
    Switch(True, "reservation", "reservations inherited by fork"),
    Switch(True, "deleted_sparse", "deleted files are judged by the space they take"),
    Switch(True, "ping", "ping sockets are not refused"),
    Switch(True, "perf bpf userfault message_queue secret_memory", "refusal of descriptors CRIU does not know"),
    Switch(True, "user_namespace time_namespace memfd_program", "refusal of namespaces and memfd programs"),
    Switch(True, "udp_corked pipe_packets", "refusal of datagrams and pipes CRIU cannot dump"),
    Switch(True, "deleted_watch", "refusal of watches on deleted files"),
    Switch(True, "unix_unaccepted_data", "refusal of unix connections that wait to be accepted, with data"),
    Switch(True, "shares_place", "refusal of processes that share a working directory (CLONE_FS)"),
    Switch(True, "write_lease", "a capture of files that does not break write leases"),
)


def left_out() -> set[str]:
    """Return the names of what waits for a change."""
    return {name for switch in SWITCHES if not switch.on for name in switch.names.split()}
