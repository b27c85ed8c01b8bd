"""Executables that are told what happens to a session: of this host, in hooks_dir/EVENT.d, and of the session itself.

    pre-freeze     before anything is stopped. One that fails stops the checkpoint, the move, the fork
    post-thaw      after pre-freeze hooks ran, the session goes on here: a copy was made, or it failed
    post-restore   the session runs again: reconnect, resync
    token          it runs under a new token: tell those outside who check it
    on-fence       another incarnation took over; this one was killed

They run on the host, as root, outside the session, one after the other: the
host's by name, then the session's. They get JSON on standard input.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from cmdop_migrate import config as settings
from cmdop_migrate import log
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, Usage
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import hook_process
from cmdop_migrate.host.hook_process import Outcome
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record, Spec
from cmdop_migrate.util import trusted_file

PRE_FREEZE, POST_THAW, POST_RESTORE = "pre-freeze", "post-thaw", "post-restore"
TOKEN, ON_FENCE = "token", "on-fence"
EVENTS = (PRE_FREEZE, POST_THAW, POST_RESTORE, TOKEN, ON_FENCE)
_log = log.get("hooks")


def parse(text: str) -> tuple[str, str]:
    """`pre-freeze=/path` as `run --hook` takes it; Usage when no such hook can be run here."""
    event, _, path = text.partition("=")
    if event not in EVENTS or not path:
        raise Usage(f"not a hook: {text!r}", "Write it like --hook pre-freeze=/path. Events: " + ", ".join(EVENTS))
    problem = trusted_file.refusal(path)
    if problem:
        raise Usage(f"hook {path}: {problem}", "Give an executable that root owns and nobody else may write.")
    return event, path


def of_host(config: Config, event: str) -> list[str]:
    """In the order of their names; hidden files, and what an editor left, are none."""
    folder = config.hooks_dir / f"{event}.d"
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError:
        return [str(folder)]  # that it cannot be run will be said
    return [str(folder / name) for name in names if not name.startswith(".") and not name.endswith("~")]


def of_session(spec: Spec, event: str) -> list[str]:
    return [path for one, path in spec.hooks if one == event]


def run(this_host: Host, event: str, record: Record, **facts: object) -> list[Outcome]:
    """All hooks of `event`, whatever becomes of one; what failed is in the answer, the log and the events."""
    paths = _paths(this_host.config, event, record)
    return [_run_one(this_host, event, path, record, facts) for path in paths]


@dataclass(frozen=True)
class Goal:
    """What a freeze is for. `goes_on`: the session runs on here afterwards, only a copy is made."""

    reason: str
    to: str | None
    goes_on: bool


def before_freeze(this_host: Host, record: Record, goal: Goal, told: list[dict[str, Any]]) -> None:
    """Blocked as soon as one says no. How each went is put into `told`."""
    facts = {**asdict(goal), "from": this_host.config.host}
    for path in _paths(this_host.config, PRE_FREEZE, record):
        done = _run_one(this_host, PRE_FREEZE, path, record, facts)
        told.append(done.to_json())
        if not done.ok:
            raise Blocked(
                f"pre-freeze hook {path}: {done.problem}",
                f"Session {record.name!r} goes on. All the hook said is in {this_host.config.log_file}",
            )


@contextmanager
def after_thaw(
    this_host: Host, record: Record, told: list[dict[str, Any]], is_ours: Callable[[], bool]
) -> Iterator[None]:
    """Whoever was `told` of a freeze hears that the session goes on here after all, for whatever reason; unless it
    `is_ours` no more to tell."""
    try:
        yield
    finally:
        if told and is_ours():
            told += [one.to_json() for one in _going_on(this_host, record.session)]


def _going_on(this_host: Host, session: str) -> list[Outcome]:
    """Tells that the session goes on here, if it does. Frozen, another checkpoint has it, or it stands still until it
    is known whose it is: then whoever thaws it has to tell."""
    now = this_host.load(session)
    if now is None or now.phase != "live" or cgroup.is_frozen(this_host.cgroup(session)):
        return []
    return run(this_host, POST_THAW, now, **{"from": this_host.config.host})


def _paths(config: Config, event: str, record: Record) -> list[str]:
    paths = of_host(config, event) + of_session(record.spec, event)
    if not paths or os.environ.get(hook_process.RUNNING) != event:
        return paths
    # It would never come to an end: each run of the hook would cause another.
    if event == PRE_FREEZE:
        raise Blocked("a pre-freeze hook may not cause another", "Let the hook leave checkpoints to who called it.")
    _log.warning("a %s hook of session %s caused another: not run", event, record.name)
    return []


def _run_one(this_host: Host, event: str, path: str, record: Record, facts: Mapping[str, object]) -> Outcome:
    config = this_host.config
    told = {**_facts(this_host, record), **facts}
    done = hook_process.run(event, path, told, config.hook_timeout, settings.to_environment(config))
    words = f"{done.problem or 'done'} ({done.seconds:.2f} s)\n{done.output}".rstrip()
    _log.info("session %s: %s hook %s: %s", record.name, event, path, words)
    noted: dict[str, Any] = {"name": record.name, "of": event, "hook": path, "seconds": done.seconds}
    try:
        if done.ok:
            this_host.events.emit("hook_ran", record.session, **noted)
        else:
            this_host.events.emit("hook_failed", record.session, **noted, exit=done.exit)
    except OSError as error:  # on a full disk the hook ran all the same
        _log.warning("session %s: %s hook %s: %s", record.name, event, path, error)
    return done


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
