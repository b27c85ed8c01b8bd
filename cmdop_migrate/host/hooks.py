"""Run hooks: executables of this host (hooks_dir/EVENT.d) and of a session, called on these events of a session.

    pre-freeze     before anything is stopped. A hook that fails stops the checkpoint, the migration, the fork
    post-thaw      after pre-freeze hooks ran, the session keeps running here: a copy was made, or it failed
    post-restore   the session runs again: reconnect, resync
    token          the session runs under a new fencing token: pass it to outside systems that check it
    on-fence       another incarnation took over; this one was killed

Hooks run on the host, as root, outside the session, one after the other: the host's in the order of their names, then
the session's. They get JSON on standard input, and are limited in time and output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from cmdop_migrate import config as settings
from cmdop_migrate import log
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, Usage
from cmdop_migrate.holder import cgroup, syscalls
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record, Spec
from cmdop_migrate.util import trusted_file

PRE_FREEZE, POST_THAW, POST_RESTORE = "pre-freeze", "post-thaw", "post-restore"
TOKEN, ON_FENCE = "token", "on-fence"
EVENTS = (PRE_FREEZE, POST_THAW, POST_RESTORE, TOKEN, ON_FENCE)
OUTPUT_KEPT = 2048  # bytes at the end of a hook's output that are kept
SHOWN = 200  # characters of its last line that an error shows
RUNNING = "CMDOP_MIGRATE_HOOK"  # variable in a hook's environment that names its event
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C.UTF-8"}
_log = log.get("hooks")


@dataclass(frozen=True)
class HookOutcome:
    """Describe one run of a hook. `problem` is empty on success; `exit` is None if it never ran or was killed."""

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


@dataclass(frozen=True)
class FreezeFacts:
    """Describe a freeze to hooks. `goes_on`: the session resumes here afterwards, only a copy is made."""

    reason: str
    to: str | None
    goes_on: bool


def parse(text: str) -> tuple[str, str]:
    """Parse `EVENT=/path` as `run --hook` takes it. Raise Usage if no such hook can be run here."""
    event, _, path = text.partition("=")
    if event not in EVENTS or not path:
        raise Usage(f"not a hook: {text!r}", "Write it like --hook pre-freeze=/path. Events: " + ", ".join(EVENTS))
    problem = trusted_file.refusal(path)
    if problem:
        raise Usage(f"hook {path}: {problem}", "Give an executable that is owned by root and writable by root only.")
    return event, path


def of_host(config: Config, event: str) -> list[str]:
    """Return the host's hooks for an event, in the order of their names, without hidden files and editor backups."""
    folder = config.hooks_dir / f"{event}.d"
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError:
        return [str(folder)]  # running it fails, and that failure is reported
    return [str(folder / name) for name in names if not name.startswith(".") and not name.endswith("~")]


def of_session(spec: Spec, event: str) -> list[str]:
    """Return the session's own hooks for an event."""
    return [path for hook_event, path in spec.hooks if hook_event == event]


def run(this_host: Host, event: str, record: Record, **facts: object) -> list[HookOutcome]:
    """Run all hooks of `event`, also after one failed. Failures are in the result, the log and the events."""
    paths = _paths(this_host.config, event, record)
    return [_run_one(this_host, event, path, record, facts) for path in paths]


def before_freeze(this_host: Host, record: Record, freeze: FreezeFacts, outcomes: list[dict[str, Any]]) -> None:
    """Run the pre-freeze hooks and append the outcome of each to `outcomes`. Raise Blocked as soon as one fails."""
    facts = {**asdict(freeze), "from": this_host.config.host}
    for path in _paths(this_host.config, PRE_FREEZE, record):
        outcome = _run_one(this_host, PRE_FREEZE, path, record, facts)
        outcomes.append(outcome.to_json())
        if not outcome.ok:
            raise Blocked(
                f"pre-freeze hook {path}: {outcome.problem}",
                f"Session {record.name!r} keeps running. The hook's whole output is in {this_host.config.log_file}",
            )


@contextmanager
def after_thaw(
    this_host: Host, record: Record, outcomes: list[dict[str, Any]], is_ours: Callable[[], bool]
) -> Iterator[None]:
    """Run the post-thaw hooks after the block, however it ends, if pre-freeze hooks ran (`outcomes` is not empty) and
    the session still belongs to the caller (`is_ours`). Append their outcomes."""
    try:
        yield
    finally:
        if outcomes and is_ours():
            outcomes += [outcome.to_json() for outcome in _run_post_thaw(this_host, record.session)]


def _run_post_thaw(this_host: Host, session: str) -> list[HookOutcome]:
    """Run the post-thaw hooks if the session runs here. While it is frozen, another checkpoint has it or its ownership
    is not decided yet: then the process that thaws it runs them."""
    now = this_host.load(session)
    if now is None or now.phase != "live" or cgroup.is_frozen(this_host.cgroup(session)):
        return []
    return run(this_host, POST_THAW, now, **{"from": this_host.config.host})


