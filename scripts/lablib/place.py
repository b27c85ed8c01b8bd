"""Where labs are kept: a directory each, and a cgroup each that holds every process of it.

LABS/lock              held while a lab is made known or swept away
LABS/NAME/lab.json     what it consists of, and whose it is
LABS/NAME/keys, ssh/   the key that seals images; the lab's own SSH key, known hosts and client settings
LABS/NAME/nodes/NODE/  pid, log and disks of one node

No namespace, mount or interface is ever named outside a lab's own processes: when they are gone, so is all of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cmdop_migrate.config import DEFAULT_STATE_DIR
from cmdop_migrate.holder import cgroup
from cmdop_migrate.session import host_mounts
from scripts.lablib.model import LabSpec, LabTrouble, Owner

# Below the state directory: on a host of the lab its own is mounted there, so that it does not see the others'.
PLACES = (f"{DEFAULT_STATE_DIR}/labs", "/dev/shm/cmdop-labs")
GROUP = "cmdop-lab"


def labs_dir() -> Path:
    """Not on an overlay: sessions' changes could not be kept there."""
    for place in PLACES:
        if host_mounts.mount_of(os.path.realpath(place)).kind not in host_mounts.NOT_UPPER:
            return Path(place)
    raise LabTrouble(f"no room for labs: {' and '.join(PLACES)} lie on file systems that cannot hold sessions.")


def group_of(lab: str) -> str:
    mount = cgroup.mount_point()
    if mount is None:
        raise LabTrouble("no cgroup v2 on this machine: mount it, for example on /sys/fs/cgroup.")
    return f"{mount}/{GROUP}/{lab}"


def this_process() -> Owner:
    return owner_of(os.getpid())


def owner_of(pid: int) -> Owner:
    start = started_at(pid)
    if start is None:
        raise LabTrouble(f"no process {pid} to own the lab.")
    return Owner(pid, start)


def started_at(pid: int) -> int | None:
    """In ticks since boot; None when there is no such process, or it is dead and not yet waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(owner: Owner) -> bool:
    return started_at(owner.pid) == owner.start


@contextlib.contextmanager
def locked(top: Path) -> Iterator[None]:
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(top / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def claim(top: Path, spec: LabSpec) -> Path:
    """The new lab's directory, owned by this process until `settle`; should it be killed, the next `up` removes it."""
    sweep(top)
    with locked(top):
        directory = top / spec.name
        if directory.exists():
            raise LabTrouble(
                f"there is a lab {spec.name} already: scripts/lab --name {spec.name} down, or another name."
            )
        fresh = top / f".{spec.name}"
        shutil.rmtree(fresh, ignore_errors=True)
        (fresh / "nodes").mkdir(parents=True, mode=0o700)
        _write(fresh, replace(spec, owner=this_process()))
        fresh.rename(directory)
    return directory


def settle(directory: Path, spec: LabSpec) -> None:
    """Record that the lab is up: it now lives as long as its owner; without an owner, until `down`."""
    _write(directory, spec)


def _write(directory: Path, spec: LabSpec) -> None:
    fresh = directory / "lab.json.new"
    fresh.write_text(json.dumps(spec.to_json()) + "\n")
    fresh.replace(directory / "lab.json")


def read(directory: Path) -> LabSpec:
    try:
        return LabSpec.from_json(json.loads((directory / "lab.json").read_text()))
    except FileNotFoundError:
        raise LabTrouble(f"no lab {directory.name}: scripts/lab --name {directory.name} up 3") from None


def names(top: Path) -> list[str]:
    return sorted(one.parent.name for one in top.glob("[a-z0-9]*/lab.json"))


def sweep(top: Path) -> list[str]:
    """Removes the labs whose owners are dead -> their names."""
    swept = []
    for name in names(top):
        with contextlib.suppress(LabTrouble):  # another sweep was quicker
            owner = read(top / name).owner
            if owner is not None and not is_alive(owner):
                remove(top, name)
                swept.append(name)
    return swept


def remove(top: Path, name: str, within: float = 20.0) -> None:
    """End every process of the lab; its namespaces, mounts and cables end with them. A lab that does not exist is no
    error."""
    with locked(top):
        end_group(group_of(name), within)
        if (top / name).exists():
            shutil.rmtree(top / name)
        with contextlib.suppress(OSError):  # the last lab closes the door
            os.rmdir(os.path.dirname(group_of(name)))


def end_group(group: str, within: float = 20.0) -> None:
    """SIGKILL to everything in it, frozen or not, and removes it with all groups below."""
    until = time.monotonic() + within
    while os.path.isdir(group):
        for below, _, _ in os.walk(group):  # one by one: before Linux 5.14 a group is not killed with those below it
            cgroup.kill(below)
        if not cgroup.is_populated(group):
            for below, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(below)
        if time.monotonic() > until:
            raise LabTrouble(f"processes of {group} do not end: {cgroup.pids(group)}")
        time.sleep(0.01)
