"""Plan how the chunks of a checkpoint are read: neighbours in a pack with one request. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cmdop_migrate.images.format.chunk_table import ChunkTable

SPAN = 2 << 20  # bytes of one request on demand
GROUP = 4  # spans in one request of `fill`
# Unneeded bytes worth reading to save a request, which costs 2.5 ms of CPU and a round trip. Several chunks long: where
# scattered changes left every other chunk of 20 packs unused, 64 KiB needed 595 requests, 512 KiB needs 22.
GAP = 512 << 10


@dataclass(frozen=True)
class Span:
    """Describe bytes start..end of a pack, kept at `base` in the file; `numbers` are its chunks."""

    pack: int
    start: int
    end: int
    base: int
    numbers: Sequence[int]


def plan(table: ChunkTable, elsewhere: Callable[[int], bool] | None = None) -> list[Span]:
    """Cut the needed chunks into spans. The same table always gives the same plan. `elsewhere`: chunks to leave out."""
    places = [
        (pack, offset, length, number)
        for number, (_, pack, offset, length, _) in enumerate(table.rows())
        if elsewhere is None or not elsewhere(number)
    ]
    places.sort()
    spans: list[Span] = []
    numbers: list[int] = []
    pack, start, end, base = -1, 0, 0, 0
    for at_pack, offset, length, number in places:
        if at_pack != pack or offset > end + GAP or offset + length - start > SPAN:
            if numbers:
                spans.append(Span(pack, start, end, base, array("I", numbers)))
                base += end - start
            pack, start, end, numbers = at_pack, offset, offset, []
        end = max(end, offset + length)
        numbers.append(number)
    if numbers:
        spans.append(Span(pack, start, end, base, array("I", numbers)))
    return spans


def neighbours(spans: Sequence[Span]) -> list[list[int]]:
    """Group positions in `spans` that lie in one pack and are read with one request."""
    groups: list[list[int]] = []
    for at, span in enumerate(spans):
        last = spans[groups[-1][-1]] if groups else None
        near = last is not None and last.pack == span.pack and span.start - last.end <= GAP
        if near and len(groups[-1]) < GROUP:
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups
