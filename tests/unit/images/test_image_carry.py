"""Files of the host that travel along: what comes out is what went in, whoever writes to them meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_helpers import SESSION, SMALL

from cmdop_migrate.flows import carry
from cmdop_migrate.images import reader
from cmdop_migrate.images.hostfiles import HostFile, HostFiles
from cmdop_migrate.images.keys import KeyRing
from cmdop_migrate.images.writer import ImageWriter
from cmdop_migrate.session.touched import Touched
from cmdop_migrate.storage.memory import MemoryStore


def carried(store: MemoryStore, ring: KeyRing, state: Path, path: Path) -> str:
    """A checkpoint that has nothing but this file."""
    writer = ImageWriter(store, ring, SESSION, state, tuning=SMALL)
    writer.begin()
    carrier = carry.Carrier(state, writer, ring.current.fingerprint, "opened")
    carrier.add(Touched(opened={str(path)}))
    carrier.finish()
    return writer.commit(1).checkpoint


def brought(store: MemoryStore, ring: KeyRing, checkpoint: str, there: Path, path: Path) -> bytes:
    """What a host that lacks the file gets."""
    upper = there / "upper"
    upper.mkdir(parents=True)
    image = reader.fetch(store, ring, checkpoint, there / "image")
    try:
        assert carry.bring(image, there, ["/"], [upper]) == [str(path)]
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
