"""Test host files: build-ids of real and damaged ELF files, cached digests, comparison."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.images.files import host_files
from cmdop_migrate.images.files.host_files import FileMatch, HostFile, HostFiles, compare, read_build_id
from cmdop_migrate.images.files.stat_cache import TICK_NS


def _files(cache: Path, scheme: str = "sha256") -> HostFiles:
    return HostFiles(cache, hashlib.sha256, scheme)


def _elf(build_id: bytes, *, wide: bool = True, order: str = "<") -> bytes:
    """Return the smallest ELF file with one note segment, with another note before the build-id."""
    notes = struct.pack(order + "III", 4, 5, 1) + b"GNU\0" + b"other\0\0\0"
    notes += struct.pack(order + "III", 4, len(build_id), 3) + b"GNU\0" + build_id
    head, part = (64, 56) if wide else (52, 32)
    data = bytearray(head + part) + notes
    data[:6] = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2])
    struct.pack_into(order + ("Q" if wide else "I"), data, 32 if wide else 28, head)
    struct.pack_into(order + "HH", data, 54 if wide else 42, part, 1)
    struct.pack_into(order + "I", data, head, 4)
    place, length = (8, 32) if wide else (4, 16)
    struct.pack_into(order + ("Q" if wide else "I"), data, head + place, head + part)
    struct.pack_into(order + ("Q" if wide else "I"), data, head + length, len(notes))
    return bytes(data)


def _build_id(path: Path) -> str | None:
    with path.open("rb") as file:
        return read_build_id(file.fileno(), path.stat().st_size)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("order", ["<", ">"])
def test_build_ids_of_every_class_and_byte_order(tmp_path: Path, wide: bool, order: str) -> None:
    (tmp_path / "elf").write_bytes(_elf(b"\x01\xab" * 10, wide=wide, order=order))
    assert _build_id(tmp_path / "elf") == "01ab" * 10


def test_build_id_of_a_real_program() -> None:
    tool = shutil.which("readelf") or shutil.which("file")
    if tool is None:
        pytest.skip("needs readelf or file to compare with")
    program = Path("/bin/sh").resolve()
    said = subprocess.run(
        [tool, *(["-n"] if tool.endswith("readelf") else []), program], capture_output=True, text=True
    )
    found = _build_id(program)
    assert found is not None and found in said.stdout


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 200), put=st.binary(max_size=9), cut=st.integers(0, 60))
def test_damaged_elf_never_crashes_the_build_id_reader(
    tmp_path_factory: pytest.TempPathFactory, at: int, put: bytes, cut: int
) -> None:
    whole = _elf(bytes(20))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes((whole[:at] + put + whole[at + len(put) :])[: len(whole) - cut])
    found = _build_id(path)
    assert found is None or 2 <= len(found) <= 128


def test_digest_is_cached_until_the_file_changes(tmp_path: Path) -> None:
    library, cache = tmp_path / "lib.so", tmp_path / "state" / "cache"
    library.write_bytes(_elf(bytes(20)) + bytes(3 << 20))
    time.sleep(2 * TICK_NS / 1e9)
    first = _files(cache)
    seen = first.describe(str(library))
    assert seen is not None
    assert seen.digest == hashlib.sha256(library.read_bytes()).hexdigest()
    assert seen.build_id == "00" * 20
    first.save()
    assert cache.stat().st_mode & 0o777 == 0o600

    second = _files(cache)
    assert second.describe(str(library)) == seen and second.hashed == 0
    with library.open("rb") as file:
        assert second.describe(str(library), file.fileno()) == seen and second.hashed == 0
    assert _files(cache, "another key").describe(str(library)) == seen
    library.write_bytes(library.read_bytes()[:-1] + b"x")
    renewed = second.describe(str(library))
    assert second.hashed == 1 and renewed is not None and renewed.digest != seen.digest


def test_digest_of_a_file_just_written_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _files(tmp_path / "cache")
    (tmp_path / "hot").write_bytes(b"1")
    written = (tmp_path / "hot").stat().st_ctime_ns
    monkeypatch.setattr(host_files, "walltime", lambda: (written + TICK_NS // 2) / 1e9)
    for _ in range(2):
        files.describe(str(tmp_path / "hot"))
    assert files.hashed == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": "cmdop-host-files-1", "scheme": "sha256"}', b"\xff"])
def test_damaged_digest_cache_counts_as_empty(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "cache").write_bytes(damage)
    files = _files(tmp_path / "cache")
    assert files.describe(sys.executable) is not None
    assert files.hashed == 1


def test_only_regular_files_are_described(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    files = _files(tmp_path / "cache")
    for path in (tmp_path / "gone", tmp_path, tmp_path / "fifo", tmp_path / "fifo" / "below", Path("/dev/null")):
        assert files.describe(str(path)) is None


def _host(size: int = 10, build_id: str | None = None, digest: str | None = None, path: str = "/lib/x") -> HostFile:
    return HostFile(path, size, 1, build_id, digest)


@pytest.mark.parametrize(
    ("then", "now", "verdict"),
    [
        (_host(digest="aa"), _host(digest="aa"), FileMatch.SAME),
        (_host(digest="aa"), _host(digest="bb"), FileMatch.DIFFERENT),
        (_host(digest="aa", build_id="01"), _host(digest="bb", build_id="01"), FileMatch.DIFFERENT),
        (_host(build_id="01"), _host(digest="bb", build_id="01"), FileMatch.SAME),
        (_host(build_id="01", digest="aa"), _host(build_id="01"), FileMatch.SAME),
        (_host(build_id="01"), _host(build_id="02"), FileMatch.DIFFERENT),
        (_host(), _host(), FileMatch.DIFFERENT),
        (_host(size=10, digest="aa"), _host(size=11, digest="aa"), FileMatch.DIFFERENT),
        (_host(digest="aa"), None, FileMatch.MISSING),
    ],
)
def test_compare_host_files(then: HostFile, now: HostFile | None, verdict: FileMatch) -> None:
    assert compare([then], lambda path: now if path == "/lib/x" else None) == [("/lib/x", verdict)]


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (b"one\n", FileMatch.SAME),
        (b"one\ntwo\n", FileMatch.GROWN),
        (b"two\none\n", FileMatch.DIFFERENT),
        (b"one", FileMatch.DIFFERENT),
    ],
)
def test_grown_file_begins_with_the_recorded_content(tmp_path: Path, now: bytes, verdict: FileMatch) -> None:
    path, files = tmp_path / "log", _files(tmp_path / "cache")
    path.write_bytes(b"one\n")
    then = files.describe(str(path))
    assert then is not None
    path.write_bytes(now)
    assert compare([then], files.describe, files.begins) == [(str(path), verdict)]
    path.unlink()
    assert not files.begins(then), "it may be gone by then"


def test_file_that_grows_while_read_is_described_as_read(tmp_path: Path) -> None:
    """Describe a log that is written to all the time: otherwise no host would recognise it."""
    path = tmp_path / "log"
    path.write_bytes(b"one\n")

    class Busy:
        def __init__(self) -> None:
            self._hash = hashlib.sha256()
            self.update = self._hash.update

        def hexdigest(self) -> str:
            with path.open("ab") as log:
                log.write(b"another\n")
            return self._hash.hexdigest()

    then = HostFiles(tmp_path / "cache", Busy, "sha256").describe(str(path))
    files = _files(tmp_path / "cache")
    assert then is not None and then.size == len(b"one\n")
    assert compare([then], files.describe, files.begins) == [(str(path), FileMatch.GROWN)]


def test_host_file_json_round_trips() -> None:
    file = _host(build_id="01", digest="ab" * 32, path="/lib/\udcff é")
    assert HostFile.from_json(file.as_json()) == file


@pytest.mark.parametrize(
    "row",
    [
        None,
        [],
        {},
        ["/x", 1, 1, None],
        ["x", 1, 1, None, None],
        ["/", 1, 1, None, None],
        ["/a/../../etc/shadow", 1, 1, None, None],
        ["/a//b", 1, 1, None, None],
        ["/a\0", 1, 1, None, None],
        ["/\ud800", 1, 1, None, None],
        ["/x", -1, 1, None, None],
        ["/x", True, 1, None, None],
        ["/x", 1, 1.5, None, None],
        ["/x", 1, 1, "XY", None],
        ["/x", 1, 1, None, "../x"],
        ["/x", 1, 1, None, ""],
    ],
)
def test_damaged_host_file_rows_are_refused(row: Any) -> None:
    with pytest.raises(ImageRefused):
        HostFile.from_json(row)
