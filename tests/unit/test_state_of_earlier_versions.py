"""Test that state on disk written by an earlier version is read by this one (tests/golden/state-1)."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from cmdop_migrate.images.format import keys
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.read.verify import verify
from cmdop_migrate.images.store import catalog, deletion_marks
from cmdop_migrate.images.store.index_cache import IndexCache
from cmdop_migrate.images.store.keep_policy import KeepPolicy
from cmdop_migrate.images.store.prune import prune
from cmdop_migrate.images.write.fingerprints import BlockFingerprints
from cmdop_migrate.images.write.writer import ImageWriter, WriterOptions
from cmdop_migrate.lease.registry import open_lease
from cmdop_migrate.lease.store import Held
from cmdop_migrate.remote.inventory import Inventory
from cmdop_migrate.storage.local import LocalStore
from tests.unit.images.image_helpers import add_run

ARCHIVE = Path(__file__).parents[1] / "golden" / "state-1" / "state.tar.gz"
START = 0x100000
MEMORY = b"".join((b"window %02d" % number).ljust(16, b".") * 4096 for number in range(16))


@dataclass(frozen=True)
class State:
    root: Path
    ring: KeyRing
    store: LocalStore
    ids: dict[str, str]


@pytest.fixture
def state(tmp_path: Path) -> State:
    root = tmp_path / "state"
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    (root / "key").chmod(0o600)
    return State(root, keys.load(root / "key"), LocalStore(root / "store"), json.loads((root / "ids.json").read_text()))


def memory_of(state: State, checkpoint: str, local: Path) -> bytes:
    image = reader.fetch(state.store, state.ring, checkpoint, local)
    try:
        pages = image.pages("process-1")
        return b"".join(b"".join(pages.read(START + at, 16)) for at in range(0, len(MEMORY), 16 * 4096))
    finally:
        image.close()


def test_checkpoint_and_fork_of_an_earlier_version_are_read(state: State, tmp_path: Path) -> None:
    manifest = catalog.load(state.store, state.ring, state.ids["checkpoint"], "5e5510")
    assert (manifest.token, manifest.facts["name"], manifest.is_fork) == (7, "x", False)
    assert memory_of(state, state.ids["checkpoint"], tmp_path / "local") == MEMORY
    fork = catalog.load(state.store, state.ring, state.ids["fork"], "abcd1234")
    assert fork.is_fork and fork.parent == state.ids["checkpoint"]
    assert verify(state.store, state.ring, state.ids["fork"]).chunks == len(MEMORY) // (64 << 10) + 2


def test_next_checkpoint_reuses_fingerprints_and_chunks_of_an_earlier_version(state: State, tmp_path: Path) -> None:
    fingerprints = BlockFingerprints(Sealer(state.ring.current))
    fingerprints.load(state.root / "memory.groups", state.ids["checkpoint"])
    assert fingerprints, "the file is sealed for its checkpoint and opens"
    options = WriterOptions(
        workers=1, uploaders=1, pack_buffers=3, defer=True, fingerprints=state.root / "memory.groups"
    )
    writer = ImageWriter(state.store, state.ring, "5e5510", tmp_path / "spill", state.ids["checkpoint"], options)
    writer.begin()
    add_run(writer, "process-1", START, len(MEMORY) // 4096, 4, MEMORY)
    writer.end_input()
    manifest = writer.commit(8)
    assert manifest.sizes["reused"] >= len(MEMORY) and manifest.sizes["new_chunks"] <= 1, (
        "at most the page table is new"
    )
    assert memory_of(state, manifest.checkpoint, tmp_path / "again") == MEMORY


def test_index_cache_of_an_earlier_version_is_read(state: State) -> None:
    [path] = (state.root / "ledgers").glob("*.db")
    cache = IndexCache(state.ring.current, path)
    manifest = catalog.load(state.store, state.ring, state.ids["checkpoint"], "5e5510")
    packs = cache.packs()
    cache.rely_on(packs)
    assert packs & set(manifest.packs) and not cache.is_broken
    cache.close()


def test_deletion_mark_of_an_earlier_version_is_honoured(state: State) -> None:
    [mark], unreadable = deletion_marks.read_all(state.store)
    assert not mark.active and set(mark.packs) == {state.ids["waiting"]} and not unreadable
    assert deletion_marks.packs_marked(state.store) == {state.ids["waiting"]}
    [upload] = state.store.list("uploads/")
    state.store.delete([upload.name])
    done = prune(state.store, state.ring, KeepPolicy(), lambda _: False)
    assert (done.packs, done.waiting) == (1, 0), "the upload that kept the pack has ended"
    assert verify(state.store, state.ring, state.ids["checkpoint"]).chunks


def test_lease_of_an_earlier_version_is_acquired(state: State) -> None:
    leases = open_lease(f"sqlite://{state.root}/lease.db")
    view = leases.inspect("5e5510")
    assert view is not None and (view.record.state, view.record.token) == ("parked", 1)
    lease = leases.acquire("5e5510", "host-b", "instance2", 15.0, expect_checkpoint=state.ids["checkpoint"])
    assert isinstance(lease, Held) and lease.token == 2
    leases.close()


def test_hosts_of_an_earlier_version_are_read(state: State, tmp_path: Path) -> None:
    target = Inventory(state.root, (), tmp_path).find("b")
    assert (target.address, target.port, target.user) == ("10.0.0.2", 2222, "root")
