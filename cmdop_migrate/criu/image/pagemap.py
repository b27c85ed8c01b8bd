"""Write and read the pagemap and pages images of memory that our page server received.

In a lazy restore, runs that CRIU marked LAZY are announced only, and our pager supplies them (criu/lazy/); the few
other runs and all shared memory are in pages-N.img. In an eager restore everything is in pages-N.img, for hosts
without userfaultfd.

The records of a pagemap are one head (1 = number of the pages file), then entries in rising order (1 = address,
2 = pages as u32 for old readers, 4 = flags, 5 = pages as u64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cmdop_migrate.criu.page_server import LAZY, PAGE, PARENT, PRESENT, PageSource, Target, read
from cmdop_migrate.criu.protobuf import HEAD, Malformed, number_field, numbers, record, records

_COMMON, _PAGEMAP = 0x54564319, 0x56084025
_MAGIC = struct.pack("<II", _COMMON, _PAGEMAP)
# CRIU counts the bytes of an entry in an int: joined runs must stay far below 2 GiB.
LONGEST = (64 << 20) // PAGE
_STEP = (1 << 20) // PAGE


@dataclass(frozen=True)
class Run:
    """Represent consecutive pages with the same flags."""

    vaddr: int
    nr_pages: int
    flags: int

    @property
    def end(self) -> int:
        return self.vaddr + self.nr_pages * PAGE


def image_name(target: Target) -> str:
    return f"pagemap-{target.id}.img" if target.kind == "process" else f"pagemap-shmem-{target.id}.img"


def joined(runs: Iterable[Run], longest: int = LONGEST) -> Iterator[Run]:
    """Join adjacent runs with the same flags and yield them, none longer than `longest` pages. Raise ValueError for
    runs that overlap or are out of order, and for runs in a parent image: our images have no parent."""
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
    """Write one target's two images and return the number of pages in pages-N.img. The pages are streamed."""
    eager = 0
    with _create(images / image_name(target)) as entries, _create(images / f"pages-{pages_id}.img") as pages:
        entries.write(_MAGIC + record(number_field(1, pages_id)))
        for run in joined(runs):
            later = lazy and target.kind == "process" and bool(run.flags & LAZY)
            entries.write(record(_entry(run, LAZY if later else PRESENT)))
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
    """Return the number of the pages file, and the runs. Raise Malformed."""
    data = path.read_bytes()
    if data[:HEAD] != _MAGIC:
        raise Malformed(f"{path.name} is not a pagemap")
    entries = [numbers(encoded) for encoded in records(data)]
    if not entries:
        raise Malformed(f"{path.name} is cut short")
    return entries[0][1], [Run(r[1], r.get(5, r.get(2, 0)), r.get(4, PRESENT)) for r in entries[1:]]


def _entry(run: Run, flags: int) -> bytes:
    short = run.nr_pages & 0xFFFFFFFF
    return number_field(1, run.vaddr) + number_field(2, short) + number_field(4, flags) + number_field(5, run.nr_pages)


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
