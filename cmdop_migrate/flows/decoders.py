"""Memory on its way back is decoded by processes of their own (offspring.py).

Each has a megabyte that we see, too: it is told what to put there, and says when it is done.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator

from cmdop_migrate import log, offspring
from cmdop_migrate.criu import pager
from cmdop_migrate.flows.memory import Later, Source
from cmdop_migrate.offspring import Offspring

_MOST = 4
_JOB = struct.Struct("<qQQ")  # pid inside, start, size
_ZEROS, _DATA = b"0", b"1"
_log = log.get("decoders")


@contextlib.contextmanager
def started(source: Source) -> Iterator[list[pager.Filler]]:
    """One more than there are processors: while one places what is decoded, the others decode."""
    made: list[Decoder] = []
    try:
        for _ in range(min(_MOST, (os.cpu_count() or 1) + 1)):
            made.append(Decoder(source))
        yield list(made)
    finally:
        offspring.close_all([one.process for one in made])


class Decoder:
    """A filler for one thread."""

    def __init__(self, source: Source) -> None:
        """`source` has all of its image on this machine, and nobody uses it at this moment."""
        self.buffer = memoryview(mmap.mmap(-1, pager.BLOCK))

        def decode(job: bytes) -> bytes:
            pid, start, size = _JOB.unpack(job)
            return _DATA if source.later(pid).fill(start, self.buffer[:size]) else _ZEROS

        self.process = Offspring(decode, source.descriptors(), pager.NICE)

    def fill(self, memory: pager.Memory, start: int, size: int) -> bool:
        assert isinstance(memory, Later)
        was_there = self.process.is_there
        answer = self.process.ask(_JOB.pack(memory.pid, start, size))
        if answer:
            return answer == _DATA
        if was_there:  # it died, or has seen what we must see ourselves to say what is wrong
            _log.info("a decoder gave up: its work is done here")
        return memory.fill(start, self.buffer[:size])
