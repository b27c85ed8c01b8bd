"""Commands of our own, each in a process of its own: what happens to one happens to no other, nor to us.

They are in sessions of their own: a Ctrl-C in our terminal does not reach them, and they finish when we are killed.
What they say goes to a file that has no name, so that nobody need read it for them to go on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cmdop_migrate
from cmdop_migrate import clock


@dataclass(frozen=True)
class Ended:
    """`answer`: its one JSON object; of one that was killed, made up."""

    status: int
    answer: dict[str, Any]

    @property
    def ok(self) -> bool:
        return self.status == 0 and "error" not in self.answer

    @property
    def code(self) -> str:
        return str(self.answer.get("error", {}).get("code", ""))

    @property
    def message(self) -> str:
        return str(self.answer.get("error", {}).get("message", ""))

    @property
    def hint(self) -> str:
        return str(self.answer.get("error", {}).get("hint", ""))


class Worker:
    """`flags`: the global ones this command was given itself."""

    def __init__(self, flags: Sequence[str], words: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        package = str(Path(cmdop_migrate.__file__).parent.parent)
        self.began, self.since, self.interrupted = clock.boottime(), clock.walltime(), False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - read and closed at its end
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cmdop_migrate", *flags, "--json", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": package, **(environ or {})},
        )

    def interrupt(self) -> None:
        """As Ctrl-C would: it undoes what it began, or finishes."""
        if self._process.poll() is None and not self.interrupted:  # a second one would cut the undoing short
            self.interrupted = True
            self._process.send_signal(signal.SIGINT)

    def ended(self) -> Ended | None:
        """None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        with self._said:
            self._said.seek(0)
            text = self._said.read().decode(errors="replace")
        return Ended(status, _answer(text, status))


def _answer(text: str, status: int) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "progress" not in found:
            return found
    words = f"killed by signal {-status}" if status < 0 else "interrupted" if status == 130 else f"exit {status}"
    return {"error": {"code": "unexpected", "message": f"the command did not answer: {words}"}}
