"""What `wait --for` looks at."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.session.screen import Plain


def test_colours_and_line_ends_are_left_out() -> None:
    plain = Plain(b"\x1b[?2004l\rok \x1b[31mred\x1b[0m\r\n\x1b]0;title\x07done")
    assert plain.text == b"\nok red\ndone"
    assert re.search(rb"^ok", plain.text, re.MULTILINE)


def test_ends_point_into_the_raw_bytes() -> None:
    raw = b"\x1b[1mab\x1b[0mcd\r\nef"
    plain = Plain(raw)
    assert plain.text == b"abcd\nef"
    assert raw[: plain.raw_end(2)] == b"\x1b[1mab"
    assert raw[: plain.raw_end(4)] == b"\x1b[1mab\x1b[0mcd"
    assert raw[: plain.raw_end(7)] == raw


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r\n", b"\r", b"\n", b"\x1b[31m", b"\x1b]0;t\x07", b"\x1b", b"\x1b["])))
def test_any_prefix_of_the_text_comes_from_the_same_prefix_of_the_raw(parts: list[bytes]) -> None:
    raw = b"".join(parts)
    plain = Plain(raw)
    ends = [plain.raw_end(end) for end in range(len(plain.text) + 1)]
    assert ends == sorted(ends) and all(0 <= end <= len(raw) for end in ends)
