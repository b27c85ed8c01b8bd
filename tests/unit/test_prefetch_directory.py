"""The directory of prefetched checkpoints on a target: the next command removes what a killed one left."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmdop_migrate.errors import Blocked
from cmdop_migrate.migration import prefetch
from cmdop_migrate.migration.prefetch import PrefetchDirectory


@pytest.mark.parametrize("left", [(), ("lock",), ("packs/one",), ("lock", "packs/one")])
def test_sweep_removes_what_a_killed_command_left(tmp_path: Path, left: tuple[str, ...]) -> None:
    """Also without its lock: killed before that was made, or after it was removed."""
    folder = tmp_path / "ahead" / "5e55"
    folder.mkdir(parents=True)
    for name in left:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    assert not prefetch.sweep(tmp_path)
    assert not folder.exists()


def test_sweep_keeps_a_directory_in_use(tmp_path: Path) -> None:
    one = PrefetchDirectory(tmp_path, "5e55")
    (one.dir / "pack").write_bytes(b"")
    assert prefetch.sweep(tmp_path) and (one.dir / "pack").exists()
    with pytest.raises(Blocked):
        PrefetchDirectory(tmp_path, "5e55")
    one.close()
    assert not prefetch.sweep(tmp_path) and not one.dir.exists()
