"""Check the lines of an input journal: whether one is missing, changed or inserted. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cmdop_migrate.holder.input_journal import digest


@dataclass(frozen=True)
class Break:
    """Describe one break of the chain. `seq`: the number of the first line after it; None at the end of the journal."""

    seq: int | None
    problem: str


@dataclass(frozen=True)
class JournalCheck:
    """Hold the result. `first`, `last`: the numbers of the lines that exist; earlier lines were rotated out."""

    lines: int
    first: int | None
    last: int | None
    head: str
    unchained: int  # lines of a version that wrote no chain
    breaks: list[Break] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether the chain is unbroken."""
        return not self.breaks


def verify(lines: Iterable[bytes], head: str | None = None) -> JournalCheck:
    """Check `lines`, without their newlines, oldest first. `head`: the digest of the last line that the session's
    holder had before they were read; later lines may follow that one."""
    breaks: list[Break] = []
    count = unchained = 0
    first = last = None
    before, met = "", not head
    for line in lines:
        row = _parsed(line)
        if row is None:
            breaks.append(Break(last, f"after line {last}: bytes that are no line, cut by a crash or a full disk"))
            continue
        seq, prev = int(row["seq"]), row.get("prev")
        if last is not None and seq != last + 1:
            breaks.append(Break(seq, _gap(last, seq)))
        elif prev is None and count > unchained:
            breaks.append(Break(seq, f"line {seq} is not bound to the one before it"))
        elif prev is not None and (prev != before if last is not None else seq == 1 and prev != ""):
            breaks.append(Break(seq, f"the line before {seq} is not the one that was written"))
        count, unchained = count + 1, unchained + (prev is None)
        first, last, before = seq if first is None else first, seq, digest(line)
        met = met or before == head
    if not met:
        breaks.append(Break(None, f"line {last} is not the last that was written" if last else "it is empty"))
    return JournalCheck(count, first, last, before, unchained, breaks)


def _gap(last: int, seq: int) -> str:
    if seq <= last:
        return f"line {seq} comes after line {last}"
    return f"line {last + 1} is missing" if seq == last + 2 else f"lines {last + 1} to {seq - 1} are missing"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        int(row["seq"])
    except (ValueError, KeyError, TypeError):
        return None
    return dict(row)
