"""What a target fetched before a session came: whoever was killed at whatever moment, the next one clears it up."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmdop_migrate.errors import Blocked
from cmdop_migrate.flows import aheads
from cmdop_migrate.flows.aheads import Ahead


@pytest.mark.parametrize("left", [(), ("lock",), ("packs/one",), ("lock", "packs/one")])
def test_what_was_left_is_removed(tmp_path: Path, left: tuple[str, ...]) -> None:
    """Also without its lock: killed before that was made, or after it was removed."""
    folder = tmp_path / "ahead" / "5e55"
    folder.mkdir(parents=True)
    for name in left:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    assert not aheads.sweep(tmp_path)
    assert not folder.exists()


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    one = Ahead(tmp_path, "5e55")
    (one.dir / "pack").write_bytes(b"")
    assert aheads.sweep(tmp_path) and (one.dir / "pack").exists()
    with pytest.raises(Blocked):
        Ahead(tmp_path, "5e55")
    one.close()
    assert not aheads.sweep(tmp_path) and not one.dir.exists()
