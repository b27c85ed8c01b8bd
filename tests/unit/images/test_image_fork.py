"""Test a fork's initial checkpoint beside prunes: it can be read, or was never published."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_helpers import SESSION, SMALL, Dying, Turns, add_run, checkpoint, memory, read_all, script, sticky

from cmdop_migrate.errors import CheckpointNotFound, StoreUnreachable
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.format.keys import KeyRing, new_key
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.read.verify import verify
from cmdop_migrate.images.store import catalog, deletion_marks, fork_manifest
from cmdop_migrate.images.store.catalog import ListedCheckpoint
from cmdop_migrate.images.store.keep_policy import KeepPolicy, to_drop
from cmdop_migrate.images.store.prune import prune
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.memory import MemoryStore

RING = KeyRing((new_key(), new_key()))
SHARED = memory(99, 64)
BRANCH = "b0b0" * 6


def branch(store: Store, source: Manifest) -> Manifest:
    made = fork_manifest.of(source, BRANCH, 1, {"name": "branch"})
    fork_manifest.publish(store, RING, source, made)
    return made


def try_branch(store: Store, source: Manifest) -> None:
    try:
        branch(store, source)
    except (CheckpointNotFound, StoreUnreachable):
        pass


def clean(store: Store) -> None:
    """Prune while the fork lives and all other sessions have ended."""
    try:
        prune(store, RING, KeepPolicy(last=0), lambda session: session == BRANCH)
    except StoreUnreachable:
        pass


def assert_all_readable(store: Store) -> list[ListedCheckpoint]:
    entries = list(catalog.listed(store))
    for entry in entries:
        verify(store, RING, entry.checkpoint, parallel=1)
    return entries


def copy_of(base: MemoryStore) -> MemoryStore:
    store = MemoryStore()
    store._objects = dict(base._objects)
    return store


@pytest.fixture(params=["plain", "doomed"])
def base(request: pytest.FixtureRequest, spill: Path) -> tuple[MemoryStore, Manifest]:
    """Return a store with one checkpoint. `doomed`: packs that it relies on are still named by an earlier run's
    deletion mark."""
    store = MemoryStore()
    found = checkpoint(store, RING, spill, seed=1, shared=SHARED)
    if request.param == "doomed":
        writer = ImageWriter(store, RING, SESSION, spill, None, SMALL)
        writer.begin()
        add_run(writer, "process-1", 0x7F0000003000, len(SHARED) // 4096, 4, SHARED)
        writer.finish_input()
        assert prune(store, RING, KeepPolicy(last=0), lambda _: False).waiting
        found = writer.commit(1)
        doomed = deletion_marks.packs_marked(store)
        assert doomed and doomed & set(found.packs)
    return store, found


def test_fork_manifest_has_the_content_of_its_parent(base: tuple[MemoryStore, Manifest], tmp_path: Path) -> None:
    store, source = base
    made = branch(store, source)
    assert made.is_fork and not source.is_fork and made.parent == source.checkpoint
    assert [one.is_fork for one in catalog.listed(store, BRANCH)] == [True]
    assert catalog.load(store, RING, made.checkpoint) == made
    before = read_all(store, RING, source.checkpoint, tmp_path / "a")
    clean(store)
    assert [one.checkpoint for one in assert_all_readable(store)] == [made.checkpoint]
    assert read_all(store, RING, made.checkpoint, tmp_path / "b") == before
    assert not list(store.list(layout.UPLOADS))


def test_fork_of_a_removed_source_is_refused(base: tuple[MemoryStore, Manifest]) -> None:
    store, source = base
    clean(store)
    with pytest.raises(CheckpointNotFound):
        branch(store, source)
    assert list(store.list()) == []


def test_fork_manifest_is_sealed_with_the_key_of_its_source(spill: Path) -> None:
    store, first = MemoryStore(), KeyRing(RING.keys[1:])
    source = checkpoint(store, first, spill)
    made = branch(store, source)
    assert made.key == source.key != RING.current.fingerprint
    assert verify(store, RING, made.checkpoint)


def test_fork_killed_at_any_operation_leaves_a_readable_store(base: tuple[MemoryStore, Manifest]) -> None:
    count = 0
    while True:
        store = copy_of(base[0])
        dying = Dying(store, count)
        try_branch(dying, base[1])
        assert_all_readable(store)
        clean(store)
        assert_all_readable(store)
        if dying.left >= 0:
            break
        count += 1
    assert count >= 4


def test_prune_and_fork_interrupted_by_each_other_keep_all_readable(base: tuple[MemoryStore, Manifest]) -> None:
    """Stop the prune before any operation, run the fork up to any of its own, end the prune, end the fork; and the
    other way round."""
    steps = (32, 9)  # more than either has
    for one, other in ((0, 1), (1, 0)):
        for first in range(steps[one]):
            for second in range(1, steps[other]):
                store = copy_of(base[0])
                turns = Turns(store, script((one, first), (other, second), (one, 999), (other, 999)))
                turns.run(clean, lambda s: try_branch(s, base[1]))
                assert turns.count(0) < steps[0] and turns.count(1) < steps[1]
                assert not turns.errors
                assert_all_readable(store)
                clean(store)
                assert_all_readable(store)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.integers(1, 3), st.booleans())
def test_prunes_and_forks_interleaved_keep_all_readable(
    base: tuple[MemoryStore, Manifest], seed: int, prunes: int, kill: bool
) -> None:
    """Kill the fork only if its packs are not marked for deletion: otherwise it may leave a manifest that cannot be
    read, to which its lease does not point yet."""
    draw = random.Random(seed)
    store = copy_of(base[0])
    fail_at = draw.randrange(10) if kill and not deletion_marks.packs_marked(store) else 1000
    actors = [lambda s, at=fail_at: try_branch(Dying(s, at), base[1])]
    for _ in range(prunes):
        fail_at = draw.randrange(30) if kill else 1000
        actors.append(lambda s, at=fail_at: clean(Dying(s, at)))
    turns = Turns(store, sticky(draw, draw.choice([0.0, 0.6, 0.9, 0.97])))
    turns.run(*actors)
    assert not turns.errors, turns.errors
    assert_all_readable(store)
    clean(store)
    assert_all_readable(store)


def test_spent_checkpoint_is_dropped_even_if_the_policy_keeps_it() -> None:
    entries = [
        ListedCheckpoint(BRANCH, layout.fork_checkpoint_id(BRANCH), 10.0, 1),
        ListedCheckpoint(BRANCH, layout.new_id(), 20.0, 1),
    ]
    dropped = to_drop(entries, KeepPolicy(last=5), 1000.0, lambda _: True, lambda entry: entry.is_fork)
    assert dropped == entries[:1]
    assert to_drop(entries, KeepPolicy(), 1000.0, lambda _: True, lambda entry: entry.is_fork) == []
    assert to_drop(entries, KeepPolicy(last=5), 1000.0, lambda _: True) == []
