"""`plan` and `checkpoint` refuse what cannot be parked and restored, before the freeze, and nothing else.

One program of tests/plantings a row. A row that is refused is then parked with nothing checked, and that must fail; a
row that is not must come back with what it had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.plantings.__main__ import PLANTINGS
from tests.support.host import Host, a_host
from tests.support.planting import Planted, outside

# What each check has to refuse.
REFUSED = {
    "cgroup": "left_its_cgroup",
    "deleted_files": "large_deleted_file",
    "descriptors": "bpf_hash_map bpf_map bpf_program bpf_ringbuf_map epoll_closed_in_parent epoll_of_closed fs_context"
    " landlock_ruleset packet_pipe packet_pipe_empty path_descriptor_of_socket perf_event pidfd_of_thread"
    " seccomp_listener socket_with_bpf timerfd_alarm userfault",
    "devices": "open_device",
    "hidden_files": "detached_mount_open_file directory_hidden_by_mount file_hidden_by_mount mount_descriptor"
    " overmounted_open_file",
    "io_uring": "io_uring",
    "mappings": "huge_memfd huge_pages_reserved_not secret_memory",
    "message_queues": "message_queue message_queue_not_open",
    "mounts": "bpf_mount fuse_mount_of_dead_server hugetlbfs_mount named_network overlay_mount overlay_mount_over_root"
    " ramfs_mount",
    "namespaces": "cgroup_namespace ipc_namespace namespace_without_process time_namespace time_namespace_for_children"
    " user_namespace uts_namespace",
    "outside_sockets": "unix_to_outside unix_to_outside_unaccepted unix_datagram_to_outside unix_from_outside"
    " unix_from_outside_closed",
    "pid_namespace": "pid_namespace",
    "programs": "memfd_program memfd_program_closed",
    "scheduling": "deadline_policy",
    "shared_memory": "shared_memory_processes vfork_in_progress",
    "signals": "pending_trap pending_trap_of_thread",
    "sockets": "mptcp_socket vsock_socket",
    "thread_files": "proc_file_of_dead_thread proc_task_file_of_thread",
    "threads": "dead_leader_thread",
    "traced": "traced_and_stopped traced_by_parent",
    "waiting_sockets": "corked_udp corked_udp_empty netlink_socket_with_news unix_unaccepted_closed"
    " unix_unaccepted_with_data",
}
CHECKS = {planting: check for check, names in REFUSED.items() for planting in names.split()}
# Lost by a restore without a word of CRIU's. Of a mount the plan warns; the others cannot be seen from outside of the
# process, and docs/reference/limits.md has them.
LOST = {"tracefs_mount": "mounts", "aio_context_pending": "", "key_ring": ""}
OF_SESSION = ("mounts", "message_queues")  # no process has it
# Run each time; the others with --all.
DAILY = [
    "user_namespace",
    "time_namespace",
    "pid_namespace",
    "perf_event",
    "bpf_map",
    "userfault",
    "message_queue",
    "memfd_program_closed",
    "unix_unaccepted_with_data",
    "corked_udp",
    "open_device",
    "unix_to_outside",
    "unix_datagram_to_outside",
    "unix_from_outside",
    "unix_from_outside_closed",
    "own_sub_cgroup",
    "sparse_deleted_file",
    "ping_socket",
    "ping_socket_v6",
    "memfd_library",
    "unix_unaccepted",
    "unix_to_outside_closed",
    "net_namespace",
    "lease_on_file",  # `plan` opened the file: that breaks a lease, and ends the program
]


def rows(refused: bool) -> list[object]:
    """Return the plantings that are, or are not, refused."""
    names = [name for name in PLANTINGS if (name in CHECKS) == refused and name not in (*LOST, "device_node_of_host")]
    return [pytest.param(name, marks=() if name in DAILY else pytest.mark.heavy) for name in names]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with a_host(tmp_path_factory.mktemp("truth")) as one:
        yield one


@pytest.fixture
def options(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    """Options of `run`: for plantings that lead out of the session, a directory with something to lead to."""
    if "outside" not in request.node.name:
        yield ()
        return
    with outside() as directory:
        yield ("--share", str(directory), "--env", f"SHARED={directory}")


def test_every_planting_of_the_table_exists() -> None:
    assert {*CHECKS, *DAILY, *LOST} <= set(PLANTINGS)


@pytest.mark.parametrize("planting", rows(refused=True))
def test_unrestorable_state_is_refused_before_the_freeze(here: Host, planting: str, options: tuple[str, ...]) -> None:
    with Planted(here, planting, options) as planted:
        processes = here.pids(planted.session)
        found = planted.blockers()
        assert {check for check, _ in found} == {CHECKS[planting]}, found
        done = here.cm("--json", "checkpoint", planted.name)
        assert done.returncode == 4, done
        error = json.loads(done.stdout)["error"]
        assert error["code"] == "blocked" and error["message"] in [message for _, message in found] and error["hint"], (
            error
        )
        named = re.search(r"(\S+) \(pid (\d+)\) in session", error["message"])
        if named is None:
            assert CHECKS[planting] in OF_SESSION, error
        else:
            assert int(named[2]) in here.pids(planted.session) or planting == "left_its_cgroup", error
        assert not planted.was_frozen(), "it was frozen"
        assert here.pids(planted.session) == processes, "a process has ended"
        assert planted.force(), "it can be parked and restored: nothing is to be refused"
        if here.pids(planted.session):
            assert planted.still_works() == "ok"


@pytest.mark.parametrize("planting", rows(refused=False))
def test_state_that_is_not_refused_is_restored(here: Host, planting: str, options: tuple[str, ...]) -> None:
    with Planted(here, planting, options) as planted:
        assert planted.blockers() == []
        assert planted.park()["proved"]
        planted.back()
        assert planted.still_works() == "ok"


@pytest.mark.parametrize(
    ("planting", "refused"),
    [("unix_to_outside", True), ("unix_datagram_to_outside", False), ("unix_from_outside_closed", False)],
)
def test_on_the_hosts_network_a_closed_connection_and_a_named_service_are_no_obstacle(
    here: Host, planting: str, refused: bool, options: tuple[str, ...]
) -> None:
    """Check a session on the host's network, where CRIU sees the sockets of the host's processes."""
    with Planted(here, planting, (*options, "--net", "host")) as planted:
        assert [check for check, _ in planted.blockers()] == ["outside_sockets"] * refused
        if refused:
            assert planted.force()
            return
        proved = planted.park()["proved"]
        assert proved == (planting != "unix_datagram_to_outside"), "a trial cannot reach the service"
        planted.back()
        assert planted.still_works() == "ok"


@pytest.mark.heavy
@pytest.mark.parametrize("planting", sorted(LOST))
def test_state_that_a_restore_loses_is_warned_about(here: Host, planting: str) -> None:
    with Planted(here, planting) as planted:
        warned = {one["check"] for one in planted.plan()["findings"] if one["level"] == "warn"}
        assert warned == {LOST[planting]} - {""}
        planted.park()
        planted.back()
        assert planted.still_works() != "ok"


def test_device_nodes_are_parked_with_a_warning_and_restored_when_allowed(here: Host) -> None:
    with Planted(here, "device_node_of_host") as planted:
        (found,) = [one for one in planted.plan()["findings"] if one["check"] == "device_nodes"]
        assert found["level"] == "warn" and "--allow-devices" in found["message"], found
        done = here.cm("checkpoint", planted.name)
        assert done.returncode == 0 and b"--allow-devices" in done.stderr and b"/root/device" in done.stderr, done
        done = here.cm("restore", planted.name)
        assert done.returncode == 7 and b"--allow-devices" in done.stderr, done
        planted.back("--allow-devices")
        assert planted.still_works() == "ok"
