"""The output ring, terminal modes, frames on the wire, replay and keys: pure, and right for any cut of the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.holder import protocol
from cmdop_migrate.holder.output_ring import Modes, Ring
from cmdop_migrate.session import screen

PIECES = st.lists(st.binary(max_size=3000), max_size=20)


@given(PIECES, st.integers(1, 5000))
def test_ring_keeps_the_last_bytes_under_their_numbers(pieces: list[bytes], size: int) -> None:
    ring, whole = Ring(size), b""
    for piece in pieces:
        ring.append(piece)
        whole += piece
        assert ring.end == len(whole) and ring.start == max(0, len(whole) - size)
        assert ring.read(ring.start, size) == whole[ring.start :]
    middle = (ring.start + ring.end) // 2
    assert ring.read(middle, 7) == whole[middle : middle + 7]


@given(PIECES, st.integers(1, 5000), st.integers(1, 5000))
def test_a_loaded_ring_continues_the_saved_one(pieces: list[bytes], size: int, after: int) -> None:
    ring, whole = Ring(size, start=1000), b"".join(pieces)
    for piece in pieces:
        ring.append(piece)
    again = Ring.load(ring.save(), after)
    assert again.end == ring.end == 1000 + len(whole)
    assert again.read(again.start, after) == whole[-min(size, after) :][-(again.end - again.start) :] or not whole
    assert again.start == max(ring.start, again.end - after)
    assert after < size or again.modes.on() == ring.modes.on()


@pytest.mark.parametrize("saved", [b"", b"cmdring1", b"x" * 100, b"cmdring1" + b"\xff" * 16, b"cmdring1" + b"\0" * 15])
def test_ring_refuses_what_it_did_not_save(saved: bytes) -> None:
    with pytest.raises(ValueError):
        Ring.load(saved, 100)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_ring_load_never_fails_otherwise(noise: bytes, cut: int) -> None:
    ring = Ring(100)
    ring.append(noise)
    saved = ring.save()
    for damaged in (saved[:cut], noise + saved, saved[:cut] + noise):
        try:
            Ring.load(damaged, 50)
        except ValueError:
            continue


STREAM = b"a\x1b[?1049h\x1b[?25l\x1b[?1000;1006hb\x1b[?25h\x1b[?99999h\x1b[31m\x1b[?7l"


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_modes_are_the_same_for_any_cut(cuts: list[int]) -> None:
    modes, last = Modes(), 0
    for cut in [*sorted(cuts), len(STREAM)]:
        modes.feed(STREAM[last:cut])
        last = cut
    assert modes.on() == [25, 1000, 1006, 1049]


def test_modes_reset_and_do_not_grow() -> None:
    modes = Modes()
    modes.feed(b"\x1b[?1049h\x1b[?25l")
    modes.feed(b"".join(b"\x1b[?%dh" % number for number in range(3000, 30000)))
    assert modes.on() == [7, 1049]
    modes.feed(b"\x1bc")
    assert modes.on() == [7, 25]


FRAMES = st.lists(
    st.one_of(
        st.binary(max_size=200).map(lambda data: (protocol.typed(data), (protocol.INPUT, data))),
        st.tuples(st.integers(0, 1 << 60), st.binary(max_size=200)).map(
            lambda pair: (protocol.output(*pair), (protocol.OUTPUT, pair[0].to_bytes(8, "big") + pair[1]))
        ),
    ),
    max_size=8,
)


@given(FRAMES, st.lists(st.integers(0, 2000), max_size=10))
def test_decoder_finds_the_same_frames_for_any_cut(
    frames: list[tuple[bytes, tuple[int, bytes]]], cuts: list[int]
) -> None:
    stream = b"".join(data for data, _ in frames)
    decoder, got, last = protocol.Decoder(), [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]:
        got += decoder.feed(stream[last:cut])
        last = cut
    assert got == [frame for _, frame in frames]
    outputs = [protocol.parse_output(payload) for kind, payload in got if kind == protocol.OUTPUT]
    assert [protocol.output(*one) for one in outputs] == [data for data, (kind, _) in frames if kind == protocol.OUTPUT]


@given(st.binary(max_size=200))
def test_decoder_takes_frames_or_refuses(noise: bytes) -> None:
    decoder = protocol.Decoder()
    try:
        for kind, payload in decoder.feed(noise):
            assert kind in (protocol.CONTROL, protocol.OUTPUT, protocol.INPUT) and len(payload) <= protocol.MAX_PAYLOAD
            if kind == protocol.CONTROL:
                protocol.parse_control(payload)
    except protocol.ProtocolError:
        return


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"1", b"\xff"])
def test_control_must_be_an_object(payload: bytes) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.parse_control(payload)


QUESTIONS = [
    *(b"\x1b[c", b"\x1b[0c", b"\x1b[>c", b"\x1b[=c", b"\x1b[6n", b"\x1b[?6n", b"\x1b[5n", b"\x1b[18t", b"\x1b[14;2t"),
    *(b"\x1b[?2026$p", b"\x1b[>q", b"\x1b[?u", b"\x1bZ", b"\x05", b"\x1b]11;?\x07", b"\x1b]10;?\x1b\\"),
    *(b"\x1b]4;1;?\x07", b"\x1b]52;c;?\x07", b"\x1bP+q544e\x1b\\", b"\x1bP$qm\x1b\\"),
]
HARMLESS = [
    *(
        b"\x1b[31m",
        b"\x1b[2J",
        b"\x1b[?1049h",
        b"\x1b]0;title\x07",
        b"\x1b[8;24;80t",
        b"\x1b[1;2H",
        b"\x1b(B",
        b"\x1b7",
    ),
    *(b"plain", b"\x1b[1 q", b"\x1b]8;;http://x\x1b\\", "ü".encode(), b"\x1b[22;0t"),
]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=12), st.lists(st.integers(0, 300), max_size=8))
def test_replay_asks_nothing_and_keeps_the_rest(parts: list[tuple[bool, int]], cuts: list[int]) -> None:
    stream, wanted = b"", b""
    for asks, index in parts:
        piece = QUESTIONS[index % len(QUESTIONS)] if asks else HARMLESS[index % len(HARMLESS)]
        stream += piece
        wanted += b"" if asks else piece
    replay, got, last = screen.Replay(), b"", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]:
        got += replay.feed(stream[last:cut])
        last = cut
    assert got + replay.end() == wanted


@given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=6))
def test_replay_is_the_same_for_any_cut(data: bytes, cuts: list[int]) -> None:
    whole = screen.Replay()
    expected = whole.feed(data) + whole.end()
    replay, got, last = screen.Replay(), b"", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        got += replay.feed(data[last:cut])
        last = cut
    assert got + replay.end() == expected


def test_reset_undoes_what_set_modes_does() -> None:
    modes = Modes()
    modes.feed(screen.set_modes([1049, 1006, 2004]))
    assert modes.on() == [1006, 1049, 2004] and screen.is_full_screen(modes)
    modes.feed(screen.reset(modes))
    assert modes.on() == [7, 25] and not screen.is_full_screen(modes)


@pytest.mark.parametrize(
    ("typed", "sent", "leave"),
    [
        ([b"abc"], b"abc", False),
        ([b"ab\x1cd"], b"ab", True),
        ([b"ab\x1c", b"d"], b"ab", True),
        ([b"\x1c\x1c"], b"\x1c", False),
        ([b"\x1c", b"x"], b"\x1cx", False),
        ([b"\x1c\x1cd"], b"\x1cd", False),
        ([b"\x1cD rest"], b"", True),
    ],
)
def test_detach_key_is_taken_out_of_the_input(typed: list[bytes], sent: bytes, leave: bool) -> None:
    keys, out, left = screen.Keys(), b"", False
    for piece in typed:
        data, left = keys.feed(piece)
        out += data
    assert (out, left) == (sent, leave)
