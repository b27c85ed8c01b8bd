"""Frames: every frame comes back as it was, and no bytes do harm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.relay.frames import (
    FRAME_MAX,
    HEADER_SIZE,
    PAYLOAD_MAX,
    Frame,
    FrameError,
    Kind,
    decode,
    encode,
    session_bytes,
    with_credit,
    with_table,
)

SESSIONS = st.one_of(st.just(""), st.binary(min_size=12, max_size=12).filter(any).map(bytes.hex))
FRAMES = st.builds(
    Frame,
    st.sampled_from(Kind),
    SESSIONS,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=300),
)


@given(FRAMES)
def test_frame_round_trip(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


def test_the_layout_is_as_documented() -> None:
    data = encode(Frame(Kind.DATA, "0102030405060708090a0b0c", 7, 9, 3, b"xy"))
    assert data.hex() == "010b00000003" + "0102030405060708090a0b0c" + "0000000000000007" + "0000000000000009" + "7879"
    assert HEADER_SIZE == 34


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_an_error(data: bytes) -> None:
    try:
        frame = decode(data)
    except FrameError:
        return
    assert encode(frame) == data  # one form only: nothing is hidden in what is not read
    for read in (frame.table, frame.credit, lambda: frame.text("code")):
        try:
            read()
        except FrameError:
            pass


@given(FRAMES, st.integers(0, 33), st.integers(1, 255))
def test_a_changed_header_is_another_frame_or_an_error(frame: Frame, at: int, change: int) -> None:
    data = bytearray(encode(frame))
    data[at] ^= change
    try:
        assert decode(bytes(data)) != frame
    except FrameError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(33),
        bytes(FRAME_MAX + 1),
        b"\x02" + bytes(33),  # another version
        b"\x01\x00" + bytes(32),  # no kind
        b"\x01\x11" + bytes(32),
    ],
)
def test_invalid_frames_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.DATA, payload=bytes(PAYLOAD_MAX + 1)),
        Frame(Kind.DATA, token=2**64),
        Frame(Kind.DATA, seq=-1),
        Frame(Kind.DATA, channel=2**32),
        Frame(Kind.DATA, session="work"),
        Frame(Kind.DATA, session="AB" * 12),
    ],
)
def test_encoding_an_invalid_frame_raises(frame: Frame) -> None:
    with pytest.raises(FrameError):
        encode(frame)


@pytest.mark.parametrize("payload", [b"[]", b"1", b"{", b"\xff", b'{"a":NaN}', b'{"a":1e999}', b'{"a":["\\ud800"]}',
                                     b'{"\\uDFFF":1}', b"[" * 5000, b'"x"'])  # fmt: skip
def test_payload_that_is_not_an_object_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        Frame(Kind.REGISTER, payload=payload).table()


def test_decoded_tables_can_be_encoded_again() -> None:
    table = Frame(Kind.REGISTER, payload=b'{"a":"\\ud83d\\ude00 \\u00fc","b":[1e308,-1e-999]}').table()
    assert with_table(Kind.LISTING, table).table() == {"a": "\U0001f600 ü", "b": [1e308, -0.0]}


def test_the_largest_payload_passes() -> None:
    frame = Frame(Kind.DATA, payload=bytes(PAYLOAD_MAX))
    assert decode(encode(frame)) == frame


def test_tables_and_credits() -> None:
    assert with_table(Kind.CLOSE, {"why": "zü"}, channel=4).text("why") == "zü"
    assert with_credit(4, 70_000).credit() == 70_000
    assert Frame(Kind.LIST).table() == {}
    with pytest.raises(FrameError):
        with_table(Kind.CLOSE, {"why": 3}).text("why")
    with pytest.raises(FrameError):
        session_bytes("")
