"""Between CRIU's page server protocol and images: two small adapters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from cmdop_migrate.criu import pagemap
from cmdop_migrate.criu.pages import PRESENT, Buffer, Target
from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.pages import PageReader
from cmdop_migrate.images.reader import Image
from cmdop_migrate.images.writer import ImageWriter

KINDS = ("process", "shmem")


def name_of(target: Target) -> str:
    return f"{target.kind}-{target.id}"


def target_of(name: str) -> Target:
    kind, _, number = name.partition("-")
    if kind not in KINDS or not number.isdecimal():
        raise ImageRefused(f"memory of unknown kind in the image: {name!r:.40}", "cmdop-migrate makes no such image.")
    return Target(kind, int(number))


class Sink:
    """Pages of a dump, into an image."""

    def __init__(self, writer: ImageWriter) -> None:
        self._feed = writer.feed

    def open(self, target: Target) -> None:
        self._feed.open(name_of(target))

    def run(self, vaddr: int, nr_pages: int, flags: int) -> None:
        self._feed.run(vaddr, nr_pages, flags, bool(flags & PRESENT))

    def window(self, vaddr: int, size: int) -> memoryview:
        return self._feed.window(vaddr, size)

    def done(self) -> None:
        self._feed.done()


class Source:
    """Pages of an image, for a restore."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._readers: dict[Target, PageReader] = {}
        self._lock = threading.Lock()

    def reader(self, target: Target) -> PageReader:
        with self._lock:
            if target not in self._readers:
                self._readers[target] = self._image.pages(name_of(target))
            return self._readers[target]

    def read(self, target: Target, vaddr: int, nr_pages: int) -> Sequence[Buffer]:
        return self.reader(target).read(vaddr, nr_pages)

    def lay_out(self, images: Path, lazy: bool) -> int:
        """Writes the pagemaps, and the pages that cannot or shall not come later; -> pages laid out."""
        eager = 0
        for number, name in enumerate(sorted(self._image.targets), 1):
            target = target_of(name)
            eager += pagemap.write(images, target, number, self._runs(target), self, lazy=lazy)
        return eager

    def _runs(self, target: Target) -> Iterator[pagemap.Run]:
        for segment in self.reader(target).segments:
            yield pagemap.Run(segment.vaddr, segment.pages, segment.flags)
