"""A lab as an object: `up` makes one, `Lab` finds it again by its name, from any process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cmdop_migrate.config import DEFAULT_STATE_DIR
from cmdop_migrate.holder import cgroup
from scripts.lablib import boot, furnish, place, services, wires
from scripts.lablib.model import SWITCH, LabSpec, LabTrouble, Owner

State = Literal["running", "cut", "paused", "dead"]
DEAD_WITHIN = 15.0


@dataclass(frozen=True)
class Lab:
    directory: Path
    spec: LabSpec

    @classmethod
    def find(cls, name: str) -> Lab:
        directory = place.labs_dir() / name
        return cls(directory, place.read(directory))

    # ---- one node

    def home(self, name: str) -> Path:
        return self.directory / "nodes" / self.spec.node(name).name

    def group(self, name: str) -> str:
        return f"{place.group_of(self.spec.name)}/{self.spec.node(name).name}"

    def pid(self, name: str) -> int:
        """Its first process, as the machine counts."""
        found = self._living(name)
        if found is None:
            raise LabTrouble(f"{name} is dead: scripts/lab --name {self.spec.name} start {name}")
        return found

    def _living(self, name: str) -> int | None:
        try:
            pid, start = map(int, (self.home(name) / "pid").read_text().split())
        except FileNotFoundError:
            return None
        return pid if place.is_alive(Owner(pid, start)) else None

    def state(self, name: str) -> State:
        if self._living(name) is None:
            return "dead"
        if _is_ordered_frozen(self.group(name)):
            return "paused"
        return "cut" if self._cut_mark(name).exists() else "running"

    def kill(self, name: str) -> None:
        """Sudden death: nothing of it gets to say a word, its disks stay as they are."""
        self._no_switch(name)
        pid = self._living(name)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            place.end_group(self.group(name), DEAD_WITHIN)  # and commands that came in from outside
        wires.unplug(self.pid(SWITCH), self.spec.node(name))

    def start(self, name: str, wait: bool = True) -> None:
        """Boots it, with the disks it has. Call it without other threads."""
        if self._living(name) is not None:
            raise LabTrouble(f"{name} runs already.")
        node, group = self.spec.node(name), self.group(name)
        place.end_group(group)
        cgroup.create(group)
        made = furnish.room if node.kind == "host" else services.room
        booting = boot.boot(made(self.directory, self.spec, node, group))
        owner = place.owner_of(booting.pid)
        (self.home(name) / "pid").write_text(f"{owner.pid} {owner.start}\n")
        if node.kind == "switch":
            wires.raise_bridge(booting.pid, node)
        else:
            wires.lay_cable(self.pid(SWITCH), node, booting.pid)
            if self._cut_mark(name).exists():
                wires.cut(self.pid(SWITCH), node)
        booting.go()
        if wait:
            self.wait(name)

    def wait(self, name: str) -> None:
        """Until it answers; one that is cut off cannot."""
        if self.state(name) == "running":
            with self.network():
                services.wait(self.directory, self.spec, self.spec.node(name))

    def pause(self, name: str) -> None:
        """Suspend a host: all its processes are frozen while time passes."""
        self._no_switch(name)
        self.pid(name)
        if not cgroup.freeze(self.group(name)):
            raise LabTrouble(f"{name} cannot be frozen.")

    def resume(self, name: str) -> None:
        self.pid(name)
        cgroup.thaw(self.group(name))

    def cut(self, name: str) -> None:
        """Cut the cable of a host in both directions, without a signal to either side."""
        self._no_switch(name)
        self.pid(name)
        wires.cut(self.pid(SWITCH), self.spec.node(name))
        self._cut_mark(name).touch()

    def heal(self, name: str) -> None:
        self._no_switch(name)
        self.pid(name)
        wires.heal(self.pid(SWITCH), self.spec.node(name))
        self._cut_mark(name).unlink(missing_ok=True)

    # ---- inside

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """`argv` as a command on that node's console: it works whether or not the node is cut off."""
        if self.state(name) == "paused":
            raise LabTrouble(f"{name} is paused: scripts/lab --name {self.spec.name} resume {name}")
        # Into the node's cgroup first: what is started here is paused and killed with the node.
        join = 'echo $$ > "$0" && exec "$@"'
        enter = ["nsenter", "-t", str(self.pid(name)), "-m", "-u", "-i", "-n", "-p", "-C", "--"]
        variables = {**boot.ENVIRON, "TERM": os.environ.get("TERM", "dumb")}
        env = ["env", "-i", *(f"{key}={value}" for key, value in variables.items())]
        return ["sh", "-c", join, f"{self.group(name)}/cgroup.procs", *enter, *env, *argv]

    def exec(self, name: str, *argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(name, argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """This thread is in the lab's network, at the switch: every address is reachable from there."""
        with wires.network_of(self.pid(SWITCH)):
            yield

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F` on the machine, with the lab's key and known hosts."""
        return self.directory / "ssh" / "config"

    # ---- all of it

    def down(self) -> None:
        place.remove(self.directory.parent, self.spec.name)

    def _no_switch(self, name: str) -> None:
        if self.spec.node(name).kind == "switch":
            raise LabTrouble("the switch is the lab itself: use down.")

    def _cut_mark(self, name: str) -> Path:
        return self.home(name) / "cut"


def up(spec: LabSpec) -> Lab:
    """A lab that stands and answers, or nothing. Call it without other threads."""
    _check_tools()
    top = place.labs_dir()
    os.makedirs(DEFAULT_STATE_DIR, mode=0o755, exist_ok=True)  # where hosts' own is mounted
    lab = Lab(place.claim(top, spec), spec)
    try:
        furnish.share(lab.directory, spec)
        for node in spec.nodes():
            lab.home(node.name).mkdir(mode=0o700)
            if node.kind == "host":
                furnish.host(lab.directory, spec, node)
            else:  # servers take longer to get ready: they do so while the hosts are furnished
                services.furnish(lab.directory, node)
                lab.start(node.name, wait=False)
        furnish.acquaint(lab.directory, spec)
        for node in spec.of_kind("host"):
            lab.start(node.name, wait=False)
        for node in spec.nodes():
            lab.wait(node.name)
        place.settle(lab.directory, spec)
    except BaseException:
        lab.down()
        raise
    return lab


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise LabTrouble("a lab needs root: sudo scripts/lab …")
    tools = (boot.INIT, "/usr/sbin/sshd")
    missing = [one for one in tools if not os.access(one, os.X_OK)]
    if missing:
        raise LabTrouble(f"not installed: {', '.join(missing)}. Run: scripts/setup --test")


def _is_ordered_frozen(group: str) -> bool:
    try:
        return Path(group, "cgroup.freeze").read_text().strip() == "1"
    except FileNotFoundError:
        return False
