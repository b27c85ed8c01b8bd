"""Make small checkpoints, and wrap stores so that they fail, stall or take turns."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cmdop_migrate.errors import StoreUnreachable
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.layout import PAGE
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.write.writer import ImageWriter, WriterOptions
from cmdop_migrate.storage.base import ObjectInfo, Store

SESSION = "5e5510"
SMALL = WriterOptions(workers=1, uploaders=1, pack_buffers=3)


def memory(seed: int, pages: int = 40) -> bytes:
    """Return mixed pages: random, text and zeros."""
    draw = random.Random(seed)
    kinds = [lambda: draw.randbytes(PAGE), lambda: b"a line of text\n" * 273 + b".", lambda: bytes(PAGE)]
    return b"".join(draw.choice(kinds)() for _ in range(pages))


def add_run(writer: ImageWriter, dst: str, vaddr: int, nr_pages: int, flags: int, data: bytes | None) -> None:
    """Feed one run with its bytes, or None for a run without bytes, as a page server would."""
    writer.feed.open(dst)
    writer.feed.run(vaddr, nr_pages, flags, data is not None)
    left = memoryview(data or b"").cast("B")
    while left:
        room = writer.feed.window(vaddr, len(left))
        room[:] = left[: len(room)]
        vaddr, left = vaddr + len(room), left[len(room) :]


def checkpoint(
    store: Store,
    ring: KeyRing,
    spill: Path,
    seed: int = 1,
    session: str = SESSION,
    parent: str | None = None,
    shared: bytes = b"",
) -> Manifest:
    """Write one small checkpoint; abort on failure, as the engines do. The index cache stays in `spill`."""
    writer = ImageWriter(store, ring, session, spill, parent, replace(SMALL, index_caches=spill / "ledgers"))
    try:
        writer.begin()
        data = shared + memory(seed)
        add_run(writer, "process-1", 0x7F0000003000, len(data) // PAGE, 4, data)
        add_run(writer, "process-1", 0x10000, 3, 1, None)
        writer.add_blob("criu/core-1.img", b"core" * 100 + bytes([seed % 256]))
        writer.finish_input()
        return writer.commit(7, {"seed": seed, "shared": len(shared)})
    except StoreUnreachable:
        writer.abort()
        raise


def content(image: reader.Image) -> dict[str, bytes]:
    """Return everything that an image gives out."""
    found = {name: image.blob(name) for name in image.manifest.blobs}
    for dst in image.targets:
        pages = image.pages(dst)
        for segment in pages.segments:
            at = segment.vaddr
            while segment.present and at < segment.end:
                views = pages.read(at, 64)
                assert views
                found[f"{dst}@{segment.vaddr:x}"] = found.get(f"{dst}@{segment.vaddr:x}", b"") + b"".join(views)
                at += sum(map(len, views))
    return found


def read_all(store: Store, ring: KeyRing, name: str, local: Path) -> dict[str, bytes]:
    image = reader.fetch(store, ring, name, local, parallel=2)
    try:
        return content(image)
    finally:
        image.close()


class Wrapped(Store):
    """Call `before` before every operation of the inner store."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url

    def before(self, operation: str, name: str) -> None:
        """Do nothing; subclasses override it."""

    def put(self, name: str, data: bytes | bytearray | memoryview) -> None:
        self.before("put", name)
        self.inner.put(name, data)

    def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        self.before("put_new", name)
        return self.inner.put_new(name, data)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self.before("get", name)
        return self.inner.get(name, start, length)

    def stat(self, name: str) -> ObjectInfo | None:
        self.before("stat", name)
        return self.inner.stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.before("list", prefix)
        return self.inner.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:  # one by one: killed half-way, some are gone
            self.before("delete", name)
            self.inner.delete([name])


class Dying(Wrapped):
    """Work for `count` operations, then fail forever: the state that a kill leaves."""

    def __init__(self, inner: Store, count: int) -> None:
        super().__init__(inner)
        self.left = count
        self._lock = threading.Lock()

    def before(self, operation: str, name: str) -> None:
        with self._lock:
            self.left -= 1
            if self.left < 0:
                raise StoreUnreachable("killed", "none")


class Turns:
    """Run several actors over one store, one operation at a time; `choose` picks the next actor."""

    def __init__(self, inner: Store, choose: Callable[[list[int]], int]) -> None:
        self._inner = inner
        self._choose = choose
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, object]] = []
        self._granted: object = None
        self._live: set[int] = set()
        self._counts: Counter[int] = Counter()
        self.errors: list[BaseException] = []

    def run(self, *actors: Callable[[Store], Any]) -> None:
        threads = [threading.Thread(target=self._act, args=(n, act), daemon=True) for n, act in enumerate(actors)]
        self._live = set(range(len(actors)))
        for thread in threads:
            thread.start()
        while True:
            with self._changed:
                # A turn is given when every actor still alive has asked for one.
                ok = self._changed.wait_for(lambda: self._granted is None and self._live <= self._askers(), timeout=60)
                assert ok, "the actors got stuck"
                if not self._live and not self._waiting:
                    break
                actor = self._choose(sorted(self._askers()))
                self._granted = next(ticket for who, ticket in self._waiting if who == actor)
                self._changed.notify_all()
        for thread in threads:
            thread.join(60)

    def count(self, actor: int) -> int:
        """Return the number of operations of this actor."""
        return self._counts[actor]

    def _askers(self) -> set[int]:
        return {who for who, _ in self._waiting}

    def _act(self, number: int, act: Callable[[Store], Any]) -> None:
        turns = self

        class Gate(Wrapped):
            def before(self, operation: str, name: str) -> None:
                turns._turn(number)

        try:
            act(Gate(self._inner))
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self._changed:
                self._live.discard(number)
                self._changed.notify_all()

    def _turn(self, number: int) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append((number, ticket))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._granted is ticket)
            self._waiting.remove((number, ticket))
            self._counts[number] += 1
            self._granted = None
            self._changed.notify_all()


def sticky(draw: random.Random, stay: float) -> Callable[[list[int]], int]:
    """Choose mostly the same actor again: races need one actor to be overtaken by much work of another."""
    last = [0]

    def choose(askers: list[int]) -> int:
        if last[0] not in askers or draw.random() >= stay:
            last[0] = draw.choice(askers)
        return last[0]

    return choose


def script(*stretches: tuple[int, int]) -> Callable[[list[int]], int]:
    """Choose actors by (actor, operations) in sequence; a stretch also ends with its actor. The rest runs in order."""
    left = [list(stretch) for stretch in stretches]

    def choose(askers: list[int]) -> int:
        while left and (left[0][1] == 0 or left[0][0] not in askers):
            left.pop(0)
        if not left:
            return askers[0]
        left[0][1] -= 1
        return left[0][0]

    return choose
