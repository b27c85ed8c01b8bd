"""What prune runs mean to delete: one object per run, naming packs.

A tombstone is `active` while its run may still delete, `waiting` afterwards: the
packs stay doomed until the uploads that may not have seen it are over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from cmdop_migrate import log
from cmdop_migrate.images.format import layout
from cmdop_migrate.storage.base import ObjectInfo, Store

_logger = log.get("images.tombstones")


@dataclass(frozen=True)
class Tombstone:
    """pack -> the uploads that may rely on it; None when that was not recorded yet."""

    run: str
    active: bool
    packs: Mapping[str, frozenset[str] | None]
    modified: float = 0.0

    def encode(self) -> bytes:
        packs = {pack: None if ids is None else sorted(ids) for pack, ids in self.packs.items()}
        return json.dumps({"active": self.active, "packs": packs}, separators=(",", ":"), sort_keys=True).encode()


def decode(run: str, data: bytes, modified: float = 0.0) -> Tombstone | None:
    """None when it cannot be read: then nothing is known about what it dooms."""
    try:
        table = json.loads(data)
        packs = {
            str(pack): None if ids is None else frozenset(map(str, ids)) for pack, ids in dict(table["packs"]).items()
        }
        return Tombstone(run, bool(table["active"]), packs, modified)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_all(store: Store) -> tuple[list[Tombstone], list[ObjectInfo]]:
    """All tombstones at one moment, and those that cannot be read. A listing may miss both one that is deleted while it
    is made and the one that took its packs over: only two that agree are believed."""
    listed = list(store.list(layout.DOOMED))
    while True:
        good: list[Tombstone] = []
        bad: list[ObjectInfo] = []
        try:
            for info in listed:
                run = info.name.removeprefix(layout.DOOMED)
                stone = decode(run, store.get(info.name), info.modified)
                if stone is None:
                    bad.append(info)
                else:
                    good.append(stone)
        except KeyError:
            listed = list(store.list(layout.DOOMED))
            continue  # one was taken over by another run since it was listed: look again, its heir is there now
        before, listed = listed, list(store.list(layout.DOOMED))
        if [info.name for info in before] == [info.name for info in listed]:
            return good, bad


def doomed_packs(store: Store) -> set[str] | None:
    """All packs that must not be relied on; None when that cannot be told."""
    good, bad = read_all(store)
    for info in bad:
        _logger.warning("%s cannot be read: nothing that is stored already will be used", info.name)
    return None if bad else {pack for stone in good for pack in stone.packs}
