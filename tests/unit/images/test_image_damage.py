"""Test that anything not exactly as sealed is refused, and none of it is given out: an image is code."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_helpers import SESSION, checkpoint, read_all

from cmdop_migrate.errors import CheckpointNotFound, ImageRefused
from cmdop_migrate.images.format import layout, manifest, packs
from cmdop_migrate.images.format.chunk_table import ChunkTable
from cmdop_migrate.images.format.codec import RAW, ZSTD, Codec
from cmdop_migrate.images.format.keys import KeyRing, new_key
from cmdop_migrate.images.format.seal import CHUNK, INDEX, Sealer
from cmdop_migrate.images.format.windows import PageTable
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.read.verify import verify
from cmdop_migrate.images.store import index
from cmdop_migrate.storage.memory import MemoryStore

RING = KeyRing((new_key(),))
SEALER = Sealer(RING.current)
FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], manifest.Manifest, dict[str, bytes]]:
    """Return the objects of a store with one checkpoint, its manifest, and its content."""
    base, store = tmp_path_factory.mktemp("made"), MemoryStore()
    found = checkpoint(store, RING, base / "spill")
    objects = {info.name: store.get(info.name) for info in store.list()}
    return objects, found, read_all(store, RING, found.checkpoint, base / "local")


def store_of(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for name, data in objects.items():
        store.put(name, data)
    return store


def read_or_refuse(store: MemoryStore, found: manifest.Manifest, expected: dict[str, bytes], local: Path) -> bool:
    """Return True if the image is refused; otherwise require that its content is right."""
    try:
        got = read_all(store, RING, found.checkpoint, local)
    except ImageRefused:
        return True
    assert got == expected
    return False


def test_flipped_bit_in_any_object_is_refused(made, tmp_path):
    objects, found, expected = made
    draw = random.Random(1)
    for name, data in objects.items():
        last = len(data) - 1
        for at in sorted({0, 1, 7, 8, 24, last - 40, last - 9, last - 1, last, *draw.sample(range(len(data)), 60)}):
            bad = bytearray(data)
            bad[at] ^= 1 << draw.randrange(8)
            store = store_of({**objects, name: bytes(bad)})
            with pytest.raises(ImageRefused):
                verify(store, RING, found.checkpoint)
            refused = read_or_refuse(store, found, expected, tmp_path / "local")
            assert refused or not name.startswith(layout.MANIFESTS), f"{name} at {at}"


def test_verify_reports_damaged_index_as_harmless(made, tmp_path):
    objects, found, expected = made
    store = store_of({**objects, layout.index_name(found.checkpoint): b"CMDOPIX1 and nothing more"})
    with pytest.raises(ImageRefused, match="can still be restored"):
        verify(store, RING, found.checkpoint)
    assert read_all(store, RING, found.checkpoint, tmp_path / "local") == expected


def test_truncated_extended_and_missing_objects_are_refused(made, tmp_path):
    objects, found, expected = made
    for name, data in objects.items():
        for cut in (0, 1, 20, len(data) // 2, len(data) - 1):
            store = store_of({**objects, name: data[:cut]})
            with pytest.raises(ImageRefused):
                verify(store, RING, found.checkpoint)
            read_or_refuse(store, found, expected, tmp_path / "local")
        with pytest.raises(ImageRefused):
            verify(store_of({**objects, name: data + b"\0"}), RING, found.checkpoint)
    rest = {name: data for name, data in objects.items() if not name.startswith(layout.PACKS)}
    with pytest.raises(ImageRefused, match="missing"):
        reader.fetch(store_of(rest), RING, found.checkpoint, tmp_path)
    with pytest.raises(CheckpointNotFound):
        reader.fetch(MemoryStore(), RING, found.checkpoint, tmp_path)


def test_swapped_packs_and_replayed_versions_are_refused(tmp_path):
    store = MemoryStore()
    first = checkpoint(store, RING, tmp_path / "spill", seed=1)
    second = checkpoint(store, RING, tmp_path / "spill", seed=2)
    one = layout.pack_name(first.packs[0])
    two = layout.pack_name(next(pack for pack in second.packs if pack not in first.packs))
    data_one, data_two = store.get(one), store.get(two)
    store.put(one, data_two)
    store.put(two, data_one)
    for found in (first, second):
        with pytest.raises(ImageRefused):
            verify(store, RING, found.checkpoint)
        with pytest.raises(ImageRefused):
            reader.fetch(store, RING, found.checkpoint, tmp_path / "local")
    store.put(one, data_one)
    store.put(two, data_two)
    # An older manifest replayed under the name of a newer one, of another session, or of a made-up one.
    store.put(second.name, store.get(first.name))
    other = layout.manifest_name("abcd", first.checkpoint)
    store.put(other, store.get(first.name))
    with pytest.raises(ImageRefused, match="signature"):
        verify(store, RING, second.checkpoint)
    store.delete([first.name])
    with pytest.raises(ImageRefused, match="signature"):
        verify(store, RING, first.checkpoint)


def test_swapped_chunks_inside_a_pack_are_refused(tmp_path):
    store = MemoryStore()
    found = checkpoint(store, RING, tmp_path, shared=random.Random(1).randbytes(1 << 18))
    name = layout.pack_name(found.packs[0])
    data = store.get(name)
    rows = packs.read_trailer(found.packs[0], data, len(data), SEALER)
    same = [(a, b) for a in rows for b in rows if a[1] < b[1] and a[2] == b[2] and a[0] != b[0]]
    (_, first, length, _), (_, second, _, _) = same[0]
    bad = bytearray(data)
    bad[first : first + length] = data[second : second + length]
    bad[second : second + length] = data[first : first + length]
    store.put(name, bad)
    with pytest.raises(ImageRefused):
        verify(store, RING, found.checkpoint)
    with pytest.raises(ImageRefused):
        reader.fetch(store, RING, found.checkpoint, tmp_path / "local")


def test_chunk_opens_only_under_the_identity_it_was_sealed_with(made):
    data = b"x" * 1000
    ident = SEALER.id_of(data)
    sealed = SEALER.seal(CHUNK, ident, RAW, data, len(data))
    assert SEALER.open_chunk(ident, sealed, 1000, Codec()) == data
    for size in (999, 1001):
        with pytest.raises(ImageRefused):
            SEALER.open_into(memoryview(bytearray(size)), ident, sealed, Codec())
    with pytest.raises(ImageRefused):
        SEALER.open_into(memoryview(bytearray(1000)), SEALER.id_of(b"y"), sealed, Codec())
    for kind, other, size in ((INDEX, ident, 1000), (CHUNK, SEALER.id_of(b"y"), 1000), (CHUNK, ident, 999)):
        with pytest.raises(ImageRefused):
            SEALER.check(kind, other, sealed, size)
    with pytest.raises(ImageRefused):
        Sealer(new_key()).check(CHUNK, ident, sealed, 1000)
    forged = SEALER.seal(CHUNK, ident, RAW, b"z" * 1000, 1000)
    with pytest.raises(ImageRefused, match="id"):
        SEALER.open_chunk(ident, forged, 1000, Codec())


def test_decompression_bomb_is_refused():
    codec = Codec()
    kind, bomb = codec.pack(bytes(1 << 20))
    assert kind == ZSTD and len(bomb) < 200
    with pytest.raises(ImageRefused):
        codec.unpack(ZSTD, bomb, 4096)
    with pytest.raises(ImageRefused):
        codec.unpack(ZSTD, bomb, (1 << 20) + 1)
    with pytest.raises(ImageRefused):
        codec.unpack(9, b"", 0)


def test_wrong_key_is_refused(made, tmp_path):
    objects, found, _ = made
    with pytest.raises(ImageRefused, match="does not have"):
        reader.fetch(store_of(objects), KeyRing((new_key(),)), found.checkpoint, tmp_path)


def resign(found: manifest.Manifest, change: dict[str, object]) -> bytes:
    """Return a manifest changed by an attacker who has the key: only validation can refuse it."""
    original = manifest._canonical

    def changed(table):
        return original({**table, **change} if "packs" in table else table)

    manifest._canonical = changed
    try:
        return manifest.encode(found, RING.current)
    finally:
        manifest._canonical = original


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": True},
        {"session": "../../etc"},
        {"checkpoint": "abcd" * 8},
        {"token": -1},
        {"token": 1.5},
        {"created": "now"},
        {"parent": "/"},
        {"packs": ["zz"]},
        {"packs": "abc"},
        {"table": [["00", 0, 0, 0, 0]]},
        {"table": [["00" * 32, 0, 0, 1 << 40, 10]]},
        {"table": [["00" * 32, 999, 0, 100, 90]]},
        {"blobs": {"../x": [1, [0]]}},
        {"blobs": {"/etc/passwd": [1, [0]]}},
        {"blobs": {"a//b": [1, [0]]}},
        {"blobs": {".hidden": [1, [0]]}},
        {"blobs": {"a": [1 << 60, [0]]}},
        {"blobs": {"a": [1, [1 << 40]]}},
        {"blobs": {"a": [1, ["x"]]}},
        {"blobs": []},
        {"sizes": {"a": -1}},
        {"facts": 3},
        {"extra": 1},
    ],
)
def test_signed_manifest_is_still_validated(made, change, tmp_path):
    objects, found, _ = made
    with pytest.raises(ImageRefused):
        reader.fetch(store_of({**objects, found.name: resign(found, change)}), RING, found.checkpoint, tmp_path)


def test_unknown_image_format_names_the_version(made):
    objects, found, _ = made
    table = json.loads(objects[found.name])
    with pytest.raises(ImageRefused, match="format 2"):
        manifest.decode(SESSION, found.checkpoint, json.dumps({**table, "format": 2}).encode(), RING)


def refuses(call, *args) -> None:
    try:
        call(*args)
    except ImageRefused:
        pass


@FUZZ
@given(st.binary(max_size=400))
def test_fuzz_readers_with_noise(data):
    refuses(manifest.decode, SESSION, "abcd", data, RING)
    refuses(index.decode, "abcd", data, RING)
    refuses(PageTable.decode, data)
    refuses(SEALER.check, CHUNK, bytes(32), data, 100)
    refuses(packs.trailer_length, data, RING.current.fingerprint)
    refuses(packs.read_trailer, "ab" * 16, data, len(data), SEALER)
    refuses(Codec().unpack, ZSTD, data, 100)
    try:
        ChunkTable.decode(data)
    except ValueError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = ["format", "session", "checkpoint", "token", "created", "parent", "packs", "table", "blobs", "sizes", "facts"]


@FUZZ
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=4))
def test_fuzz_manifest_fields(change):
    base = {
        "format": 1, "session": "abcd", "checkpoint": "abcd", "token": 1, "created": 1.0, "parent": None,
        "packs": ["ab" * 16], "table": [], "blobs": {}, "sizes": {}, "facts": {},
    }  # fmt: skip
    refuses(manifest._fields, {**base, **change}, "key")


@FUZZ
@given(st.binary(max_size=300), st.data())
def test_fuzz_envelope(body, data):
    envelope = {"format": 1, "key": RING.current.fingerprint, "body": "", "signature": "00" * 64}
    envelope[data.draw(st.sampled_from(sorted(envelope)))] = data.draw(JSON)
    refuses(manifest.decode, SESSION, "abcd", json.dumps(envelope).encode(), RING)


@FUZZ
@given(st.data())
def test_fuzz_tables_that_were_valid(data):
    table = ChunkTable()
    number = table.pack_number("ab" * 16)
    from cmdop_migrate.images.format.chunk_table import Place

    for at in range(5):
        table.add(bytes([at]) * 32, Place(number, at * 100, 100, 4096))
    body = bytearray(table.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        ChunkTable.decode(body[: data.draw(st.integers(0, len(body)))])
    except ValueError:
        pass
