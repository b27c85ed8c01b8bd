"""A session that counts and prints what is typed, and a client that types numbered lines at it: every byte of output
arrives once and in order, and every line is applied once and in order, over any failure on the way."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cmdop_migrate.gateway import client
from cmdop_migrate.gateway.relay_channel import RelayStream
from cmdop_migrate.session.holder_client import HolderGone
from tests.support.host import Host, until

# Counts every 20 ms; says back each line. Without echo and line editing, so that all output is its own.
PROGRAM = r"""
import sys, threading, time, tty
tty.setraw(0)
lock = threading.Lock()
def say(text):
    with lock:
        sys.stdout.write(text + "\n"); sys.stdout.flush()
def count():
    number = 0
    while True:
        number += 1
        say(f"n {number}")
        time.sleep(0.02)
threading.Thread(target=count, daemon=True).start()
for line in sys.stdin:
    say(f"in {line.strip()}")
"""


def start(host: Host, name: str) -> str:
    session = str(host.start("python3", "-c", PROGRAM, name=name)["session"])
    host.wait_for(name, "^n 3")
    return session


@dataclass
class Typist:
    """Record what one client has seen and done. `gaps` are the longer pauses in its output, in seconds."""

    line: RelayStream
    typed: int = 0
    data: bytearray = field(default_factory=bytearray)
    start: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)  # no more is typed
    _closed: threading.Event = field(default_factory=threading.Event)
    _last: float = field(default_factory=time.monotonic)

    def run(self, every: float) -> None:
        """Read and type in turn, one line each `every` seconds: a stream belongs to one thread."""
        try:
            while not self._closed.is_set() and self._read(every):
                if not self._over.is_set():
                    self.typed += 1
                    self.line.channel.type(b"%d\n" % self.typed)
        except HolderGone:
            if not self._over.is_set():
                self.error = self.line.failure or HolderGone()
        except BaseException as error:
            self.error = error

    def _read(self, seconds: float) -> bool:
        """Take what comes within this time; False: the session has ended."""
        for message in self.line.channel.follow(seconds):
            now = time.monotonic()
            if isinstance(message, tuple):
                seq, piece = message
                if self.start is None:
                    self.start = seq
                assert seq == self.start + len(self.data), f"byte {seq} after {self.start + len(self.data)}"
                self.data += piece
                if now - self._last > 0.15:
                    self.gaps.append(now - self._last)
                self._last = now
            else:
                self.events.append({**message, "at": now})
                if message.get("event") == "exit":
                    return False
        return True

    @property
    def counted(self) -> list[int]:
        return [int(one) for one in re.findall(rb"^n (\d+)\n", self.data, re.M)]

    @property
    def applied(self) -> list[int]:
        return [int(one) for one in re.findall(rb"^in (\d+)\n", self.data, re.M)]

    def counts_on(self, more: int = 20, within: float = 30.0) -> None:
        before = len(self.counted)
        until(lambda: self.error or len(self.counted) >= before + more, within, f"it counts on from {before}")
        assert self.error is None, self.error

    def check(self) -> None:
        """Assert that nothing was lost or doubled, and all came in order."""
        counted, applied = self.counted, self.applied
        assert counted == list(range(counted[0], counted[0] + len(counted))), counted
        assert applied == list(range(1, len(applied) + 1)), applied
        text = re.sub(rb"^(n|in) \d+\n", b"", bytes(self.data[self.data.find(b"\n") + 1 :]), flags=re.M)
        assert not text.strip() or b"\n" not in text, text[:200]

    def finish(self, within: float = 30.0) -> None:
        """Stop typing, and wait until every line is applied."""
        self._over.set()
        try:
            until(lambda: self.error or len(self.applied) >= self.typed, within, f"{self.typed} lines are applied")
        except AssertionError:
            self.check()
            raise AssertionError(f"{len(self.applied)} of {self.typed} lines are applied") from None
        assert self.error is None, self.error
        self.check()
        assert len(self.applied) == self.typed


@contextmanager
def typing(line: RelayStream, every: float = 0.03) -> Iterator[Typist]:
    with line:
        answer = line.channel.ask(op="attach", actor="x", read_only=False, **{"from": None}, terminal=True)
        assert "error" not in answer, answer
        one = Typist(line)
        thread = threading.Thread(target=one.run, args=(every,))
        thread.start()
        try:
            yield one
        finally:
            one._over.set()
            one._closed.set()
            thread.join(10)


def main() -> None:
    """Type on another machine, with the arguments CREDENTIAL SESSION: a line `next` on standard input waits until the session
    counts further and answers with the longest pause since the last one; `stop` finishes and answers with all results."""
    credential = client.load(Path(sys.argv[1]))
    assert credential.relay is not None
    with typing(RelayStream(credential.relay, credential, sys.argv[2])) as typist:
        typist.counts_on()
        print(json.dumps({"ready": True}), flush=True)
        for order in sys.stdin:
            if order.strip() == "stop":
                break
            typist.counts_on(within=90)
            gaps, typist.gaps = typist.gaps, []
            print(json.dumps({"pause": max(gaps, default=0.0)}), flush=True)
        typist.finish(90)
        told: dict[str, int] = {}
        for one in typist.events:
            told[one["event"]] = told.get(one["event"], 0) + 1
        print(
            json.dumps({"typed": typist.typed, "applied": len(typist.applied), "bytes": len(typist.data), "told": told})
        )


if __name__ == "__main__":
    main()
