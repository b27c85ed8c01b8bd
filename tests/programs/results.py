"""What one run of one scenario found, kept as a file for `tests.programs.report`."""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / ".cache" / "program-results"
STAGES = ("start", "plan", "park", "restore", "second round", "leave-running", "fork", "finish")
OK = "ok"


class Refused(Exception):
    """`plan` blocked the session, the checkpoint was refused with exit 4, and the program runs on."""


class NotParked(Exception):
    """A checkpoint failed after `plan` had said that the session can move; the program runs on."""


class NeverBack(Exception):
    """A session was parked, and `restore` failed."""


class Ended(Exception):
    """The program ended, or no longer answers, after a checkpoint that failed."""


@dataclass
class Result:
    """`stages` maps each stage that was reached to "ok", or to the first line of what went wrong."""

    name: str
    family: str
    version: str
    expected: str = ""
    advice: str = ""
    plan: str = ""
    failure: str = ""  # the class of the exception that ended the run
    stages: dict[str, str] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())
    kernel: str = field(default_factory=platform.release)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the outcome of one stage, also when it fails."""
        try:
            yield
        except BaseException as error:
            self.stages[name] = summary(error)
            self.failure = type(error).__name__
            raise
        self.stages[name] = OK

    def save(self) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        where = RESULTS / (re.sub(r"[^A-Za-z0-9.]+", "-", self.name) + ".json")
        where.write_text(json.dumps(asdict(self), indent=1) + "\n")


def summary(error: BaseException) -> str:
    """One line that names the cause: the command's own message where a command failed."""
    text = str(error) or type(error).__name__
    found = re.search(r'"message": "((?:[^"\\]|\\.)*)"', text) or re.search(r"cmdop-migrate: (.*)", text)
    line = found[1] if found else text.strip().splitlines()[0]
    line = re.sub(r"\\+n.*", "", line)  # a log tail
    return re.sub(r"\s+", " ", re.sub(r"/tmp/\S+|[0-9a-f]{24}", "…", line))[:300]
