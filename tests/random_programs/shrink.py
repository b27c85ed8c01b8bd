"""Reduce a spec that fails to the least that fails in the same way, by leaving out one part after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tests.random_programs.generator import Process, Spec
from tests.random_programs.rounds import Defect, run
from tests.support.host import Host


def shrink(host: Host, spec: Spec, defect: Defect) -> Spec:
    """Try every smaller spec until none fails with a defect of the same kind. Each try is a whole run."""
    tries = 0
    progress = True
    while progress:
        progress = False
        for smaller in candidates(spec):
            tries += 1
            try:
                run(host, smaller, f"s{tries}")
            except Defect as found:
                if found.kind == defect.kind:
                    print(f"  try {tries}: still {found.kind}, {size(smaller)} parts: {str(found)[:150]!r}", flush=True)
                    spec, progress = smaller, True
                    break
    return spec


def size(spec: Spec) -> int:
    return len(spec.processes) + sum(len(one.features) for one in spec.processes)


def candidates(spec: Spec) -> Iterator[Spec]:
    """Yield specs with one part less, those that leave out most first."""
    if spec.rounds > 1:
        yield dataclasses.replace(spec, rounds=1)
    if len(spec.processes) > 1 or spec.processes[0].features:
        every = spec.processes
        for half in (0, 1):  # half of all features
            yield _with(spec, [_features(one, one.features[half::2]) for one in every])
    trees = sorted((_family(spec, one.number) for one in spec.processes[1:]), key=len, reverse=True)
    for family in trees:
        yield without(spec, family)
    for at, one in enumerate(spec.processes):
        for index in range(len(one.features)):
            kept = one.features[:index] + one.features[index + 1 :]
            yield _with(spec, [*spec.processes[:at], _features(one, kept), *spec.processes[at + 1 :]])
        if one.stop or one.foreground is not None:
            plain = dataclasses.replace(one, stop=None, foreground=None)
            yield _with(spec, [*spec.processes[:at], plain, *spec.processes[at + 1 :]])
    if spec.typed:
        yield dataclasses.replace(spec, typed=False)


def _with(spec: Spec, processes: list[Process]) -> Spec:
    return dataclasses.replace(spec, processes=tuple(processes))


def _features(process: Process, features: tuple[object, ...]) -> Process:
    return dataclasses.replace(process, features=features)


def _family(spec: Spec, number: int) -> set[int]:
    """Return a process and all that descend from it: parents have smaller numbers."""
    found = {number}
    for one in spec.processes:
        if one.parent in found:
            found.add(one.number)
    return found


def without(spec: Spec, numbers: set[int]) -> Spec:
    """Leave out processes, and number the others anew."""
    kept = [one for one in spec.processes if one.number not in numbers]
    new = {one.number: at for at, one in enumerate(kept)}
    return _with(
        spec,
        [
            dataclasses.replace(
                one,
                number=new[one.number],
                parent=None if one.parent is None else new[one.parent],
                foreground=new.get(one.foreground) if one.foreground is not None else None,
            )
            for one in kept
        ],
    )
