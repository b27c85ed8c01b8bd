"""Map unchanged pages to the chunks of the checkpoint that this process made just before, so they are not read again.

Pure. The caller knows from the kernel's dirty tracking that a page did not change; this module tells which chunk holds
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.layout import NO_CHUNK, WINDOW
from cmdop_migrate.images.format.windows import PageTable


@dataclass(frozen=True)
class UnchangedWindow:
    """Describe a whole unchanged window. `ident` is None if it is all zeros."""

    flags: int
    ident: bytes | None


class PreviousRound:
    """Hold the page tables and the chunk table of the previous pre-copy round."""

    def __init__(self, tables: Mapping[str, PageTable], chunks: ChunkTable) -> None:
        self._tables, self._chunks = tables, chunks

    def __contains__(self, dst: object) -> bool:
        return dst in self._tables

    def flags(self, dst: str, vaddr: int) -> int | None:
        """Return the flags of the page at `vaddr`, or None if there was no page."""
        segment = self._tables[dst].find(vaddr)
        return segment.flags if segment is not None else None

    def window(self, dst: str, vaddr: int) -> UnchangedWindow | None:
        """Return what the whole window at `vaddr` was; None if `vaddr` is not the start of a window, or if pages of the
        window were missing."""
        table = self._tables[dst]
        segment = table.find(vaddr)
        if segment is None or vaddr % WINDOW or vaddr + WINDOW > segment.end:
            return None
        number = table.refs[table.slot(segment, vaddr)]
        return UnchangedWindow(segment.flags, self._chunks.ident(number) if number != NO_CHUNK else None)
