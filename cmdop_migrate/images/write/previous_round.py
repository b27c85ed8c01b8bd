"""The memory of the checkpoint made just before, by this very process: what did not change since is not read again.

Pure. Whoever asks has it from the kernel that a page did not change; here is which chunk it lies in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.layout import NO_CHUNK, WINDOW
from cmdop_migrate.images.format.windows import PageTable


@dataclass(frozen=True)
class Kept:
    """A whole window. Without an id it is all zero."""

    flags: int
    ident: bytes | None


class Earlier:
    def __init__(self, tables: Mapping[str, PageTable], chunks: ChunkTable) -> None:
        self._tables, self._chunks = tables, chunks

    def __contains__(self, dst: object) -> bool:
        return dst in self._tables

    def flags(self, dst: str, vaddr: int) -> int | None:
        """Of the page there; None: there was none."""
        segment = self._tables[dst].find(vaddr)
        return segment.flags if segment is not None else None

    def window(self, dst: str, vaddr: int) -> Kept | None:
        """What the whole window at `vaddr` was; None when it is not at a window's start, or had pages missing."""
        table = self._tables[dst]
        segment = table.find(vaddr)
        if segment is None or vaddr % WINDOW or vaddr + WINDOW > segment.end:
            return None
        number = table.refs[table.slot(segment, vaddr)]
        return Kept(segment.flags, self._chunks.ident(number) if number != NO_CHUNK else None)
