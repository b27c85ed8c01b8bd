"""Test that every listed checkpoint can be read after uploads, prunes and kills in any order."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_helpers import SESSION, SMALL, Dying, Turns, Wrapped, add_run, checkpoint, memory, script, sticky

from cmdop_migrate.errors import CheckpointNotFound, StoreDenied, StoreUnreachable
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.keys import KeyRing, new_key
from cmdop_migrate.images.read.verify import verify
from cmdop_migrate.images.store import catalog, deletion_marks, index
from cmdop_migrate.images.store.catalog import ListedCheckpoint
from cmdop_migrate.images.store.keep_policy import KeepPolicy, to_drop
from cmdop_migrate.images.store.prune import prune
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.storage.base import ObjectInfo, Store
from cmdop_migrate.storage.local import LocalStore
from cmdop_migrate.storage.memory import MemoryStore
from tests.support import disk

RING = KeyRing((new_key(),))
SHARED = memory(99, 64)
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def nobody(_session: str) -> bool:
    return False


def assert_all_readable(store: Store) -> int:
    entries = list(catalog.listed(store))
    for entry in entries:
        verify(store, RING, entry.checkpoint, parallel=1)
    return len(entries)


@pytest.fixture(autouse=True, scope="module", params=["listed", "listed in parts"])
def _packs(request: pytest.FixtureRequest) -> Iterator[None]:
    """List the packs of a large store in parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "LISTED", 0 if request.param != "listed" else index.LISTED)
        yield


def upload(store: Store, spill, seed: int) -> None:
    try:
        checkpoint(store, RING, spill, seed=seed, session=f"5e55{seed % 2}0", shared=SHARED)
    except StoreUnreachable:
        pass


def clean(store: Store, last: int = 1) -> None:
    try:
        prune(store, RING, KeepPolicy(last=last), nobody)
    except StoreUnreachable:
        pass


