"""Test the table of a file layer: round trips, and refusal of malicious tables."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.files import stat_cache
from cmdop_migrate.images.files.file_table import CHUNK, Entry, Extent, FileTable, parse
from cmdop_migrate.images.files.unpack import restore
from tests.support.memory_chunks import MemoryChunks

REF = "ab" * 32
ROOT: list[Any] = ["d", 0, "", 0o755, 0, 0, 0, []]


def _file(name: str = "f", depth: int = 1, size: int = 0, extents: tuple[int, ...] = (), **other: Any) -> list[Any]:
    return ["f", depth, name, 0o644, 0, 0, 0, other.get("xattrs", []), size, list(extents)]


def _data(*rows: Any, chunks: tuple[Any, ...] = (REF,), **header: Any) -> bytes:
    top = {"format": "cmdop-files", "version": 1, "live": False, "chunks": len(chunks), "entries": len(rows)} | header
    return "".join(json.dumps(line) + "\n" for line in (top, *chunks, *rows)).encode()


def _meta(kind: str, name: str, depth: int = 1, *more: Any) -> list[Any]:
    return [kind, depth, name, 0o644, 0, 0, 0, [], *more]


def test_valid_file_table_is_parsed() -> None:
    table = parse(_data(ROOT, _meta("d", "a"), _file("x", 2, 10, (0, 10, 0, 5)), ["h", 1, "b", 2]))
    assert [path for path, _ in table.paths()] == [b"", b"a", b"a/x", b"b"]
    assert table.entries[2].extents == (Extent(0, 10, 0, 5),)
    assert parse(table.serialise()) == table
    assert table.data_bytes == 10


@pytest.mark.parametrize(
    ("why", "data"),
    [
        ("a name that is ..", _data(ROOT, _file(".."))),
        ("a name that is .", _data(ROOT, _file("."))),
        ("an absolute name", _data(ROOT, _file("/etc/passwd"))),
        ("a path for a name", _data(ROOT, _file("a/../../b"))),
        ("an empty name", _data(ROOT, _file(""))),
        ("a NUL in a name", _data(ROOT, _file("a\0b"))),
        ("a surrogate that stands for no byte", _data(ROOT, _file("\ud800"))),
        ("a name over 255 bytes", _data(ROOT, _file("é" * 128))),
        ("a name twice", _data(ROOT, _file("a"), _file("a"))),
        ("a name twice in two spellings", _data(ROOT, _file("é"), _file("\udcc3\udca9"))),
        ("siblings out of order", _data(ROOT, _file("b"), _file("a"))),
        ("a second root", _data(ROOT, ROOT)),
        ("no root", _data(_file("a"))),
        ("a root that is a file", _data(_file("", 0))),
        ("nothing", _data()),
        ("a child of a file", _data(ROOT, _file("a"), _file("b", 2))),
        ("a child of a symlink", _data(ROOT, _meta("l", "a", 1, "/etc"), _file("b", 2))),
        ("a level left out", _data(ROOT, _meta("d", "a"), _file("b", 3))),
        ("a negative depth", _data(ROOT, _file("a", -1))),
        ("a hard link to itself", _data(ROOT, ["h", 1, "a", 1])),
        ("a hard link to a later file", _data(ROOT, ["h", 1, "a", 2], _file("b"))),
        ("a hard link to nothing", _data(ROOT, ["h", 1, "a", 99])),
        ("a hard link from the end", _data(ROOT, _file("a"), ["h", 1, "b", -1])),
        ("a hard link to a directory", _data(ROOT, ["h", 1, "a", 0])),
        ("a hard link to a device", _data(ROOT, _meta("b", "a", 1, 8, 0), ["h", 1, "b", 1])),
        ("a hard link to a hard link", _data(ROOT, _file("a"), ["h", 1, "b", 1], ["h", 1, "c", 2])),
        ("a hard link with a mode", _data(ROOT, _file("a"), ["h", 1, "b", 1, 0o4755])),
        ("a negative size", _data(ROOT, _file(size=-1))),
        ("an absurd size", _data(ROOT, _file(size=1 << 60))),
        ("a size that is no integer", _data(ROOT, _file(size=True))),
        ("a fractional size", _data(ROOT, _meta("f", "a", 1, 1.0, []))),
        ("overlapping extents", _data(ROOT, _file("a", 1, 20, (0, 10, 0, 0, 9, 5, 0, 0)))),
        ("extents out of order", _data(ROOT, _file("a", 1, 20, (10, 5, 0, 0, 0, 5, 0, 0)))),
        ("an extent past the end", _data(ROOT, _file("a", 1, 20, (15, 6, 0, 0)))),
        ("an empty extent", _data(ROOT, _file("a", 1, 20, (0, 0, 0, 0)))),
        ("an extent in no chunk", _data(ROOT, _file("a", 1, 20, (0, 5, 1, 0)))),
        ("an extent in chunk -1", _data(ROOT, _file("a", 1, 20, (0, 5, -1, 0)))),
        ("an extent past a chunk", _data(ROOT, _file("a", 1, 20, (0, 5, 0, CHUNK - 4)))),
        ("half an extent", _data(ROOT, _file("a", 1, 20, (0, 5, 0)))),
        ("an unknown kind", _data(ROOT, _meta("x", "a"))),
        ("a kind that is no text", _data(ROOT, [["f"], 1, "a", 0])),
        ("a whiteout written as a device", _data(ROOT, _meta("c", "a", 1, 0, 0))),
        ("a device number out of range", _data(ROOT, _meta("b", "a", 1, 1 << 12, 0))),
        ("a symlink to nothing", _data(ROOT, _meta("l", "a", 1, ""))),
        ("a symlink with a NUL", _data(ROOT, _meta("l", "a", 1, "a\0"))),
        ("a file type in the mode", _data(ROOT, ["d", 1, "a", 0o100644, 0, 0, 0, []])),
        ("uid -1, which means unchanged", _data(ROOT, ["d", 1, "a", 0o644, 2**32 - 1, 0, 0, []])),
        ("a time no filesystem has", _data(ROOT, ["d", 1, "a", 0o644, 0, 0, 1 << 93, []])),
        ("a redirect into the lower layer", _data(ROOT, _file(xattrs=["trusted.overlay.redirect", "L2V0Yw=="]))),
        ("a metacopy", _data(ROOT, _file(xattrs=["trusted.overlay.metacopy", ""]))),
        ("an origin", _data(ROOT, _file(xattrs=["trusted.overlay.origin", ""]))),
        ("an attribute of no known kind", _data(ROOT, _file(xattrs=["system.other", ""]))),
        ("an attribute twice", _data(ROOT, _file(xattrs=["user.a", "", "user.a", ""]))),
        ("an attribute that is no base64", _data(ROOT, _file(xattrs=["user.a", "*"]))),
        ("an attribute without a value", _data(ROOT, _file(xattrs=["user.a"]))),
        ("a chunk id that is a path", _data(ROOT, chunks=("../" + REF,))),
        ("a chunk id that is no text", _data(ROOT, chunks=(7,))),
        ("fewer entries than promised", _data(ROOT, entries=2)),
        ("more entries than promised", _data(ROOT, _file(), entries=1)),
        ("a negative count", _data(ROOT, chunks=(), entries=-1)),
        ("an unknown header field", _data(ROOT, more=1)),
        ("no end of line", _data(ROOT)[:-1]),
        ("no bytes", b""),
        ("deep JSON", b"[" * 200_000 + b"\n"),
        ("a number without end", b"1" * 10_000 + b"\n"),
    ],
)
def test_malicious_file_tables_are_refused(why: str, data: bytes) -> None:
    with pytest.raises(ImageRefused) as refused:
        parse(data)
    assert refused.value.exit == 7, why
    assert refused.value.hint, why


def test_file_table_of_another_version_names_the_version() -> None:
    with pytest.raises(ImageRefused, match="version 3"):
        parse(_data(ROOT, version=3))


@pytest.mark.parametrize("row", [_meta("b", "disk", 1, 8, 0), _meta("c", "mem", 1, 1, 1)])
def test_unexpected_devices_are_refused_before_anything_is_created(tmp_path: Path, row: list[Any]) -> None:
    table = parse(_data(ROOT, _file("a"), row))
    with pytest.raises(ImageRefused, match=row[2]):
        restore(table, MemoryChunks(), tmp_path)
    assert os.listdir(tmp_path) == []


SOUND = _data(
    ROOT,
    _meta("d", "a"),
    _file("x", 2, 4096, (0, 10, 0, 5, 4000, 3, 0, 20), xattrs=["user.a", "AAAA"]),
    ["h", 1, "b", 2],
    _meta("c", "c", 1, 1, 3),
    _meta("l", "d", 1, "../../etc"),
    _meta("w", "\udcff"),
)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 3), st.binary(max_size=6)), min_size=1, max_size=4
    )
)
def test_mutated_bytes_parse_or_are_refused(edits: list[tuple[int, int, bytes]]) -> None:
    data = SOUND
    for at, cut, put in edits:
        data = data[:at] + put + data[at + cut :]
    try:
        table = parse(data)
    except ImageRefused:
        return
    assert parse(table.serialise()) == table
    for path, _ in table.paths():
        assert not path.startswith(b"/") and not {b"..", b"."} & set(path.split(b"/"))


_rows = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 64)
    | st.text(max_size=5)
    | st.sampled_from(["d", "f", "l", "h", "c"]),
    lambda inner: st.lists(inner, max_size=10),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_rows, max_size=4), st.lists(_rows, max_size=2))
def test_any_json_parses_or_is_refused(rows: list[Any], chunks: list[Any]) -> None:
    try:
        table = parse(_data(ROOT, *rows, chunks=tuple(chunks)))
    except ImageRefused as error:
        assert error.hint
    else:
        assert len(table.entries) == len(rows) + 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(st.binary(min_size=1, max_size=40).filter(lambda n: b"/" not in n and b"\0" not in n), max_size=8))
def test_any_name_round_trips(names: set[bytes]) -> None:
    names -= {b".", b".."}
    entries = (Entry("d", 0, b"", 0o755), *(Entry("l", 1, name, 0o777, target=name) for name in sorted(names)))
    table = FileTable(entries, ())
    assert parse(table.serialise()) == table


def test_stats_belong_to_one_table() -> None:
    table = parse(SOUND)
    stats = tuple(stat_cache.Stat(n, 2, 3, 4) if n % 2 else None for n in range(len(table.entries)))
    data = stat_cache.serialise(table, stats)
    assert stat_cache.parse(data, table) == stats
    assert stat_cache.parse(data, FileTable(table.entries, ("cd" * 32,))) is None
    for damaged in (b"", b"{}", b"[]", b"7", data[:-3], b"[" * 100):
        assert stat_cache.parse(damaged, table) is None


def _directory(name: str, redirect: str, depth: int = 1, kind: str = "d") -> list[Any]:
    value = base64.b64encode(redirect.encode()).decode()
    return [kind, depth, name, 0o755, 0, 0, 0, ["trusted.overlay.redirect", value]]


@pytest.mark.parametrize("redirect", ["old", "/a/b/old", "ö x"])
def test_renamed_directory_raises_the_table_version(redirect: str) -> None:
    table = parse(_data(ROOT, _directory("new", redirect), _file("x", 2), version=2))
    assert json.loads(table.serialise().split(b"\n")[0])["version"] == 2
    assert parse(table.serialise()) == table


@pytest.mark.parametrize("redirect", ["", "/", "..", ".", "/a/../b", "/a//b", "/a/", "a/b", "a\0b", "/a/."])
def test_redirect_outside_the_layer_is_refused(redirect: str) -> None:
    with pytest.raises(ImageRefused, match="redirected"):
        parse(_data(ROOT, _directory("new", redirect), version=2))


@pytest.mark.parametrize(
    "data",
    [
        _data(_directory("", "old", 0), version=2),
        _data(ROOT, _directory("new", "old", kind="p"), version=2),
        _data(ROOT, _directory("new", "old")),
        _data(ROOT, version=2),
    ],
    ids=["the root", "a fifo", "version 1", "version 2 without any"],
)
def test_redirect_on_a_wrong_entry_is_refused(data: bytes) -> None:
    with pytest.raises(ImageRefused):
        parse(data)
