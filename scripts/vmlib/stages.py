"""How long each stage took, said as it ends and again in the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator


class Stages:
    def __init__(self) -> None:
        self._took: list[tuple[str, float, str]] = []

    @contextlib.contextmanager
    def stage(self, name: str, note: str = "") -> Iterator[None]:
        began, ended = time.monotonic(), "did not end well"
        try:
            yield
            ended = note
        finally:
            self._took.append((name, time.monotonic() - began, ended))
            print(f"test-vm: {self._line(*self._took[-1])}   load {os.getloadavg()[0]:.1f}", flush=True)

    def reused(self, name: str, note: str) -> None:
        self._took.append((name, 0.0, note))

    def report(self, part: str) -> str:
        whole = sum(took for _, took, _ in self._took)
        return "\n".join([f"test-vm: {part}", *(f"  {self._line(*one)}" for one in self._took), f"  all {whole:.0f} s"])

    @staticmethod
    def _line(name: str, took: float, note: str) -> str:
        return f"{name:24} {took:7.1f} s{f'  {note}' if note else ''}"
