"""From nothing, or from what an earlier run left, to machines that run and have the project of this checkout."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.vmlib import base, house, inputs, machines, payload
from scripts.vmlib.model import CACHE, LOGS, PAYLOAD, RUN, VAGRANT, CannotHere, Fleet, VmTrouble
from scripts.vmlib.stages import Stages

BOXES = CACHE / "boxes"
BUILD_WITHIN = 1800.0
NEEDED = ("qemu-system-x86_64", "qemu-img", "virsh", "vagrant", "mmdebstrap", "dnsmasq", "tini-static", "cpio")
# The keys of what is saved: written when it is, gone before it changes.
BOOTED, READY = RUN / "booted.key", RUN / "ready.key"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One at a time; a second says so."""
    RUN.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VmTrouble("another scripts/test-vm is at it in this checkout.") from None
        yield


def prepare(fleet: Fleet, stages: Stages) -> None:
    """What is there and fits is used: provisioned machines, else booted ones, else boxes."""
    _check_tools()
    house.down()  # what a run that was killed left
    with stages.stage("wheels, CRIU"):
        gathered = base.gather()
    base_key = gathered.name.removeprefix("base-")
    boxes = {suite: BOXES / f"{suite}-{inputs.box(suite, base_key)}" for suite in fleet.suites}
    missing = {suite: box for suite, box in boxes.items() if not box.exists()}
    if missing:
        with stages.stage("boxes", f"built {', '.join(sorted(missing))}"):
            _build(missing, gathered)
    else:
        stages.reused("boxes", f"reused {', '.join(boxes)}")
    booted = inputs.booted(box.name for box in boxes.values())
    ready = inputs.ready(booted)
    if _read(BOOTED) != booted:
        _start_over(boxes)
    shutil.rmtree(LOGS, ignore_errors=True)
    with stages.stage("libvirtd"):
        house.up()
    if _read(READY) == ready:
        with stages.stage("machines", "put back, provisioned"):
            machines.put_back(fleet, "ready")
            machines.answer(fleet)
        return
    READY.unlink(missing_ok=True)
    with stages.stage("wheel of the project"):
        payload.make(fleet)
    again = _read(BOOTED) == booted
    if again:
        with stages.stage("machines", "put back, booted"):
            machines.put_back(fleet, "booted")
            machines.renew_addresses(fleet)
    else:
        with stages.stage("machines", "booted by Vagrant"):
            machines.boot(fleet, boxes)
            machines.save(fleet, "booted")
            BOOTED.write_text(booted)
    with stages.stage("provision"):
        machines.provision(fleet, rsync=again)
        machines.answer(fleet)
        machines.save(fleet, "ready")
        READY.write_text(ready)


def gather(fleet: Fleet) -> None:
    """The payload of machines whose boxes know nothing of us."""
    payload.make(fleet)
    shutil.copytree(base.gather(), PAYLOAD / "base", symlinks=True, dirs_exist_ok=True)


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise CannotHere("virtual machines in namespaces of their own need root")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if lacking:
        raise CannotHere(f"not installed: {', '.join(lacking)}")


def _build(missing: dict[str, Path], gathered: Path) -> None:
    for suite in missing:
        for old in BOXES.glob(f"{suite}-*"):
            shutil.rmtree(old)
    BOXES.mkdir(parents=True, exist_ok=True)

    def one(suite: str) -> None:
        argv = [str(VAGRANT / "build-box"), suite, str(gathered), str(missing[suite])]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_WITHIN, check=False
        )
        if done.returncode != 0:
            raise VmTrouble(f"{suite}: {done.stderr[-2000:]}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, missing))


def _start_over(boxes: dict[str, Path]) -> None:
    """Machines of other boxes, or half-made ones: nothing of them is of use."""
    shutil.rmtree(RUN, ignore_errors=True)
    (RUN / "boxes").mkdir(parents=True)
    for suite, box in boxes.items():
        (RUN / "boxes" / suite).symlink_to(box)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
