"""Generate a session from a seed: a tree of processes, what each holds, and in which state it is when it is parked.

The result is a plain value: it can be printed, written as JSON for the worker (`inside/`), and reduced part by part.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tests.random_programs.catalog import CATALOG, Kind

BY_TERMINAL = ("TTIN", "TTOU")
EXOTIC_SHARE = 0.12


@dataclass(frozen=True)
class Feature:
    name: str
    seed: int
    early: bool

    def __str__(self) -> str:
        return f"{'early ' if self.early else ''}{self.name}({self.seed})"


@dataclass(frozen=True)
class Process:
    """One process. `kind`: root, fork (in its parent's group), group, session, or terminal (leads a new pty)."""

    number: int
    parent: int | None
    kind: str
    features: tuple[Feature, ...] = ()
    stop: str | None = None
    foreground: int | None = None  # of the terminal this one leads: the process whose group has it


@dataclass(frozen=True)
class Spec:
    seed: int
    processes: tuple[Process, ...]
    typed: bool = False  # a line was typed that no process has read
    rounds: int = 1

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def blockers(self) -> list[str]:
        names = [feature.name for process in self.processes for feature in process.features]
        return [name for name in names if CATALOG[name].blocked]

    def terminal_of(self, number: int) -> int | None:
        """Return the process that leads the controlling terminal of process `number`; None: it has none."""
        process = self.processes[number]
        while process.kind not in ("root", "terminal"):
            if process.kind == "session" or process.parent is None:
                return None
            process = self.processes[process.parent]
        return process.number

    def group_of(self, number: int) -> int:
        """Return the leader of the process group of process `number`."""
        process = self.processes[number]
        while process.kind == "fork":
            assert process.parent is not None
            process = self.processes[process.parent]
        return process.number

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {len(self.processes)} processes, rounds {self.rounds}, typed {self.typed}"]
        for one in self.processes:
            state = "".join(f" {name}={value}" for name, value in (("stop", one.stop), ("fg", one.foreground)) if value)
            holds = ", ".join(map(str, one.features))
            lines.append(f"  {one.number} {one.kind} of {one.parent}{state}: {holds}")
        return "\n".join(lines)


def generate(seed: int, size: int = 30, without: Collection[str] = ()) -> Spec:
    """Make the spec of a seed with `size` processes. What is in `without` is left out of it; the rest stays the same."""
    rng = random.Random(seed)
    kinds = [kind for kind in CATALOG.values() if not kind.blocked]
    processes = [Process(0, None, "root")]
    for number in range(1, size):
        kind = rng.choices(("fork", "group", "session", "terminal"), (4, 4, 1, 1))[0]
        processes.append(Process(number, rng.randrange(max(0, number - 8), number), kind))
    spec = Spec(seed, tuple(processes))
    filled = [dataclasses.replace(one, features=tuple(_features(rng, spec, one.number, kinds))) for one in processes]
    if rng.random() < EXOTIC_SHARE:
        at = rng.randrange(len(filled))
        name = rng.choice([kind.name for kind in CATALOG.values() if kind.blocked])
        more = Feature(name, rng.randrange(1 << 20), False)
        filled[at] = dataclasses.replace(filled[at], features=(*filled[at].features, more))
    spec = dataclasses.replace(spec, processes=tuple(filled))
    spec = _stopped(rng, _in_foreground(rng, spec))
    spec = dataclasses.replace(spec, typed=rng.random() < 0.3, rounds=2 if rng.random() < 0.15 else 1)
    return leave_out(spec, without)


def leave_out(spec: Spec, names: Collection[str]) -> Spec:
    """Return the spec without these kinds of state and features of the tree."""
    kept = []
    for one in spec.processes:
        features = tuple(feature for feature in one.features if feature.name not in names)
        kind = "group" if one.kind in names else one.kind
        stop = "STOP" if f"stop_{one.stop}" in names else one.stop
        foreground = None if "foreground" in names or kind != one.kind else one.foreground
        kept.append(dataclasses.replace(one, features=features, kind=kind, stop=stop, foreground=foreground))
    return dataclasses.replace(spec, processes=tuple(kept), typed=spec.typed and "typed" not in names)


def _features(rng: random.Random, spec: Spec, number: int, kinds: list[Kind]) -> Iterator[Feature]:
    usable = [one for one in kinds if not one.terminal or spec.terminal_of(number) is not None]
    taken: set[str] = set()
    for _ in range(rng.choice([0, 1, 2, 3, 3, 4, 6])):
        kind = rng.choices(usable, [one.weight for one in usable])[0]
        if kind.repeat or kind.name not in taken:
            taken.add(kind.name)
            yield Feature(kind.name, rng.randrange(1 << 20), kind.early and rng.random() < 0.4)


def _in_foreground(rng: random.Random, spec: Spec) -> Spec:
    """Give some terminals to a group other than their leader's."""
    processes = list(spec.processes)
    for leader in spec.processes:
        groups = [
            one.number
            for one in spec.processes
            if one.kind == "group" and spec.terminal_of(one.number) == leader.number
        ]
        if leader.kind in ("root", "terminal") and groups and rng.random() < 0.5:
            processes[leader.number] = dataclasses.replace(leader, foreground=rng.choice(groups))
    return dataclasses.replace(spec, processes=tuple(processes))


def _stopped(rng: random.Random, spec: Spec) -> Spec:
    """Stop some processes. What stops by the terminal is a group of its own, in the background."""
    in_front = {one.foreground for one in spec.processes}
    processes = list(spec.processes)
    for one in spec.processes:
        if rng.random() >= 0.2:
            continue
        possible = ["STOP"]
        if one.kind == "group" and spec.terminal_of(one.number) is not None:
            possible.append("TSTP")
            if one.number not in in_front:
                possible += BY_TERMINAL
        processes[one.number] = dataclasses.replace(one, stop=rng.choice(possible))
    return dataclasses.replace(spec, processes=tuple(processes))
