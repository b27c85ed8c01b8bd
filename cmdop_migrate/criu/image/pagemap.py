"""The pagemap and pages images, which are ours to write when we were the page server.

Lazy: runs that CRIU marked LAZY are only announced, and `criu lazy-pages` asks
for them; the few others (and all shared memory) stand in pages-N.img. Eager:
everything stands in pages-N.img, for machines without userfaultfd.

An image is two magic numbers, then records, each a u32 length and a protobuf
message: one head (1 = number of the pages file), then entries in rising order
(1 = address, 2 = pages as u32 for old readers, 4 = flags, 5 = pages as u64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cmdop_migrate.criu.page_server import LAZY, PAGE, PARENT, PRESENT, PageSource, Target, read
from cmdop_migrate.criu.rpc import Malformed, read_varint, varint

_COMMON, _PAGEMAP = 0x54564319, 0x56084025
# The daemon keeps one buffer as long as the longest entry, in an int: joined runs must stay far below 2 GiB.
LONGEST = (64 << 20) // PAGE
_STEP = (1 << 20) // PAGE


@dataclass(frozen=True)
class Run:
    """Consecutive pages with the same flags."""

    vaddr: int
    nr_pages: int
    flags: int

    @property
    def end(self) -> int:
        return self.vaddr + self.nr_pages * PAGE


def image_name(target: Target) -> str:
    return f"pagemap-{target.id}.img" if target.kind == "process" else f"pagemap-shmem-{target.id}.img"


def joined(runs: Iterable[Run], longest: int = LONGEST) -> Iterator[Run]:
    """The same pages in as few runs as may be, none above `longest` pages. Refuses runs that overlap or go back, and
    runs that lie in a parent image: there is none."""
    last: Run | None = None
    reached = 0
    for run in runs:
        if run.vaddr < reached or run.nr_pages <= 0 or run.vaddr % PAGE:
            raise ValueError(f"run out of order at {run.vaddr:#x}")
        if run.flags & PARENT or not run.flags & (PRESENT | LAZY):
            raise ValueError(f"run without pages at {run.vaddr:#x} (flags {run.flags})")
        reached = run.end
        if last is not None and last.end == run.vaddr and last.flags == run.flags:
            run = Run(last.vaddr, last.nr_pages + run.nr_pages, run.flags)
        elif last is not None:
            yield last
        while run.nr_pages > longest:
            yield Run(run.vaddr, longest, run.flags)
            run = Run(run.vaddr + longest * PAGE, run.nr_pages - longest, run.flags)
        last = run
    if last is not None:
        yield last


def write(images: Path, target: Target, pages_id: int, runs: Iterable[Run], source: PageSource, *, lazy: bool) -> int:
    """Write one target's two images; -> pages laid out. The pages are streamed, never held."""
    eager = 0
    with _create(images / image_name(target)) as entries, _create(images / f"pages-{pages_id}.img") as pages:
        entries.write(struct.pack("<II", _COMMON, _PAGEMAP) + _record(b"\x08" + varint(pages_id)))
        for run in joined(runs):
            later = lazy and target.kind == "process" and bool(run.flags & LAZY)
            entries.write(_record(_entry(run, LAZY if later else PRESENT)))
            if later:
                continue
            eager += run.nr_pages
            at = run.vaddr
            while at < run.end:
                for buffer in read(source, target, at, min(_STEP, (run.end - at) // PAGE)):
                    pages.write(buffer)
                    at += len(buffer)
    return eager


def load(path: Path) -> tuple[int, list[Run]]:
    """-> (number of the pages file, runs). Raises Malformed."""
    data = path.read_bytes()
    if data[:8] != struct.pack("<II", _COMMON, _PAGEMAP):
        raise Malformed(f"{path.name} is not a pagemap")
    records, at = [], 8
    while at < len(data):
        if at + 4 > len(data):
            raise Malformed(f"{path.name} is cut short")
        (size,) = struct.unpack_from("<I", data, at)
        records.append(_numbers(data[at + 4 : at + 4 + size]))
        at += 4 + size
    if at != len(data) or not records:
        raise Malformed(f"{path.name} is cut short")
    return records[0][1], [Run(r[1], r.get(5, r.get(2, 0)), r.get(4, PRESENT)) for r in records[1:]]


def _entry(run: Run, flags: int) -> bytes:
    short = run.nr_pages & 0xFFFFFFFF
    return b"".join(
        (b"\x08", varint(run.vaddr), b"\x10", varint(short), b"\x20", varint(flags), b"\x28", varint(run.nr_pages))
    )


def _record(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def _numbers(message: bytes) -> dict[int, int]:
    """A message that holds varints only."""
    result, at = {}, 0
    while at < len(message):
        tag, at = read_varint(message, at)
        if tag & 7:
            raise Malformed(f"wire type {tag & 7} in a pagemap")
        result[tag >> 3], at = read_varint(message, at)
    return result


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
