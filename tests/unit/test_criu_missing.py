"""Check the table of missing pages against a model that tracks every page separately."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu.lazy.missing import Missing

SPACE = 40
stretches = st.tuples(st.integers(0, SPACE - 1), st.integers(1, 12))


@given(
    st.lists(st.integers(0, SPACE), max_size=8, unique=True).map(sorted),
    st.lists(st.tuples(st.sampled_from(["cut", "move"]), stretches, st.integers(0, SPACE - 1)), max_size=12),
    stretches,
)
def test_missing_pages_behave_as_the_model(
    edges: list[int], acts: list[tuple[str, tuple[int, int], int]], asked: tuple[int, int]
) -> None:
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    missing = Missing((start, end, 0) for start, end in pairs)
    model = {
        page: page for start, end in pairs for page in range(start, end)
    }  # where it belongs: where the image has it
    for act, (start, size), to in acts:
        if act == "cut":
            gone = missing.cut(start, start + size)
            assert flat(gone) == {page: at for page, at in model.items() if start <= page < start + size}
            model = {page: at for page, at in model.items() if not start <= page < start + size}
        elif abs(start - to) >= size:  # the kernel moves nothing onto itself
            missing.move(start, to, size)
            moved = {page - start + to: at for page, at in model.items() if start <= page < start + size}
            kept = {
                page: at
                for page, at in model.items()
                if not start <= page < start + size and not to <= page < to + size
            }
            model = kept | moved
        assert flat(missing.pieces()) == model
        assert bool(missing) == bool(model)
        assert all(one[1] <= two[0] for one, two in zip(missing.pieces(), missing.pieces()[1:], strict=False))
    start, size = asked
    first = missing.first(start, start + size)
    inside = sorted(page for page in model if start <= page < start + size)
    assert (first is None) == (not inside)
    if first is not None:
        assert first[0] == inside[0] and set(range(first[0], first[1])) <= set(inside)
        assert model[first[0]] == first[0] - first[2]
    twin = missing.copy()
    twin.clear()
    assert not twin and flat(missing.pieces()) == model


def flat(pieces: list[tuple[int, int, int]]) -> dict[int, int]:
    return {page: page - shift for start, end, shift in pieces for page in range(start, end)}


@pytest.mark.parametrize("pieces", [[(4, 4, 0)], [(0, 4, 0), (3, 5, 0)], [(4, 6, 0), (0, 2, 0)]])
def test_stretches_out_of_order_are_refused(pieces: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="out of order"):
        Missing(pieces)
