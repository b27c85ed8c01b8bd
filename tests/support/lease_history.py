"""Check whether a session ever had more than one lease holder, from what the holders wrote down about themselves.

Each worker records what it believes: that it may run a session under a token until some moment, that it stopped, that a
write of its own was accepted. All moments are of one CLOCK_BOOTTIME (one machine), so the beliefs of different workers
can be compared; `drift` widens each validity as far as clocks within the bound could.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path


@dataclass(frozen=True)
class Event:
    """Record one event. `what`:

    held      an acquire begun at `began` was granted; valid from `at` (when the answer came) until `until`
    renewed   a renewal begun at `began` was granted; the validity extends to `until`
    stopped   the holder froze at `at` by itself, before the next release or park
    wrote     a write under the token (commit, park, release) was accepted, at some time between `began` and `at`
    """

    what: str
    worker: str
    session: str
    token: int
    at: float
    began: float
    until: float = 0.0


@dataclass(frozen=True)
class Claim:
    """Describe one incarnation: requested at `asked`, and believed to be allowed to run from `start` to `end`.
    `counted`: how long its clock ran for that end, since the renewal that gave it; zero if it stopped by itself. `end`
    before `start`: the answer came too late to be used."""

    worker: str
    session: str
    token: int
    asked: float
    start: float
    end: float
    counted: float


def read_events(files: Iterable[Path]) -> list[Event]:
    """Read the events; ignore a last line that a killed worker left half-written."""
    found = []
    for file in files:
        for line in file.read_bytes().split(b"\n")[:-1]:
            found.append(Event(**json.loads(line)))
    return found


def line(event: Event) -> bytes:
    return json.dumps(asdict(event)).encode() + b"\n"


def claims(events: Iterable[Event]) -> list[Claim]:
    """Return what each worker believed, at the longest: a validity runs to its end unless the worker noted that it stopped."""
    starts: dict[tuple[str, str, int], tuple[float, float]] = {}
    ends: dict[tuple[str, str, int], tuple[float, float]] = {}
    for event in sorted(events, key=lambda one: one.at):
        key = (event.worker, event.session, event.token)
        if event.what in ("held", "renewed"):
            starts.setdefault(key, (event.began, event.at))
            ends[key] = max(ends.get(key, (0.0, 0.0)), (event.until, event.until - event.began))
        elif event.what == "stopped" and key in ends and event.at < ends[key][0]:
            ends[key] = event.at, 0.0
    return [Claim(*key, *starts[key], *ends[key]) for key in starts]


def violations(events: Iterable[Event], drift: float = 0.0) -> list[str]:
    """Return every violation; an empty list if the history is right. `drift`: the bound on clock rates. A holder's
    clock that much slower ends a validity later, a contender's that much faster ends the waiting for it earlier."""
    events = list(events)
    by_session: dict[str, list[Claim]] = defaultdict(list)
    for one in claims(events):
        by_session[one.session].append(one)
    found: list[str] = []
    for session, some in by_session.items():
        some.sort(key=lambda claim: claim.start)
        found += _overlaps(session, some, drift)
        found += _tokens(session, some)
    found += _late_writes(events, by_session)
    return found


def _overlaps(session: str, some: list[Claim], drift: float) -> Iterator[str]:
    some = [one for one in some if one.start < one.end]
    for at, one in enumerate(some):
        end = one.end + 2 * drift / (1 - drift) * one.counted
        for other in some[at + 1 :]:
            if other.start >= end:
                break
            if (other.worker, other.token) != (one.worker, one.token):
                yield (
                    f"{session}: {one.worker} (token {one.token}) until {end:.6f} and "
                    f"{other.worker} (token {other.token}) from {other.start:.6f}"
                )


def _tokens(session: str, some: list[Claim]) -> Iterator[str]:
    """Check that a token asked for after another was answered is higher, and that no two are the same."""
    for one, other in combinations(some, 2):
        if other.token == one.token or (other.token < one.token and other.asked >= one.start):
            yield f"{session}: token {other.token} ({other.worker}) after token {one.token} ({one.worker})"


def _late_writes(events: list[Event], by_session: dict[str, list[Claim]]) -> Iterator[str]:
    """Find writes that were accepted although they began after a higher token had been answered."""
    for event in events:
        if event.what not in ("wrote", "renewed"):
            continue
        for other in by_session[event.session]:
            if other.token > event.token and other.start < event.began:
                yield (
                    f"{event.session}: a write of {event.worker} under token {event.token} begun at {event.began:.6f} "
                    f"was accepted, after token {other.token} was given to {other.worker} at {other.start:.6f}"
                )
