"""Test the contract of storage/base.py against every backend."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from cmdop_migrate.errors import Usage
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.registry import open_store

TEXT = b"0123456789"
BAD_NAMES = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/..",
    ".hidden",
    "a/.tmp/b",
    "A",
    "a b",
    "a\n",
    "a\0b",
    "a\\b",
    "a?b",
    "a%2fb",
    "a*",
    "ü",
    "a/\u202e",
    "a" * 201,
    "/".join(["a" * 100] * 6),
]


def names(store: Store, prefix: str = "") -> list[str]:
    return [info.name for info in store.list(prefix)]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_put_and_get_round_trip(store: Store, kind: type) -> None:
    store.put("a/b", kind(TEXT))
    assert store.get("a/b") == TEXT
    assert type(store.get("a/b")) is bytes


def test_put_stores_a_buffer_slice_as_of_the_call(store: Store) -> None:
    buffer = bytearray(b"xx" + TEXT + b"xx")
    store.put("a", memoryview(buffer)[2:-2])
    buffer[:] = b"!" * len(buffer)
    assert store.get("a") == TEXT


def test_put_replaces(store: Store) -> None:
    store.put("a", TEXT)
    store.put("a", b"new")
    assert store.get("a") == b"new"
    assert [(i.name, i.size) for i in store.list()] == [("a", 3)]


def test_put_new_never_replaces(store: Store) -> None:
    assert store.put_new("a", TEXT) is True
    assert store.put_new("a", b"other") is False
    assert store.put_new("a", TEXT) is False
    assert store.get("a") == TEXT
    store.delete(["a"])
    assert store.put_new("a", b"other") is True
    assert store.get("a") == b"other"


def test_empty_object(store: Store) -> None:
    store.put("e", b"")
    assert store.put_new("e", b"x") is False
    assert store.get("e") == store.get("e", 0, 5) == store.get("e", 3) == b""
    found = store.stat("e")
    assert found is not None and found.size == 0
    assert names(store) == ["e"]


@pytest.mark.parametrize(("start", "length"), [(s, n) for s in (0, 1, 9, 10, 11, 99) for n in (None, 0, 1, 9, 10, 11)])
def test_get_ranges_at_every_edge(store: Store, start: int, length: int | None) -> None:
    store.put("r", TEXT)
    expected = TEXT[start:] if length is None else TEXT[start : start + length]
    assert store.get("r", start, length) == expected


@pytest.mark.parametrize(("start", "length"), [(-1, None), (0, -1)])
def test_invalid_range_is_refused(store: Store, start: int, length: int | None) -> None:
    store.put("r", TEXT)
    with pytest.raises(ValueError, match="not a range"):
        store.get("r", start, length)


def test_missing_object_is_a_result(store: Store) -> None:
    store.put("dir/a", TEXT)
    for name in ("b", "dir/b", "dir", "no/such/dir", "dir/a/b"):
        assert store.stat(name) is None
        for start, length in ((0, None), (0, 0), (5, 5)):
            with pytest.raises(KeyError):
                store.get(name, start, length)
    assert names(store, "no/") == names(store, "dir/a/b") == []


def test_stat_returns_size_and_age(store: Store) -> None:
    before = time.time()
    store.put("a", TEXT)
    found = store.stat("a")
    assert found is not None
    assert (found.name, found.size) == ("a", 10)
    assert before - 2 <= found.modified <= time.time() + 2
    (listed,) = store.list()
    assert listed.size == 10 and abs(listed.modified - found.modified) <= 1.1  # some list in whole seconds


def test_list_is_in_name_order_and_by_prefix(store: Store) -> None:
    # The order of whole names: '-' and '.' sort before '/', digits and letters after it.
    every = sorted(["a-b", "a.b", "a/x", "a/y/z", "a/y-z", "a0", "aa", "b/1", "b/10", "b/2"])
    for name in reversed(every):
        store.put(name, name.encode())
    assert names(store) == every
    for prefix in ("a", "a/", "a/y", "a/y/", "a/y/z", "b/1", "aa", "c", "b/3"):
        assert names(store, prefix) == [name for name in every if name.startswith(prefix)], prefix


def test_delete_is_final_and_idempotent(store: Store) -> None:
    for name in ("a", "b/c", "b/d"):
        store.put(name, TEXT)
    store.delete(["a", "b/c", "never/there"])
    assert names(store) == ["b/d"]
    store.delete(name for name in ("a", "b/c"))
    store.delete([])
    assert store.get("b/d") == TEXT


def test_delete_and_list_more_than_one_batch(store: Store) -> None:
    every = [f"n/{number:04d}" for number in range(1100)]
    threads = [
        threading.Thread(target=lambda part=part: [store.put(n, b"") for n in every[part::4]]) for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(store, "n/") == every
    few = store.few("n/", 1100)
    assert few is not None and [info.name for info in few] == every
    assert store.few("n/", 1099) is None and store.few("n/", 0) is None and store.few("none/", 0) == []
    store.delete(every[:-1])
    assert names(store) == every[-1:]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_invalid_names_are_refused_first(store: Store, name: str) -> None:
    for act in (
        lambda: store.put(name, b""),
        lambda: store.put_new(name, b""),
        lambda: store.get(name),
        lambda: store.stat(name),
        lambda: store.delete(["fine", name]),
    ):
        with pytest.raises(Usage) as caught:
            act()
        assert caught.value.hint
    assert names(store) == []


@pytest.mark.parametrize("prefix", ["/", "../", ".", "a//", "A", "ü"])
def test_invalid_prefixes_are_refused(store: Store, prefix: str) -> None:
    with pytest.raises(Usage):
        store.list(prefix)
    with pytest.raises(Usage):
        store.few(prefix, 1)


def test_large_object(store: Store) -> None:
    data = b"".join(number.to_bytes(4, "big") * 1024 for number in range(10 * 1024)) + b"tail"  # 40 MiB and a bit
    store.put("large", data)
    assert store.get("large") == data
    assert store.get("large", (8 << 20) - 2, 4) == data[(8 << 20) - 2 : (8 << 20) + 2]
    assert store.get("large", len(data) - 4) == b"tail"
    assert store.put_new("large", b"") is False
    found = store.stat("large")
    assert found is not None and found.size == len(data)


def test_large_conditional_object(store: Store) -> None:
    data = bytes(range(256)) * (20 << 12)  # 20 MiB
    assert store.put_new("large", data) is True
    assert store.put_new("large", data[1:]) is False
    assert store.get("large") == data


def test_listing_during_writes_sees_earlier_objects(store: Store) -> None:
    before = {f"old/{number:03d}" for number in range(40)}
    for name in before:
        store.put(name, TEXT)
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            store.put(f"old/new-{number % 50:03d}", TEXT * 100)
            store.put(f"old/{number % 40:03d}", TEXT)  # replaced: must be seen all the same
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(15):
            listed = list(store.list("old/"))
            assert before <= {info.name for info in listed}
            assert {info.size for info in listed} <= {10, 1000}
            assert [i.name for i in listed] == sorted({i.name for i in listed})
    finally:
        done.set()
        writer.join()


def test_threads_share_a_store(store: Store) -> None:
    wins: list[tuple[str, int]] = []

    def work(me: int) -> None:
        for number in range(20):
            store.put(f"mine/{me}/{number}", bytes([me]) * number)
            if store.put_new(f"race/{number}", bytes([me])):
                wins.append((f"race/{number}", me))
            assert store.get(f"mine/{me}/{number}") == bytes([me]) * number

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in wins) == names(store, "race/") and len(wins) == 20
    assert all(store.get(name) == bytes([me]) for name, me in wins)
    assert len(names(store, "mine/")) == 120


RACER = """
import sys
from cmdop_migrate.storage.registry import open_store
url, me, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = open_store(url)
store.stat("warm")
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    name = f"race/{number:03d}"
    if store.put_new(name, me.encode() * 2000):
        print(name, flush=True)
"""


def test_put_new_from_several_processes_has_one_winner(store_url: str) -> None:
    count = 40
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, store_url, str(me), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(5)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        won = {str(me): racer.communicate(timeout=60)[0].split() for me, racer in enumerate(racers)}
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    store = open_store(store_url)
    assert sorted(name for won_names in won.values() for name in won_names) == names(store)
    assert len(names(store)) == count
    for me, won_names in won.items():
        for name in won_names:
            assert store.get(name) == me.encode() * 2000
