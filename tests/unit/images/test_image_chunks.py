"""Test that the cut of memory depends only on addresses and flags."""

from __future__ import annotations

import os
import tempfile
from array import array
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from cmdop_migrate.images.format.layout import PAGE, WINDOW
from cmdop_migrate.images.format.windows import Extent, PageTable, Segment, table_of, window_count, windows
from cmdop_migrate.images.write.page_buffers import PageBuffers

# (gap in pages before it, pages, flags, present)
RUNS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 70), st.sampled_from([4, 6]), st.booleans()), min_size=1, max_size=8
)


def layout_of(runs):
    at, out = 0x7000, []
    for gap, pages, flags, present in runs:
        at += gap * PAGE
        out.append((at, pages, flags, present))
        at += pages * PAGE
    return out


def byte_at(vaddr: int) -> int:
    return (vaddr // PAGE * 7 + 3) % 251


def feed_all(
    runs, cuts: list[int], size: int, aside: Path | None = None
) -> tuple[PageTable, dict[tuple[int, int], bytes]]:
    """Feed the runs in messages of the given page counts; return the content of each window."""
    chunks: dict[tuple[int, int], bytes] = {}
    order: list[bytes] = []

    def submit(buffer: bytearray, extents, release) -> None:
        for extent in extents:
            for slot, (offset, length) in enumerate(windows(extent.vaddr, extent.size)):
                data = bytes(buffer[extent.offset + offset : extent.offset + offset + length])
                chunks[extent.vaddr + offset, length] = data
                extent.refs[slot] = len(order)
                order.append(data)
        buffer[:] = b"\xee" * len(buffer)
        release(buffer)

    sink = SimpleNamespace(submit_extents=submit, check=lambda: None)
    feed = PageBuffers(sink, buffers=2, size=size, spill_dir=aside)
    feed.open("t")
    turn = 0
    for vaddr, pages, flags, present in runs:
        while pages:
            step = min(pages, cuts[turn % len(cuts)])
            turn += 1
            feed.run(vaddr, step, flags, present)
            at, end = vaddr, vaddr + step * PAGE
            while present and at < end:
                view = feed.window(at, end - at)
                for offset in range(0, len(view), PAGE):
                    view[offset : offset + PAGE] = bytes([byte_at(at + offset)]) * PAGE
                at += len(view)
            vaddr, pages = end, pages - step
    feed.done()
    assert aside is None or not order, "what was put aside waits until it may go on"
    feed.start_deferred()
    feed.finish()
    feed.stop()
    table = table_of(feed.extents["t"])
    for slot, ref in enumerate(table.refs):
        assert len(order[ref]) == [size for refs, size in table.sized_refs() for _ in refs][slot]
    return table, chunks


@settings(max_examples=60, deadline=None)
@given(
    RUNS, st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([WINDOW + PAGE, 3 * WINDOW, 40 * PAGE])
)
def test_chunks_do_not_depend_on_message_or_buffer_sizes(runs, cuts, size):
    runs = layout_of(runs)
    whole_table, whole = feed_all(runs, [1000], 1 << 22)
    table, parts = feed_all(runs, cuts, size)
    assert parts == whole
    with tempfile.TemporaryDirectory() as folder:
        late_table, late = feed_all(runs, cuts, size, Path(folder))
        assert os.listdir(folder) == []
    assert (late, late_table.segments) == (whole, whole_table.segments)
    assert table.segments == whole_table.segments
    for (vaddr, length), data in parts.items():
        expected = b"".join(bytes([byte_at(vaddr + at)]) * PAGE for at in range(0, length, PAGE))
        assert data == expected
    assert sum(s.pages for s in table.segments) == sum(pages for _, pages, *_ in runs)


@given(st.integers(0, 1 << 40), st.integers(0, 200))
def test_windows_cover_the_range_and_are_aligned(page, pages):
    vaddr, size = page * PAGE, pages * PAGE
    cut = list(windows(vaddr, size))
    assert len(cut) == window_count(vaddr, size)
    assert sum(length for _, length in cut) == size
    for offset, length in cut:
        assert (vaddr + offset) // WINDOW == (vaddr + offset + length - 1) // WINDOW


@given(RUNS)
def test_page_table_round_trips(runs):
    extents = [
        Extent("t", v, n * PAGE, f, p, 0, array("I", range(window_count(v, n * PAGE) if p else 0)))
        for v, n, f, p in layout_of(runs)
    ]
    table = table_of(extents)
    again = PageTable.decode(table.encode())
    assert again.segments == table.segments and again.refs == table.refs


def test_page_table_finds_addresses():
    table = PageTable(
        [Segment(0x7000, 20, 4, True), Segment(0x100000, 2, 4, False)],
        array("I", range(window_count(0x7000, 20 * PAGE))),
    )
    segment = table.find(0x7000)
    assert segment is not None and table.slot(segment, 0x10000) == 1 and table.slot(segment, 0xF000) == 0
    assert table.find(0x6000) is None and table.find(0x7000 + 20 * PAGE) is None and table.find(0x100000) is None
