"""Check requests as a table: the message has the options of the spec, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from cmdop_migrate.criu.request import DumpSpec, RestoreSpec, SharedMount, dump, restore, wire
from cmdop_migrate.criu.rpc import ReqType, decode

COMMON = {
    "images_dir_fd": 3,
    "root": "/r",
    "log_level": 4,
    "notify_scripts": True,
    "orphan_pts_master": True,
    "shell_job": False,
    "tcp_established": True,
    "ext_unix_sk": True,
    "file_locks": True,
    "link_remap": True,
    "evasive_devices": True,
    "force_irmap": True,
    "manage_cgroups_mode": 0,
    "network_lock": 3,
}
DUMP = COMMON | {
    "pid": 42,
    "log_file": "dump.log",
    "leave_running": False,
    "ghost_limit": 256 << 20,
    "timeout": 10,
    "tcp_skip_in_flight": True,
}
RESTORE = COMMON | {"log_file": "restore.log", "rst_sibling": True, "lazy_pages": False, "weak_sysctls": True}
SHARE = (SharedMount("share0", "/data", "/mnt/disk/data"),)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {}),
        ({"leave_running": True}, {"leave_running": True}),
        ({"freeze_cgroup": "/c"}, {"freeze_cgroup": "/c"}),
        ({"pages_fd": 9}, {"ps": {"fd": 9}}),
        ({"shared": SHARE, "external": ("net[1]:x",)}, {"external": ["mnt[/data]:share0", "net[1]:x"]}),
        ({"ghost_limit": 1, "freeze_seconds": 0, "log_level": 2}, {"ghost_limit": 1, "timeout": 0, "log_level": 2}),
        ({"work_dir_fd": 0, "log_file": "x"}, {"work_dir_fd": 0, "log_file": "x"}),
    ],
)
def test_dump(more: dict[str, Any], expected: dict[str, Any]) -> None:
    request = dump(DumpSpec(pid=42, images_dir_fd=3, root="/r", **more))
    assert request == {"type": ReqType.DUMP, "opts": DUMP | expected}
    assert decode("req", wire(request)) == request


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {}),
        ({"lazy_pages": True, "sibling": False}, {"lazy_pages": True, "rst_sibling": False}),
        ({"veths": (("eth0", "cm-1"),)}, {"external": ["veth[eth0]:cm-1"]}),
        (
            {"shared": SHARE, "veths": (("eth0", "v"),), "external": ("e",)},
            {"external": ["mnt[share0]:/mnt/disk/data", "veth[eth0]:v", "e"]},
        ),
        ({"inherit_fds": (("pipe:[1]", 5),)}, {"inherit_fd": [{"key": "pipe:[1]", "fd": 5}]}),
        ({"join_ns": (("net", "/n"),)}, {"join_ns": [{"ns": "net", "ns_file": "/n"}]}),
    ],
)
def test_restore(more: dict[str, Any], expected: dict[str, Any]) -> None:
    request = restore(RestoreSpec(images_dir_fd=3, root="/r", **more))
    assert request == {"type": ReqType.RESTORE, "opts": RESTORE | expected}
    assert decode("req", wire(request)) == request
