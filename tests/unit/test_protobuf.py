"""Check the protobuf codec: fields that are not changed stay byte for byte, damaged input is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu import protobuf
from cmdop_migrate.criu.protobuf import ImageFile, Malformed, Message, edited, fields, numbers, read_varint, varint

HEAD = bytes(range(8))


def image(path: Path, *records: bytes) -> Path:
    path.write_bytes(HEAD + b"".join(struct.pack("<I", len(one)) + one for one in records))
    return path


def message(**fields: int | bytes | Message) -> Message:
    """Fields by number: f1=…"""
    made = Message()
    for name, value in fields.items():
        made.set(int(name[1:]), value)
    return made


def test_unchanged_records_are_saved_byte_for_byte(tmp_path: Path) -> None:
    odd = bytes.fromhex(
        "08ac02 08ac02 1a03616263 0d01020304 110102030405060708 f80101"
    )  # of every wire type, one twice
    path = image(tmp_path / "x.img", odd, b"", odd * 3)
    before = path.read_bytes()
    ImageFile(path).save()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_changing_a_field_keeps_the_others(tmp_path: Path) -> None:
    path = image(tmp_path / "x.img", message(f1=7, f3=message(f2=5, f21=19), f9=b"kept").serialise())
    read = ImageFile(path)
    inner = read.records[0].inner(3)
    assert inner is not None and inner.number(21) == 19
    inner.set(21, 22)
    read.records[0].set(3, inner)
    read.save()
    assert ImageFile(path).records[0].serialise() == message(f1=7, f3=message(f2=5, f21=22), f9=b"kept").serialise()


@pytest.mark.parametrize("data", ["05000000 0801", "01000000 0a", "02000000 0a05", "01000000 0f"])
def test_truncated_or_invalid_image_is_malformed(tmp_path: Path, data: str) -> None:
    path = tmp_path / "x.img"
    path.write_bytes(HEAD + bytes.fromhex(data))
    with pytest.raises(Malformed):
        ImageFile(path)


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_varint_round_trip(number: int) -> None:
    encoded = varint(number)
    assert read_varint(b"x" + encoded + b"x", 1) == (number % (1 << 64), 1 + len(encoded))


@given(st.binary(max_size=64))
def test_any_bytes_parse_to_the_same_bytes_or_are_malformed(data: bytes) -> None:
    try:
        message = Message.parse(data)
    except Malformed:
        return
    assert message.serialise() == data
    assert message.copy().serialise() == data


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, (1 << 64) - 1) | st.binary(max_size=9))))
def test_set_fields_are_read_back(pairs: list[tuple[int, int | bytes]]) -> None:
    made = Message()
    for number, value in pairs:
        made.set(number, value)
    read = Message.parse(made.serialise())
    for number, value in dict(pairs).items():
        assert read.has(number)
        assert (read.number(number, -1) if isinstance(value, int) else read.content(number)) == value
    assert [field.number for field in fields(made.serialise())] == sorted(dict(pairs))


def test_set_replaces_a_field_where_it_is() -> None:
    read = Message.parse(bytes.fromhex("1805 0801 1007"))  # fields 3, 1, 2
    read.set(1, 2)
    assert read.serialise().hex() == "180508021007"


def test_last_occurrence_of_a_field_counts() -> None:
    read = Message.parse(bytes.fromhex("0801 0802 120161 120162"))
    assert (read.number(1), read.content(2)) == (2, b"b")


def test_numbers_reads_varints_only() -> None:
    assert numbers(bytes.fromhex("0807 2801")) == {1: 7, 5: 1}
    with pytest.raises(Malformed):
        numbers(bytes.fromhex("0a0161"))


def test_edited_changes_every_record() -> None:
    before = protobuf.with_records(HEAD, [message(f1=n, f9=b"kept").serialise() for n in range(3)])
    after = edited(before, lambda entry: entry.set(1, entry.number(1) + 10))
    assert after == protobuf.with_records(HEAD, [message(f1=n + 10, f9=b"kept").serialise() for n in range(3)])
