"""Check the RPC codec against known bytes, and against the protobuf library as the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.criu import rpc
from cmdop_migrate.criu.protobuf import Malformed
from cmdop_migrate.criu.rpc import SCHEMA, ReqType, decode, encode

KNOWN = [
    ("req", {"type": ReqType.VERSION}, "080a"),
    ("req", {"type": ReqType.NOTIFY, "notify_success": True}, "08061801"),
    ("req", {"type": 1, "opts": {"images_dir_fd": 5, "pid": 300}}, "08011205080510ac02"),
    ("opts", {"images_dir_fd": -1}, "08ffffffffffffffffff01"),
    ("opts", {"ps": {"fd": 7}}, "5a022007"),
    ("opts", {"network_lock": 3, "orphan_pts_master": True}, "900301800403"),
    ("opts", {"external": ["mnt[/a]:k", "x"]}, "aa02096d6e745b2f615d3a6baa020178"),
    ("resp", {"type": 6, "success": True, "notify": {"script": "pre-resume"}}, "080610012a0c0a0a7072652d726573756d65"),
    ("resp", {"type": 2, "success": False, "cr_errno": -3}, "0802100038fdffffffffffffffff01"),
]


def oracle() -> dict[str, Any]:
    """Return the same schema, built for the real protobuf library."""
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="criu_oracle.proto", package="criu_oracle", syntax="proto2")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, many) in fields.items():
            entry = message.field.add(name=field, number=number, label=3 if many else 1)
            if kind in ("int", "bool", "str"):
                entry.type = {"int": types.TYPE_INT64, "bool": types.TYPE_BOOL, "str": types.TYPE_STRING}[kind]
            else:
                entry.type, entry.type_name = types.TYPE_MESSAGE, f".criu_oracle.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"criu_oracle.{name}")) for name in SCHEMA}


ORACLE = oracle()


def values(message: str) -> st.SearchStrategy[dict[str, Any]]:
    def of(kind: str) -> st.SearchStrategy[Any]:
        plain = {
            "int": st.integers(-(1 << 31), (1 << 32) - 1),
            "bool": st.booleans(),
            "str": st.text(max_size=20),
        }
        return plain[kind] if kind in plain else values(kind)

    def chosen(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        fields = ((name, SCHEMA[message][name]) for name in names)
        return st.fixed_dictionaries(
            {name: st.lists(of(f.kind), min_size=1, max_size=3) if f.many else of(f.kind) for name, f in fields}
        )

    return st.lists(st.sampled_from(sorted(SCHEMA[message])), max_size=6, unique=True).flatmap(chosen)


@pytest.mark.parametrize(("message", "fields", "wire"), KNOWN)
def test_known_messages_encode_and_decode(message: str, fields: dict[str, Any], wire: str) -> None:
    assert encode(message, fields).hex() == wire
    assert decode(message, bytes.fromhex(wire)) == fields


@given(values("req"))
def test_protobuf_library_reads_encoded_requests(fields: dict[str, Any]) -> None:
    data = encode("req", fields)
    assert ORACLE["req"].FromString(data).SerializeToString(deterministic=True) == data
    assert decode("req", data) == fields


@given(values("resp"))
def test_decode_reads_messages_of_the_protobuf_library(fields: dict[str, Any]) -> None:
    assert decode("resp", ORACLE["resp"](**fields).SerializeToString()) == fields


def test_field_numbers_are_unique() -> None:
    for fields in SCHEMA.values():
        numbers = [field.number for field in fields.values()]
        assert len(numbers) == len(set(numbers))


def test_unknown_fields_of_every_wire_type_are_skipped() -> None:
    future = bytes.fromhex("f80705 fa07026162 f9070102030405060708 fd0701020304")
    assert decode("resp", encode("resp", {"type": 2, "success": True}) + future) == {"type": 2, "success": True}


def test_misspelt_option_raises_key_error() -> None:
    with pytest.raises(KeyError):
        encode("opts", {"orphan_pts": True})


@pytest.mark.parametrize("wire", ["08", "5a05", "0b", "0880808080808080808080808001", "52ff01", "0a00", "f907"])
def test_broken_bytes_raise_malformed(wire: str) -> None:
    with pytest.raises(Malformed):
        decode("opts", bytes.fromhex(wire))


@given(st.binary(max_size=64))
def test_any_bytes_decode_or_raise_malformed(data: bytes) -> None:
    try:
        assert isinstance(rpc.decode("resp", data), dict)
    except Malformed:
        pass
