"""Run commands of cmdop-migrate as child processes, isolated from each other and from this process.

Each child has its own session: Ctrl-C in our terminal does not reach it, and it finishes even if this process is
killed. Its output goes to an unnamed file, so that it never blocks on a reader."""

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
    """Hold the exit status and the JSON answer of a command. For one that was killed the answer is an error made
    here."""

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
    """Run one command. `flags` are the global flags that this command was given itself."""

    def __init__(self, flags: Sequence[str], words: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        package = str(Path(cmdop_migrate.__file__).parent.parent)
        self.began, self.since, self.interrupted = clock.boottime(), clock.walltime(), False
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `ended`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cmdop_migrate", *flags, "--json", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": package, **(environ or {})},
        )

    def interrupt(self) -> None:
        """Send SIGINT, once, as Ctrl-C does: the command undoes what it began, or finishes."""
        if self._process.poll() is None and not self.interrupted:  # a second SIGINT would interrupt the undoing
            self.interrupted = True
            self._process.send_signal(signal.SIGINT)

    def ended(self) -> Ended | None:
        """Return the result, or None while the command runs. Call it until it returns a result."""
        status = self._process.poll()
        if status is None:
            return None
        with self._output:
            self._output.seek(0)
            text = self._output.read().decode(errors="replace")
        return Ended(status, _answer(text, status))


def _answer(text: str, status: int) -> dict[str, Any]:
    """Return the last JSON object of the output that is not a progress line."""
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "progress" not in value:
            return value
    words = f"killed by signal {-status}" if status < 0 else "interrupted" if status == 130 else f"exit {status}"
    return {"error": {"code": "unexpected", "message": f"the command did not answer: {words}"}}
