"""One hook: one run of it, if it may be run at all, bounded in time and output."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cmdop_migrate.holder import syscalls
from cmdop_migrate.util import trusted_file

TAIL = 2048  # of what it prints, so much is kept
SHOWN = 200  # … and so much of its last line is told in an error
RUNNING = "CMDOP_MIGRATE_HOOK"  # in a hook's environment: which one it is
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C.UTF-8"}


@dataclass(frozen=True)
class Outcome:
    """How one hook went. `problem` is empty when all is well; `exit` None when it never ran or was killed."""

    event: str
    hook: str
    exit: int | None
    seconds: float
    problem: str
    output: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def run(event: str, path: str, facts: Mapping[str, object], timeout: float, more: Mapping[str, str]) -> Outcome:
    """Runs `path` with `facts` as JSON on its standard input, as a process group of its own that is killed when the
    time is over. It gets none of our descriptors, and of our environment nothing but `more`."""
    problem = trusted_file.refusal(path)
    if problem:
        return Outcome(event, path, None, 0.0, f"not run: {problem}")
    began = time.monotonic()
    given = os.memfd_create("facts")  # not a pipe: nobody need wait for a hook that does not read
    try:
        os.write(given, json.dumps({"event": event, **facts}).encode() + b"\n")
        os.lseek(given, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [path],
            executable=os.path.realpath(path),  # what was looked at, not what a link means by now
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **more, RUNNING: event},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(event, path, None, 0.0, f"not run: {error.strerror}")
    finally:
        os.close(given)
    with process:
        in_time, printed = _until_over(process, began + timeout)
    seconds, text = round(time.monotonic() - began, 3), printed.decode("utf-8", "replace")
    status: int | None = process.returncode
    if not in_time:
        problem, status = f"not done after {timeout:g} s, and killed", None
    elif status is not None and status < 0:
        problem, status = f"killed by {syscalls.signal_name(-status)}", None
    elif status:
        problem = f"exited {status}"
    return Outcome(event, path, status, seconds, problem + (_last_line(text) if problem else ""), text)


def _until_over(process: subprocess.Popen[bytes], until: float) -> tuple[bool, bytes]:
    """Whether it ended by itself before `until`, and the end of what it printed. One that leaves a process behind which
    keeps the pipe open is over all the same."""
    assert process.stdout is not None
    pipe, printed = process.stdout.fileno(), b""
    os.set_blocking(pipe, False)
    ended = os.pidfd_open(process.pid)
    watched = [ended, pipe]
    try:
        while time.monotonic() < until:
            ready = select.select(watched, [], [], max(0.0, until - time.monotonic()))[0]
            if pipe in ready:
                part = _read(pipe)
                printed = (printed + part)[-TAIL:]
                if not part:
                    watched.remove(pipe)
            elif ended in ready:  # and nothing more to read
                process.wait()
                return True, printed
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False, (printed + _read(pipe))[-TAIL:]
    finally:
        os.close(ended)


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 64 << 10)
    except BlockingIOError:
        return b""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = "".join(char for char in lines[-1][:SHOWN] if char.isprintable()) if lines else ""
    return f": {shown}" if shown else ""
