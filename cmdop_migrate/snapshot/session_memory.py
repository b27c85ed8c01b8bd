"""Connect CRIU's memory pages to images: a sink for the pages of a dump, a source of pages for a restore."""

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
from cmdop_migrate.snapshot.capture.incremental import FrozenMemory

KINDS = ("process", "shmem")


def name_of(target: Target) -> str:
    """Return the name under which an image keeps the memory of `target`."""
    return f"{target.kind}-{target.id}"


def target_of(name: str) -> Target:
    """Return the target of a name that `name_of` returned. Raises ImageRefused for any other name."""
    kind, _, number = name.partition("-")
    if kind not in KINDS or not number.isdecimal():
        raise ImageRefused(f"memory of unknown kind in the image: {name!r:.40}", "cmdop-migrate makes no such image.")
    return Target(kind, int(number))


class MemorySink:
    """Write the pages of a dump into an image, as the sink of CRIU's page server."""

    def __init__(
        self,
        writer: ImageWriter,
        earlier: PreviousRound | None = None,
        frozen_memory: FrozenMemory | None = None,
        injected: Mapping[int, Code] | None = None,
    ) -> None:
        """Write to `writer`. With `earlier`, the memory of the last pre-copy round, CRIU may leave out pages that did
        not change since; those that are needed nevertheless are read from `frozen_memory`. `injected` has, by process,
        the original content of the page that CRIU overwrites with its code."""
        self._writer, self._feed = writer, writer.feed
        self._earlier, self._frozen_memory = earlier, frozen_memory
        self._injected = injected or {}
        self._target = Target("process", 0)
        self._filled: tuple[int, memoryview] | None = None  # the last view that was handed out, and its address

    def open(self, target: Target) -> bool:
        """Start the pages of `target`. Return whether CRIU may leave out pages that are in the last round."""
        self._correct()
        self._target = target
        self._feed.open(name_of(target))
        return self._earlier is not None and target.kind == "process" and name_of(target) in self._earlier

    def run(self, vaddr: int, nr_pages: int, flags: int) -> None:
        """Start a run of pages; if they are in the last round, take them from there."""
        self._correct()
        if flags & PARENT:
            self._unchanged(vaddr, nr_pages * PAGE)
        else:
            self._feed.run(vaddr, nr_pages, flags, bool(flags & PRESENT))

    def _unchanged(self, vaddr: int, length: int) -> None:
        if self._earlier is None:
            raise ProtocolError(f"CRIU left out pages at {vaddr:#x}, but there is no earlier round")
        name = name_of(self._target)
        for offset, size in windows(vaddr, length):
            kept = self._earlier.window(name, vaddr + offset) if size == WINDOW else None
            if kept is None or not self._writer.keep(vaddr + offset, kept):
                self._read(name, vaddr + offset, size)

    def _read(self, name: str, vaddr: int, size: int) -> None:
        """Read a window of which a part changed, or that the store no longer has, page by page, because flags may
        differ."""
        assert self._earlier is not None and self._frozen_memory is not None
        for at in range(vaddr, vaddr + size, PAGE):
            flags = self._earlier.flags(name, at)
            self._feed.run(at, 1, flags if flags is not None else PRESENT, True)
            self._frozen_memory.read(self._target, at, self.window(at, PAGE))
            self._correct()

    def window(self, vaddr: int, size: int) -> memoryview:
        """Return the buffer to be filled with the next pages of the run."""
        self._correct()
        view = self._feed.window(vaddr, size)
        self._filled = vaddr, view
        return view

    def done(self) -> None:
        """Finish the last target."""
        self._correct()
        self._feed.done()

    def _correct(self) -> None:
        """Put back the original content of the page that CRIU overwrote, in the buffer filled last, which is complete
        by now."""
        filled, self._filled = self._filled, None
        code = self._injected.get(self._target.id) if self._target.kind == "process" else None
        if filled is None or code is None:
            return
        vaddr, view = filled
        at = code.vaddr - vaddr
        if 0 <= at <= len(view) - len(code.content):
            view[at : at + len(code.content)] = code.content


class MemorySource:
    """Read the pages of an image, for a restore."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._readers: dict[Target, PageReader] = {}
        self._lock = threading.Lock()

    def reader(self, target: Target) -> PageReader:
        """Return the reader of a target's pages, the same one each time."""
        with self._lock:
            if target not in self._readers:
                self._readers[target] = self._image.pages(name_of(target))
            return self._readers[target]

    def read(self, target: Target, vaddr: int, nr_pages: int) -> Sequence[Buffer]:
        """Return the pages at `vaddr`."""
        return self.reader(target).read(vaddr, nr_pages)

    def write_pages(self, images: Path, lazy: bool) -> int:
        """Write CRIU's pagemaps and all pages; with `lazy` only the pages that a pager cannot serve. Return the number
        of pages written."""
        eager = 0
        for number, name in enumerate(sorted(self._image.targets), 1):
            target = target_of(name)
            eager += pagemap.write(images, target, number, self._runs(target), self, lazy=lazy)
        return eager

    def later(self, pid: int) -> LazyMemory:
        """Return the memory of a process that a lazy `write_pages` left out."""
        return LazyMemory(pid, self.reader(Target("process", pid)))

    def descriptors(self) -> set[int]:
        """Return the file descriptors that must stay open for reading."""
        return self._image.cache.descriptors()

    def waiting(self) -> set[int]:
        """Return the processes that have lazy memory."""
        processes = [target for target in map(target_of, self._image.targets) if target.kind == "process"]
        return {process.id for process in processes if any(True for _ in self.later(process.id).later())}

    def _runs(self, target: Target) -> Iterator[pagemap.Run]:
        for segment in self.reader(target).segments:
            yield pagemap.Run(segment.vaddr, segment.pages, segment.flags)


class LazyMemory:
    """Read the pages of one process that arrive while it runs (`address_space.Memory`)."""

    def __init__(self, pid: int, reader: PageReader) -> None:
        self.pid, self._reader = pid, reader

    def later(self) -> Iterator[tuple[int, int]]:
        """Yield the address ranges that arrive later, as start and end."""
        return ((segment.vaddr, segment.end) for segment in self._reader.segments if segment.flags & LAZY)

    def window(self, vaddr: int) -> tuple[int, int]:
        """Return start and end of the window that is stored together with `vaddr`."""
        return self._reader.window(vaddr)

    def read(self, start: int) -> bytes | None:
        """Return the content of the window that starts at `start`; None if it is all zeros."""
        data = self._reader.chunk_at(start)
        return data if data is None or isinstance(data, bytes) else bytes(data)

    def stretch(self, vaddr: int, most: int) -> tuple[int, int]:
        """Return a range of windows from that of `vaddr` on, all of them zeros or none, of `most` bytes at most, or one
        window."""
        return self._reader.stretch(vaddr, most)

    def fill(self, start: int, out: memoryview) -> bool:
        """Fill `out` with a range that `stretch` returned; return False, and leave `out` alone, if it is all zeros."""
        return self._reader.fill(start, out)
