"""Record which packs prune runs are about to delete: one object per run, naming packs.

A deletion mark is `active` while its run may still delete, `waiting` afterwards: the packs stay marked until the
uploads that may not have seen the mark have ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from cmdop_migrate import log
from cmdop_migrate.images.format import layout
from cmdop_migrate.storage.base import ObjectInfo, Store

_logger = log.get("images.deletion_marks")


@dataclass(frozen=True)
class DeletionMark:
    """Map each marked pack to the uploads that may rely on it, or to None if that was not recorded yet."""

    run: str
    active: bool
    packs: Mapping[str, frozenset[str] | None]
    modified: float = 0.0

    def encode(self) -> bytes:
        packs = {pack: None if ids is None else sorted(ids) for pack, ids in self.packs.items()}
        return json.dumps({"active": self.active, "packs": packs}, separators=(",", ":"), sort_keys=True).encode()


def decode(run: str, data: bytes, modified: float = 0.0) -> DeletionMark | None:
    """Parse a deletion mark, or return None if it is unreadable: then the packs it marks are unknown."""
    try:
        table = json.loads(data)
        packs = {
            str(pack): None if ids is None else frozenset(map(str, ids)) for pack, ids in dict(table["packs"]).items()
        }
        return DeletionMark(run, bool(table["active"]), packs, modified)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_all(store: Store) -> tuple[list[DeletionMark], list[ObjectInfo]]:
    """Return all deletion marks of one moment, and those that cannot be read. One listing may miss both a mark that is
    deleted during it and the mark that took its packs over, so list until two listings agree."""
    listed = list(store.list(layout.DELETION_MARKS))
    while True:
        good: list[DeletionMark] = []
        bad: list[ObjectInfo] = []
        try:
            for info in listed:
                run = info.name.removeprefix(layout.DELETION_MARKS)
                mark = decode(run, store.get(info.name), info.modified)
                if mark is None:
                    bad.append(info)
                else:
                    good.append(mark)
        except KeyError:
            listed = list(store.list(layout.DELETION_MARKS))
            continue  # another run took one over since it was listed: list again, the successor is there now
        before, listed = listed, list(store.list(layout.DELETION_MARKS))
        if [info.name for info in before] == [info.name for info in listed]:
            return good, bad


def packs_marked(store: Store) -> set[str] | None:
    """Return all packs that must not be relied on, or None if that cannot be determined."""
    good, bad = read_all(store)
    for info in bad:
        _logger.warning("deletion mark %s cannot be read: no stored pack will be reused", info.name)
    return None if bad else {pack for mark in good for pack in mark.packs}
