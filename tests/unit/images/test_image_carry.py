"""Files of the host carried in a checkpoint: restored as they were, even if a process writes to them meanwhile."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from cmdop_migrate.errors import Blocked
from cmdop_migrate.images.files.host_files import HostFile, HostFiles
from cmdop_migrate.images.format.keys import KeyRing
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.session.files_in_use import Touched
from cmdop_migrate.snapshot import host_files
from cmdop_migrate.storage.memory import MemoryStore
from tests.unit.images.image_helpers import SESSION, SMALL
from tests.unit.test_openfiles_image import image, regular


def carried(
    store: MemoryStore, ring: KeyRing, state: Path, path: Path, what: host_files.Carry = "opened", files: bytes = b""
) -> str:
    """A checkpoint that has nothing but this file: mapped, where nothing is to be carried, else open. `files`: CRIU's
    list of them."""
    writer = ImageWriter(store, ring, SESSION, state, options=SMALL)
    writer.begin()
    carrier = host_files.HostFileCollector(state, writer, ring.current.fingerprint, what)
    carrier.add(Touched(mapped={str(path)}) if what == "none" else Touched(opened={str(path)}))
    carrier.finish()
    if files:
        writer.add_blob("criu/files.img", files)
    return writer.commit(1).checkpoint


def brought(store: MemoryStore, ring: KeyRing, checkpoint: str, there: Path, path: Path) -> bytes:
    """What a host that lacks the file gets."""
    upper = there / "upper"
    upper.mkdir(parents=True)
    image = reader.fetch(store, ring, checkpoint, there / "image")
    try:
        assert host_files.install(image, there, ["/"], [upper]).carried == [str(path)]
    finally:
        image.close()
    return (upper / str(path).lstrip("/")).read_bytes()


@pytest.mark.parametrize("new", [b"old line\nnew line\n", b"new line\n", b"new"], ids=["longer", "as long", "shorter"])
def test_a_file_that_is_written_to_meanwhile(store, ring, tmp_path, monkeypatch, new):
    path, describe = tmp_path / "log", HostFiles.describe
    path.write_bytes(b"old line\n")

    def described(self: HostFiles, name: str) -> HostFile | None:
        found = describe(self, name)
        path.write_bytes(new)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(HostFiles, "describe", described)
        first = carried(store, ring, tmp_path / "state", path)
    path.write_bytes(b"old line\n")  # as it was when it was described
    second = carried(store, ring, tmp_path / "state", path)
    path.unlink()
    assert brought(store, ring, first, tmp_path / "first", path) == new
    assert brought(store, ring, second, tmp_path / "second", path) == b"old line\n"


@pytest.fixture
def described(store, ring, tmp_path) -> tuple[Path, str]:
    """A log that is open and does not travel, and the checkpoint that knows of it."""
    path = tmp_path / "log"
    path.write_bytes(b"old line\n")
    return path, carried(store, ring, tmp_path / "state", path, "mapped")


def bring(store, ring, checkpoint: str, tmp_path: Path, accept: bool) -> tuple[host_files.InstalledFiles, Path]:
    upper = tmp_path / "upper"
    upper.mkdir(exist_ok=True)
    image = reader.fetch(store, ring, checkpoint, tmp_path / "image")
    try:
        return host_files.install(image, tmp_path / "state", ["/"], [upper], accept), upper
    finally:
        image.close()


def test_a_log_that_grew_is_the_same_log(store, ring, tmp_path, described):
    path, checkpoint = described
    for more in (b"", b"new line\n", b"another\n" * 300_000):
        with path.open("ab") as file:
            file.write(more)
        found, upper = bring(store, ring, checkpoint, tmp_path, accept=False)
        assert found.accepted_files == ([str(path)] if more else []) and not found.carried
        assert not list(upper.iterdir()), "the session reads the host's own"


@pytest.mark.parametrize("now", [b"", b"new line\n", b"new line\nold line\n", None])
def test_one_that_is_another_is_taken_only_by_somebodys_word(store, ring, tmp_path, described, now):
    path, checkpoint = described
    path.unlink() if now is None else path.write_bytes(now)
    with pytest.raises(Blocked, match="missing or different") as told:
        bring(store, ring, checkpoint, tmp_path, accept=False)
    assert "--accept-files" in told.value.hint
    found, upper = bring(store, ring, checkpoint, tmp_path, accept=True)
    assert found.accepted == found.accepted_files == [str(path)] and not found.carried
    placed = upper / str(path).lstrip("/")
    assert placed.read_bytes() == b"" if now is None else not placed.exists()


def test_a_library_is_never_taken_for_another(store, ring, tmp_path):
    """Not even `accept` helps: other code does not fit the memory of the process that mapped the library."""
    library = tmp_path / "tool"
    shutil.copy(sys.executable, library)
    checkpoint = carried(store, ring, tmp_path / "state", library, "none")
    with library.open("ab") as file:
        file.write(b"more")
    with pytest.raises(Blocked):
        bring(store, ring, checkpoint, tmp_path, accept=True)


@pytest.mark.parametrize("now", [b"\x7fELF, the next version", None])
def test_nor_is_a_program_that_has_no_build_id(store, ring, tmp_path, now):
    """As those of Go are. Of one that is gone, CRIU's list of files has kept that it might be run."""
    tool = tmp_path / "tool"
    tool.write_bytes(b"\x7fELF, one version")
    files = image(regular(str(tool).encode(), size=18, mode=0o100755))
    checkpoint = carried(store, ring, tmp_path / "state", tool, "none", files)
    tool.unlink() if now is None else tool.write_bytes(now)
    with pytest.raises(Blocked, match="missing or different"):
        bring(store, ring, checkpoint, tmp_path, accept=True)


def test_without_room_to_remember_it_is_carried_all_the_same(store, ring, tmp_path):
    """The session is frozen meanwhile: a cache that only saves work for the next checkpoint must not fail this one."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "cache").write_bytes(b"a file, where a directory should be")
    (tmp_path / "data").write_bytes(b"what the session has open")
    checkpoint = carried(store, ring, tmp_path / "state", tmp_path / "data")
    (tmp_path / "data").unlink()
    assert brought(store, ring, checkpoint, tmp_path / "there", tmp_path / "data") == b"what the session has open"


@pytest.mark.parametrize("damage", ['{"%s": 7}', '{"%s": ["not an id"]}', '{"%s": [7]}', "[]", "[" * 100_000])
def test_what_is_remembered_and_damaged_is_not_used(store, ring, tmp_path, damage):
    data, cache = tmp_path / "data", tmp_path / "state" / "cache"
    data.write_bytes(b"what the session has open")
    carried(store, ring, tmp_path / "state", data)
    (kept,) = cache.glob("carried-*.json")
    (digest,) = json.loads(kept.read_text())
    kept.write_text(damage % digest if "%s" in damage else damage)
    known = json.loads((cache / "hostfiles.json").read_text())
    (cache / "hostfiles.json").write_text(json.dumps({**known, "files": 7}))
    checkpoint = carried(store, ring, tmp_path / "state", data)
    data.unlink()
    assert brought(store, ring, checkpoint, tmp_path / "there", data) == b"what the session has open"
