"""Change the sets of blocked signals of a dumped session's threads (core-N.img).

In the one message of such an image: the process (3) with its leader's mask (5), and the thread (5) with its own (6);
bit N - 1 of a mask is signal N.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from pathlib import Path

from cmdop_migrate.criu.protobuf import Message, edit_file, edited

_MASKS = {3: 5, 5: 6}  # field of the message: field of the mask in it
_TRAP = 1 << (signal.SIGTRAP - 1)


def unblock_trap(images: Path, but_for: Collection[int]) -> None:
    """Unblock SIGTRAP for every thread except those in `but_for`, numbered as in the session. Raise Malformed."""
    for path in images.glob("core-*.img"):
        if int(path.stem.partition("-")[2]) not in but_for:
            edit_file(path, without_trap)


def without_trap(image: bytes) -> bytes:
    """Return a core image with SIGTRAP unblocked. Raise Malformed."""
    return edited(image, _unblock)


def _unblock(core: Message) -> None:
    for outer, mask in _MASKS.items():
        inner = core.inner(outer)
        if inner is not None and inner.has(mask):
            inner.set(mask, inner.number(mask) & ~_TRAP)
            core.set(outer, inner)
