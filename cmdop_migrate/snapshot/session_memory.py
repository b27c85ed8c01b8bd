"""Between CRIU's page server protocol and images: two small adapters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cmdop_migrate.criu.image import pagemap
from cmdop_migrate.criu.injected_code import Code
from cmdop_migrate.criu.page_server import LAZY, PAGE, PARENT, PRESENT, Buffer, ProtocolError, Target
from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.format.layout import WINDOW
from cmdop_migrate.images.format.windows import windows
from cmdop_migrate.images.read.page_reader import PageReader
from cmdop_migrate.images.read.reader import Image
from cmdop_migrate.images.write.previous_round import PreviousRound
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.snapshot.capture.incremental import StillMemory

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

    def __init__(
        self,
        writer: ImageWriter,
        earlier: PreviousRound | None = None,
        still: StillMemory | None = None,
        injected: Mapping[int, Code] | None = None,
    ) -> None:
        """With `earlier`, pages that did not change since need not come; `still` is where to read them all the same.
        `injected`: the page of each process that CRIU writes to, as it was before."""
        self._writer, self._feed = writer, writer.feed
        self._earlier, self._still = earlier, still
        self._injected = injected or {}
        self._target = Target("process", 0)
        self._filled: tuple[int, memoryview] | None = None  # the last view that was handed out, and its address

    def open(self, target: Target) -> bool:
        self._correct()
        self._target = target
        self._feed.open(name_of(target))
        return self._earlier is not None and target.kind == "process" and name_of(target) in self._earlier

    def run(self, vaddr: int, nr_pages: int, flags: int) -> None:
        self._correct()
        if flags & PARENT:
            self._unchanged(vaddr, nr_pages * PAGE)
        else:
            self._feed.run(vaddr, nr_pages, flags, bool(flags & PRESENT))

    def _unchanged(self, vaddr: int, length: int) -> None:
        if self._earlier is None:
            raise ProtocolError(f"pages at {vaddr:#x} left out, as if an earlier copy of them were known")
        name = name_of(self._target)
        for offset, size in windows(vaddr, length):
            kept = self._earlier.window(name, vaddr + offset) if size == WINDOW else None
            if kept is None or not self._writer.keep(vaddr + offset, kept):
                self._read(name, vaddr + offset, size)

    def _read(self, name: str, vaddr: int, size: int) -> None:
        """A window of which a part changed, or that the store has no more; page by page, for flags may differ."""
        assert self._earlier is not None and self._still is not None
        for at in range(vaddr, vaddr + size, PAGE):
            flags = self._earlier.flags(name, at)
            self._feed.run(at, 1, flags if flags is not None else PRESENT, True)
            self._still.read(self._target, at, self.window(at, PAGE))
            self._correct()

    def window(self, vaddr: int, size: int) -> memoryview:
        self._correct()
        view = self._feed.window(vaddr, size)
        self._filled = vaddr, view
        return view

    def done(self) -> None:
        self._correct()
        self._feed.done()

    def _correct(self) -> None:
        """Replace the page that CRIU writes to in what was filled last, which is complete by now."""
        filled, self._filled = self._filled, None
        code = self._injected.get(self._target.id) if self._target.kind == "process" else None
        if filled is None or code is None:
            return
        vaddr, view = filled
        at = code.vaddr - vaddr
        if 0 <= at <= len(view) - len(code.content):
            view[at : at + len(code.content)] = code.content


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

    def later(self, pid: int) -> Later:
        """What of a process's memory `lay_out` left out."""
        return Later(pid, self.reader(Target("process", pid)))

    def descriptors(self) -> set[int]:
        """What must stay open for it to be read."""
        return self._image.cache.descriptors()

    def waiting(self) -> set[int]:
        """The processes that have such memory."""
        processes = [one for one in map(target_of, self._image.targets) if one.kind == "process"]
        return {one.id for one in processes if any(True for _ in self.later(one.id).later())}

    def _runs(self, target: Target) -> Iterator[pagemap.Run]:
        for segment in self.reader(target).segments:
            yield pagemap.Run(segment.vaddr, segment.pages, segment.flags)


class Later:
    """Pages of one process that come while it runs."""

    def __init__(self, pid: int, reader: PageReader) -> None:
        self.pid, self._reader = pid, reader

    def later(self) -> Iterator[tuple[int, int]]:
        return ((one.vaddr, one.end) for one in self._reader.segments if one.flags & LAZY)

    def window(self, vaddr: int) -> tuple[int, int]:
        return self._reader.window(vaddr)

    def read(self, start: int) -> bytes | None:
        data = self._reader.chunk_at(start)
        return data if data is None or isinstance(data, bytes) else bytes(data)

    def stretch(self, vaddr: int, most: int) -> tuple[int, int]:
        return self._reader.stretch(vaddr, most)

    def fill(self, start: int, out: memoryview) -> bool:
        return self._reader.fill(start, out)
