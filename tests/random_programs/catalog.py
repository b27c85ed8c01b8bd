"""List every kind of state the generator may give to a process, with its weight and what the plan has to say to it.

`inside/` has the code that builds each kind, under the same name. A kind with `pending` is known not to work yet, for the
reason given: it is left out unless asked for, and the text names what has to change before the mark is removed.
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
    pending: str = ""


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
    *_kinds("file_lease", weight=0.5),
    *_kinds("inotify inotify_files"),
    *_kinds("inotify_queued", weight=0.5),
]
IPC = [
    *_kinds("pipe", weight=3),
    *_kinds("pipe_packets pipe_ended fifo fifo_deleted eventfd timerfd epoll pidfd system_v high_numbers"),
    *_kinds("signalfd", repeat=False),
    *_kinds("epoll_moved", weight=0.5),
]
SOCKETS = [
    *_kinds("unix_stream tcp", weight=2),
    *_kinds("unix_listener unix_listener_deleted unix_half_closed unix_peer_closed unix_dgram unix_seqpacket"),
    *_kinds("unix_dgram_named descriptors_in_flight tcp6 tcp_half_closed tcp_peer_closed tcp_unbound udp udp6"),
    *_kinds("netlink packet_socket ping raw_socket", weight=0.5),
    *_kinds("udp_queued", weight=0.3),
]
TERMINALS = [
    *_kinds("pty_pair pty_master_only"),
    *_kinds("pty_queued pty_slave_only"),
    *_kinds("dev_tty own_tty_again", terminal=True, weight=2),
]
STATES = [
    *_kinds("zombie threads pending_signals handlers itimer posix_timer", early=False, repeat=False),
    *_kinds("alternate_stack scheduling controls limits place seccomp capabilities persona", early=False, repeat=False),
    *_kinds("deleted_cwd daemon chroot shares_files shares_place sleeper", early=False, repeat=False),
    *_kinds("undumpable io_priority timer_slack", early=False, repeat=False, weight=0.3),
]
EXOTIC = [
    *_kinds("io_uring perf bpf userfault message_queue secret_memory", blocked=True),
    *_kinds("pid_namespace user_namespace time_namespace traced", blocked=True, early=False, repeat=False),
    *_kinds("vsock alg mptcp device memfd_program deleted_watch unix_unaccepted udp_corked", blocked=True),
]
CATALOG: dict[str, Kind] = {
    kind.name: kind for kind in (*MEMORY, *FILES, *IPC, *SOCKETS, *TERMINALS, *STATES, *EXOTIC)
}
# Not kinds of state a process holds, but features of the tree that can be pending all the same.
TREE: dict[str, str] = {"stop_TTIN": "", "stop_TTOU": "", "foreground": "", "terminal": "", "typed": ""}