class Aged(Wrapped):
    """Make every upload mark look abandoned."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix):
            yield replace(info, modified=0.0) if info.name.startswith(layout.UPLOADS) else info


def entry(session: str, number: int, age: float) -> ListedCheckpoint:
    return ListedCheckpoint(session, f"{number:08x}", 1000.0 - age, 1)


def test_keep_policy():
    entries = [entry("aaaa", n, age=n * 10) for n in range(5)] + [entry("bbbb", 9, age=500)]
    drop = lambda keep, parked=nobody: {e.checkpoint[-1] for e in to_drop(entries, keep, 1000.0, parked)}  # noqa: E731
    assert drop(KeepPolicy()) == set()
    assert drop(KeepPolicy(last=2)) == {"2", "3", "4"}
    assert drop(KeepPolicy(within=15)) == {"2", "3", "4", "9"}
    assert drop(KeepPolicy(within=15), lambda s: s == "bbbb") == {"2", "3", "4"}
    assert drop(KeepPolicy(last=1, within=25)) == {"3", "4"}
    assert drop(KeepPolicy(last=0), lambda s: True) == {"1", "2", "3", "4"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=20), st.integers(0, 3))
def test_keep_policy_never_drops_the_newest_of_a_parked_session(rows, last):
    entries = [entry(session * 4, n, age) for n, (session, age) in enumerate(rows)]
    dropped = to_drop(entries, KeepPolicy(last=last), 1000.0, lambda session: True)
    for session in {e.session for e in entries}:
        newest = max(e.modified for e in entries if e.session == session)
        assert all(e.modified < newest for e in dropped if e.session == session)


def test_prune_removes_only_packs_that_no_checkpoint_needs(store, spill):
    first = checkpoint(store, RING, spill, seed=1, shared=SHARED)
    second = checkpoint(store, RING, spill, seed=2, shared=SHARED, parent=first.checkpoint)
    alone = checkpoint(store, RING, spill, seed=3, session="abcd")
    done = prune(store, RING, KeepPolicy(last=0), lambda session: session == SESSION, also=[first.checkpoint])
    assert set(done.checkpoints) == {first.checkpoint, alone.checkpoint}
    left = {layout.pack_of(info.name) for info in store.list(layout.PACKS)}
    assert left == set(second.packs) and done.packs == len(set(alone.packs) - left)
    assert assert_all_readable(store) == 1
    prune(store, RING, KeepPolicy(last=0), nobody)
    assert list(store.list()) == [], "an empty store is empty"


def test_prune_dry_run_changes_nothing(store, spill):
    checkpoint(store, RING, spill, seed=1)
    before = dict(store._objects)
    assert len(prune(store, RING, KeepPolicy(last=0), nobody, dry_run=True).checkpoints) == 1
    assert store._objects == before


@pytest.mark.parametrize("error", [StoreDenied, StoreUnreachable])
def test_upload_mark_that_cannot_be_removed_does_not_undo_the_checkpoint(store, spill, error):
    """Publish: reporting a failure would leave a checkpoint that its owner does not know of."""

    class Keeping(Wrapped):
        def before(self, operation: str, name: str) -> None:
            if operation == "delete" and name.startswith(layout.UPLOADS):
                raise error("not that", "none")

    made = checkpoint(Keeping(store), RING, spill)
    assert [entry.checkpoint for entry in catalog.listed(store)] == [made.checkpoint]
    assert assert_all_readable(store) == 1
    assert prune(store, RING, KeepPolicy(last=0), nobody).waiting == len(made.packs), (
        "the mark is believed until it is old"
    )


def test_prune_dry_run_reports_what_a_run_drops(store, spill):
    """Compare a dry run with a run, however long ago the last checkpoint was made."""
    for seed in (1, 2):
        checkpoint(store, RING, spill, seed=seed)
    for name, (data, modified) in list(store._objects.items()):
        store._objects[name] = data, modified - 7200
    would = prune(store, RING, KeepPolicy(within=3600), nobody, dry_run=True).checkpoints
    assert len(would) == 2 and would == prune(store, RING, KeepPolicy(within=3600), nobody).checkpoints


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_store_can_be_pruned(tmp_path, spill):
    """Prune a full store, as its own hint says: dropped manifests make room for the deletion mark."""
    with disk.tmpfs(tmp_path / "small", 4 << 20) as place:
        store = LocalStore(place / "store")
        old, new = checkpoint(store, RING, spill, seed=1, shared=SHARED), checkpoint(store, RING, spill, seed=2)
        assert set(old.packs).isdisjoint(new.packs)
        disk.fill(place)
        with pytest.raises(StoreDenied):
            store.put("more", b"1")
        done = prune(store, RING, KeepPolicy(last=1), nobody)
        assert done.checkpoints == (old.checkpoint,) and done.packs == len(old.packs)
        assert assert_all_readable(store) == 1 and not list(store.list(layout.DELETION_MARKS))


def test_upload_in_progress_keeps_the_packs_it_relies_on(store, spill):
    old = checkpoint(store, RING, spill, seed=1, shared=SHARED)
    writer = ImageWriter(store, RING, SESSION, spill, None, SMALL)
    writer.begin()
    add_run(writer, "process-1", 0x7F0000003000, len(SHARED) // 4096, 4, SHARED)
    writer.finish_input()
    done = prune(store, RING, KeepPolicy(last=0), nobody)
    assert done.checkpoints == (old.checkpoint,) and done.packs == 0 and done.waiting == len(old.packs)
    # A later upload sees the tombstone, and relies on nothing doomed; the next prune still waits for the first.
    later = checkpoint(store, RING, spill, seed=5, session="abcd", shared=SHARED)
    assert set(later.packs).isdisjoint(old.packs)
    assert prune(store, RING, KeepPolicy(), nobody).packs == 0
    found = writer.commit(1)
    assert set(found.packs) & set(old.packs)
    # Needed again: not doomed any more.
    done = prune(store, RING, KeepPolicy(), nobody)
    assert (done.packs, done.waiting) == (0, 0) and deletion_marks.packs_marked(store) == set()
    assert assert_all_readable(store) == 2


def test_waiting_packs_are_deleted_after_the_upload_is_aborted(store, spill):
    old = checkpoint(store, RING, spill, seed=1, shared=SHARED)
    writer = ImageWriter(store, RING, SESSION, spill, None, SMALL)
    writer.begin()
    prune(store, RING, KeepPolicy(last=0), nobody)
    other = ImageWriter(store, RING, "abcd", spill, None, SMALL)
    other.begin()  # began after the tombstone: does not hold the packs back
    writer.abort()
    assert prune(store, RING, KeepPolicy(), nobody).packs == len(old.packs)
    other.abort()
    assert prune(store, RING, KeepPolicy(), nobody).packs == 0
    assert list(store.list()) == []


def test_deletion_mark_taken_over_during_a_listing_is_not_missed(tmp_path, spill):
    plain = LocalStore(tmp_path / "store")
    checkpoint(plain, RING, spill, seed=1, shared=SHARED)
    first = ImageWriter(plain, RING, "abcd", spill, None, SMALL)
    first.begin()  # holds the packs back
    assert prune(plain, RING, KeepPolicy(last=0), nobody).waiting

    class Stopped(LocalStore):
        """Pause between listing a folder and reading its objects, while a prune runs."""

        left = 1

        def stat(self, name: str) -> ObjectInfo | None:
            if name.startswith(layout.DELETION_MARKS) and self.left:
                self.left -= 1
                assert prune(plain, RING, KeepPolicy(last=0), nobody).waiting
            return super().stat(name)

    writer = ImageWriter(Stopped(tmp_path / "store"), RING, SESSION, spill, None, SMALL)
    writer.begin()
    add_run(writer, "process-1", 0x7F0000003000, len(SHARED) // 4096, 4, SHARED)
    writer.finish_input()
    first.abort()
    assert prune(plain, RING, KeepPolicy(last=0), nobody).packs, "nobody relies on what is doomed"
    writer.commit(1)
    assert assert_all_readable(plain) == 1


def test_upload_taken_for_dead_detects_lost_packs(store, spill):
    checkpoint(store, RING, spill, seed=1, shared=SHARED)
    writer = ImageWriter(store, RING, SESSION, spill, None, SMALL)
    writer.begin()
    add_run(writer, "process-1", 0x7F0000003000, len(SHARED) // 4096, 4, SHARED)
    writer.finish_input()
    done = prune(Aged(store), RING, KeepPolicy(last=0), nobody)
    assert done.packs
    with pytest.raises(StoreUnreachable, match="prune"):
        writer.commit(1)
    writer.abort()
    assert assert_all_readable(store) == 0


class Paused(Wrapped):
    """Let two days pass, in which a prune takes the upload for dead: now, or just before its mark is written next."""

    waits, pause = False, 0.0

    def go_by(self) -> None:
        assert prune(Aged(self.inner), RING, KeepPolicy(last=0), nobody).packs
        self.waits, self.pause = False, 2 * 24 * 3600.0

    def before(self, operation: str, name: str) -> None:
        if self.waits and operation == "put" and name.startswith(layout.UPLOADS):
            self.go_by()

    def stat(self, name: str) -> ObjectInfo | None:
        found = super().stat(name)
        return replace(found, modified=found.modified + self.pause) if found is not None else None


@pytest.mark.parametrize("just_before", [False, True])
def test_upload_mark_recreated_after_removal_is_not_trusted(store, spill, just_before):
    """Pause the machine: our own clock does not show it."""
    checkpoint(store, RING, spill, seed=1, shared=SHARED)
    paused = Paused(store)
    writer = ImageWriter(paused, RING, SESSION, spill, None, replace(SMALL, stale_after=14.4))  # a refresh every 0.1 s
    writer.begin()
    add_run(writer, "process-1", 0x7F0000003000, len(SHARED) // 4096, 4, SHARED)
    writer.finish_input()
    if just_before:
        paused.waits = True
    else:
        paused.go_by()
    time.sleep(0.5)
    assert paused.pause
    with pytest.raises(StoreUnreachable, match="prune"):
        writer.commit(1)
    writer.abort()
    assert assert_all_readable(store) == 0


def test_upload_taken_for_dead_without_losses_is_published(store, spill):
    writer = ImageWriter(store, RING, SESSION, spill, None, SMALL)
    writer.begin()
    prune(Aged(store), RING, KeepPolicy(last=0), nobody)
    add_run(writer, "process-1", 0, len(SHARED) // 4096, 4, SHARED)
    writer.commit(1)
    assert assert_all_readable(store) == 1


def test_lapsed_upload_mark_is_not_trusted(store, spill):
    writer = ImageWriter(store, RING, SESSION, spill, None, replace(SMALL, stale_after=1e-9))
    writer.begin()
    add_run(writer, "process-1", 0, len(SHARED) // 4096, 4, SHARED)
    writer.finish_input()
    writer._uploads.wait_stored()
    found = writer.commit(1)
    assert verify(store, RING, found.checkpoint)


def test_unreadable_manifest_keeps_every_pack(store, spill):
    kept = checkpoint(store, RING, spill, seed=1)
    gone = checkpoint(store, RING, spill, seed=2, session="abcd")
    data = bytearray(store.get(kept.name))
    data[40] ^= 1
    store.put(kept.name, data)
    done = prune(store, RING, KeepPolicy(), nobody, also=[gone.checkpoint])
    assert done.unreadable == (kept.checkpoint,) and done.packs == 0
    assert prune(store, RING, KeepPolicy(), nobody, also=[kept.checkpoint]).packs >= 2


@pytest.mark.parametrize("seed", range(3))
def test_prune_killed_at_any_operation_leaves_a_valid_store(spill, seed):
    base = MemoryStore()
    for n in range(4):
        checkpoint(base, RING, spill, seed=n, session=f"5e55{n % 2}0", shared=SHARED if n != seed else b"")
    count = 0
    while True:
        store = MemoryStore()
        store._objects = dict(base._objects)
        dying = Dying(store, count)
        clean(dying)
        assert assert_all_readable(store) >= 2
        upload(store, spill, 7)
        assert_all_readable(store)
        prune(store, RING, KeepPolicy(last=1), nobody)
        assert assert_all_readable(store) == 2
        if dying.left >= 0:
            break
        count += 1
    assert count > 10


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("upload"), st.integers(0, 5), st.integers(0, 40)),
        st.tuples(st.just("prune"), st.integers(0, 2), st.integers(0, 60)),
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(STEPS)
def test_any_sequence_of_checkpoint_prune_kill_keeps_all_readable(tmp_path_factory, steps):
    store, spill = MemoryStore(), tmp_path_factory.getbasetemp() / "spill"
    for what, number, count in steps:
        dying: Store = Dying(store, count) if count < 30 else store
        if what == "upload":
            upload(dying, spill, number)
        else:
            clean(dying, number)
        assert_all_readable(store)


@pytest.mark.parametrize("what", ["prune", "upload"])
@pytest.mark.parametrize("waiting", [False, True])
def test_prune_overtaken_at_any_operation_keeps_all_readable(spill, what, waiting):
    """Stop one actor before its n-th operation, for every n, while an upload and a prune run past it."""
    base = MemoryStore()
    checkpoint(base, RING, spill, seed=1, shared=SHARED)
    if waiting:  # packs doomed by an earlier run, held back by an upload that ended since
        writer = ImageWriter(base, RING, "abcd", spill, None, SMALL)
        writer.begin()
        prune(base, RING, KeepPolicy(last=0), nobody)
        writer.abort()
    for after in range(200):
        store = MemoryStore()
        store._objects = dict(base._objects)
        first = (lambda s: clean(s, 0)) if what == "prune" else (lambda s: upload(s, spill, 1))
        steps = [first, lambda s: upload(s, spill, 2), lambda s: clean(s, 1)]
        turns = Turns(store, script((0, after), (1, 999), (2, 999)))
        turns.run(*steps)
        assert not turns.errors
        assert_all_readable(store)
        if turns.count(0) <= after:
            break
    assert 8 < after < 199


@pytest.mark.parametrize("first", range(20))
def test_prune_and_upload_interrupted_by_each_other_keep_all_readable(spill, first):
    """Stop the prune before any operation, run the upload up to any of its own, end the prune, end the upload."""
    base = MemoryStore()
    checkpoint(base, RING, spill, seed=1, shared=SHARED)
    for second in range(1, 17):
        store = MemoryStore()
        store._objects = dict(base._objects)
        turns = Turns(store, script((0, first), (1, second), (0, 999), (1, 999)))
        turns.run(lambda s: clean(s, 0), lambda s: upload(s, spill, 2))
        assert not turns.errors
        assert_all_readable(store)


@settings(max_examples=120, deadline=None, suppress_health_check=SLOW)
@given(st.integers(0, 1 << 32), st.integers(1, 2), st.integers(1, 3), st.booleans(), st.booleans())
def test_uploads_and_prunes_interleaved_keep_all_readable(tmp_path_factory, seed, uploads, prunes, kill, stale):
    """Interleave single store operations deterministically. `stale`: prunes take every upload for dead."""
    draw = random.Random(seed)
    store, spill = MemoryStore(), tmp_path_factory.getbasetemp() / "spill"
    for n in range(draw.randrange(3)):
        checkpoint(store, RING, spill, seed=n, session=f"5e55{n % 2}0", shared=SHARED)
    if draw.random() < 0.3:
        clean(Dying(store, draw.randrange(12)), 0)

    def one_upload(number: int, fail_at: int | None):
        return lambda gate: upload(Dying(gate, fail_at) if fail_at is not None else gate, spill, number)

    def one_prune(last: int, fail_at: int | None):
        def act(gate: Store) -> None:
            seen = Aged(gate) if stale else gate
            clean(Dying(seen, fail_at) if fail_at is not None else seen, last)

        return act

    fails = [draw.randrange(40) if kill and draw.random() < 0.3 else None for _ in range(uploads + prunes)]
    if stale:  # taken for dead, publishing, then really killed before it can look: no protocol covers that
        fails[:uploads] = [None] * uploads
    actors = [one_upload(draw.randrange(6), fails[n]) for n in range(uploads)]
    actors += [one_prune(draw.randrange(2), fails[uploads + n]) for n in range(prunes)]
    turns = Turns(store, sticky(draw, draw.choice([0.0, 0.6, 0.9, 0.97])))
    turns.run(*actors)
    unexpected = [error for error in turns.errors if not isinstance(error, StoreUnreachable | CheckpointNotFound)]
    assert not unexpected, unexpected
    assert_all_readable(store)
    upload(store, spill, 8)
    assert_all_readable(store)