def _paths(config: Config, event: str, record: Record) -> list[str]:
    paths = of_host(config, event) + of_session(record.spec, event)
    if not paths or os.environ.get(RUNNING) != event:
        return paths
    # Each run of the hook would cause another, without end.
    if event == PRE_FREEZE:
        raise Blocked("a pre-freeze hook may not cause another", "Do not make checkpoints in a pre-freeze hook.")
    _log.warning("a %s hook of session %s caused another: not run", event, record.name)
    return []


def _run_one(this_host: Host, event: str, path: str, record: Record, facts: Mapping[str, object]) -> HookOutcome:
    config = this_host.config
    given = {**_facts(this_host, record), **facts}
    outcome = execute(event, path, given, config.hook_timeout, settings.to_environment(config))
    summary = f"{outcome.problem or 'done'} ({outcome.seconds:.2f} s)\n{outcome.output}".rstrip()
    _log.info("session %s: %s hook %s: %s", record.name, event, path, summary)
    noted: dict[str, Any] = {"name": record.name, "of": event, "hook": path, "seconds": outcome.seconds}
    try:
        if outcome.ok:
            this_host.events.emit("hook_ran", record.session, **noted)
        else:
            this_host.events.emit("hook_failed", record.session, **noted, exit=outcome.exit)
    except OSError as error:  # the disk is full: the hook ran nevertheless
        _log.warning("session %s: %s hook %s: %s", record.name, event, path, error)
    return outcome


def _facts(this_host: Host, record: Record) -> dict[str, object]:
    return {
        "session": record.session,
        "name": record.name,
        "host": this_host.config.host,
        "token": record.token,
        "checkpoint": record.checkpoint,
        "pid": record.pid,
        "cgroup": this_host.cgroup(record.session),
        "root": f"/proc/{record.pid}/root" if record.pid else None,
        "parent": record.parent,
        "reason": None,
        "from": None,
        "to": None,
    }


def execute(
    event: str, path: str, facts: Mapping[str, object], timeout: float, environment: Mapping[str, str]
) -> HookOutcome:
    """Run the executable `path` with `facts` as JSON on its standard input, in a process group of its own that is
    killed after `timeout` seconds. It inherits no descriptors, and no variables but `environment`."""
    problem = trusted_file.refusal(path)
    if problem:
        return HookOutcome(event, path, None, 0.0, f"not run: {problem}")
    began = time.monotonic()
    stdin = os.memfd_create("facts")  # not a pipe: writing never blocks, also if the hook does not read
    try:
        os.write(stdin, json.dumps({"event": event, **facts}).encode() + b"\n")
        os.lseek(stdin, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [path],
            executable=os.path.realpath(path),  # the file that was checked, even if a link was changed since
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **environment, RUNNING: event},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        return HookOutcome(event, path, None, 0.0, f"not run: {error.strerror}")
    finally:
        os.close(stdin)
    with process:
        in_time, printed = _wait(process, began + timeout)
    seconds, text = round(time.monotonic() - began, 3), printed.decode("utf-8", "replace")
    status: int | None = process.returncode
    if not in_time:
        problem, status = f"not done after {timeout:g} s, and killed", None
    elif status is not None and status < 0:
        problem, status = f"killed by {syscalls.signal_name(-status)}", None
    elif status:
        problem = f"exited {status}"
    return HookOutcome(event, path, status, seconds, problem + (_last_line(text) if problem else ""), text)


def _wait(process: subprocess.Popen[bytes], until: float) -> tuple[bool, bytes]:
    """Wait for the process to exit and kill it at `until`. Return whether it exited by itself, and the end of its
    output. A process that it left behind, with the pipe open, is not waited for."""
    assert process.stdout is not None
    pipe, printed = process.stdout.fileno(), b""
    os.set_blocking(pipe, False)
    exited = os.pidfd_open(process.pid)
    watched = [exited, pipe]
    try:
        while time.monotonic() < until:
            ready = select.select(watched, [], [], max(0.0, until - time.monotonic()))[0]
            if pipe in ready:
                part = _read(pipe)
                printed = (printed + part)[-OUTPUT_KEPT:]
                if not part:
                    watched.remove(pipe)
            elif exited in ready:  # and nothing more to read
                process.wait()
                return True, printed
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False, (printed + _read(pipe))[-OUTPUT_KEPT:]
    finally:
        os.close(exited)


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 64 << 10)
    except BlockingIOError:
        return b""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = "".join(char for char in lines[-1][:SHOWN] if char.isprintable()) if lines else ""
    return f": {shown}" if shown else ""
