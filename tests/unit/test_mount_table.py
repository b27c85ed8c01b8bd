"""Check on which mount a path lies, and which mounts a restore cannot create."""

from __future__ import annotations

import pytest

from cmdop_migrate.preflight.facts import mount_table

TABLE = """\
1 0 0:30 / / rw - overlay overlay rw
2 1 0:31 / /proc rw - proc proc rw
3 1 0:32 / /mnt rw - tmpfs none rw
4 3 0:33 / /mnt/a\\040b rw - ramfs none rw
5 3 0:34 / /mnt rw - tmpfs none rw
6 1 0:35 / /sys/kernel/tracing rw - tracefs none rw
7 1 0:30 /etc /bound rw - overlay overlay rw
8 1 0:36 / /own rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [("/", 1), ("/etc/x", 1), ("/proc/self", 2), ("/process", 1), ("/mnt/x", 5), ("/mnt/a b/x", 5), ("/bound/x", 7)],
)
def test_path_resolves_to_the_last_mount_over_it(path: str, mount: int) -> None:
    found = mount_table.parse(TABLE).at(path)
    assert found is not None and found.id == mount


def test_mounts_that_a_restore_cannot_create_or_omits() -> None:
    cannot, lost = mount_table.unknown([mount_table.parse(TABLE)], ["/"])
    assert cannot == {"ramfs at /mnt/a b", "overlay at /own"}
    assert lost == {"tracefs at /sys/kernel/tracing"}


def test_mount_table_of_an_ended_process_is_empty() -> None:
    assert mount_table.read(0).mounts == {}
