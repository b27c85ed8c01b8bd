"""Start a session: check the request, take a lease, start a holder, and connect the session's network."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cmdop_migrate import clock
from cmdop_migrate import config as settings
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, Usage
from cmdop_migrate.host import agent_process, hooks, leases, name_lease
from cmdop_migrate.host.holder_order import holder_order, private_paths
from cmdop_migrate.host.hooks import HookOutcome
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import NetMode, Record, Spec, new_session_id, session_name
from cmdop_migrate.session import host_mounts, network
from cmdop_migrate.session.spawn_holder import Starter, make_stores
from cmdop_migrate.util import trusted_file
from cmdop_migrate.util.paths import SPECIAL, is_under
from cmdop_migrate.util.timings import Phases

INIT = "/usr/bin/tini-static"
KEPT_VARIABLES = ("LANG", "LANGUAGE", "TZ", "COLORTERM", "PATH")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NETWORK_TRIES = 5
MAX_STRING, MAX_STRINGS = 128 << 10, 1 << 20  # the kernel's limit for one string; half its usual limit for all


@dataclass(frozen=True)
class RunOptions:
    """Hold what `run` was asked for, not yet checked."""

    command: tuple[str, ...]
    name: str | None = None
    user: str | None = None
    cwd: str | None = None
    env: tuple[str, ...] = ()
    net: NetMode = "private"
    shares: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    gate: str | None = None
    rows: int = 24
    cols: int = 80


def run(
    config: Config, options: RunOptions, environ: Mapping[str, str] | None = None
) -> tuple[Record, list[HookOutcome]]:
    """Start a session. Return its record and the outcomes of the token hooks.

    If it raises, nothing of the session is left behind.
    """
    this_host = Host(config)
    this_host.prepare()
    spec = specify(options, os.environ if environ is None else environ)
    name = session_name(options.name) if options.name is not None else None
    _check_init()
    _check_state_dir(config)
    _check_shares(spec.shares, private_paths(config))
    with contextlib.closing(agent_process.Agent(config)) as agent:  # it starts up while this command continues
        record = _run(this_host, options, spec, name, agent)
    return record, hooks.run(this_host, hooks.TOKEN, record, reason="run", to=config.host)


def _run(this_host: Host, options: RunOptions, spec: Spec, name: str | None, agent: agent_process.Agent) -> Record:
    config = this_host.config
    if leases.must_be_tried(config):
        agent.ready()  # the agent probes the lease store, once for this command too
    store, phases = leases.open_store(config), Phases("run")
    if name_lease.is_taken(store, this_host):
        agent.ready()  # the agent waits until a dead installation's lease of the name runs out
        name_lease.check(store, this_host)
    for _ in range(NETWORK_TRIES):
        session = new_session_id()
        claimed = network.choose(config.subnet) if spec.net == "private" else None
        link = claimed.link if claimed is not None else None
        try:
            lease = leases.take_new(store, this_host, session)
            phases.reach("leased")
            record = Record(
                session,
                name or f"s-{session[:6]}",
                config.host,
                lease.token,
                "starting",
                spec,
                clock.walltime(),
                link=link,
            )
            try:
                started = _start(this_host, record, options, lease.fresh_until, agent)
            except network.LinkTaken:
                leases.let_go(store, lease)
                continue
            except BaseException:
                leases.let_go(store, lease)
                raise
        finally:
            if claimed is not None:
                claimed.release()
        phases.reach("started")
        this_host.note("started", session, name=started.name, token=started.token, pid=started.pid)
        return started
    raise Blocked(f"no free network found in {NETWORK_TRIES} tries", "Set a larger `subnet`.")


def _start(
    this_host: Host, record: Record, options: RunOptions, fresh_until: float, agent: agent_process.Agent
) -> Record:
    config, lock = this_host.config, this_host.claim(record)
    try:
        order = holder_order(config, this_host, record)
        order |= {
            "mode": "start",
            "fresh_until": fresh_until,
            "rows": options.rows,
            "cols": options.cols,
            "cwd_given": options.cwd is not None,
            "init": INIT,
        }
        make_stores(this_host.directory(record.session), order["overlays"])
        starter = Starter(order, lock, config.log_file.with_name("holder.log"))
        try:
            return _complete_start(starter, order["record"], agent)
        except BaseException:
            starter.abandon()  # the holder removes what it made
            raise
    except BaseException:
        os.close(lock)
        lock = -1
        this_host.sweep()  # remove what a holder that died left behind
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def _complete_start(starter: Starter, written: dict[str, Any], agent: agent_process.Agent) -> Record:
    """Follow the start of a holder to its end: connect its network, make sure that an agent renews its lease, release
    it."""
    record = Record.from_json(written)
    # The holder reports its fork, and its child that it is in its own network namespace, in either order.
    messages = [starter.expect(), starter.expect()]
    pid = next(message["pid"] for message in messages if "pid" in message)
    if record.link is not None:
        try:
            network.connect(pid, record.link)
        except Blocked:
            starter.check()  # a session that failed took its network with it: report its own reason instead
            raise
    agent.ready()  # it does not exit any more, now that the session is claimed
    starter.go()
    starter.expect()
    starter.close()
    return replace(record, phase="live", pid=pid)


def specify(options: RunOptions, environ: Mapping[str, str]) -> Spec:
    """Check all of the request that can be checked before anything is made. Return the specification of the session.
    Raise Usage."""
    if not options.command:
        raise Usage("no command given", "Put it after --, for example: cmdop-migrate run -- bash")
    user = options.user or pwd.getpwuid(os.getuid()).pw_name
    try:
        account = pwd.getpwnam(user)
    except KeyError as error:
        raise Usage(f"no such user: {user}", "See: getent passwd") from error
    _check_here(options)
    if options.cwd is not None and not os.path.isdir(options.cwd):
        raise Usage(f"no such directory: {options.cwd}", "Name a directory that exists, with --cwd.")
    shares = []
    for share in options.shares:
        if not os.path.isdir(share):
            raise Usage(f"cannot share {share}: no such directory", "Give an existing directory to --share.")
        shares.append(os.path.realpath(share))
    values = {
        "HOME": account.pw_dir,
        "USER": user,
        "LOGNAME": user,
        "SHELL": account.pw_shell or "/bin/sh",
        "PATH": DEFAULT_PATH,
        "TERM": environ.get("TERM") if environ.get("TERM") not in (None, "dumb", "unknown") else "xterm-256color",
        **{key: value for key, value in environ.items() if key in KEPT_VARIABLES or key.startswith("LC_")},
    }
    for item in options.env:
        key, given, value = item.partition("=")
        if not key or "\0" in item:
            raise Usage(f"not an environment setting: {item!r}", "Write it like --env KEY=VALUE.")
        if given:
            values[key] = value
        elif key in environ:
            values[key] = environ[key]
        else:
            raise Usage(f"--env {key}: you have no such variable", f"Write it like --env {key}=VALUE.")
    _check_size(options.command, values)
    env = tuple((key, value) for key, value in values.items() if value is not None)
    cwd = os.path.abspath(options.cwd) if options.cwd is not None else _here()
    return Spec(
        options.command,
        cwd,
        user,
        env,
        options.net,
        tuple(shares),
        _hooks(options.hooks, shares),
        _gate(options.gate, shares),
    )


def _hooks(given: tuple[str, ...], shares: list[str]) -> tuple[tuple[str, str], ...]:
    parsed = tuple(hooks.parse(text) for text in given)
    for _, path in parsed:
        if any(is_under(os.path.realpath(path), share) for share in shares):
            raise Usage(f"hook {path} is in a directory shared with the session", "Put it where only the host writes.")
    return parsed


def _gate(given: str | None, shares: list[str]) -> str | None:
    if given is None:
        return None
    address = settings.gate(given)
    if address.startswith("/"):
        problem = trusted_file.refusal(address)
        if problem:
            raise Usage(
                f"gate {address}: {problem}", "Give an executable that is owned by root and writable by root only."
            )
        if any(is_under(os.path.realpath(address), share) for share in shares):
            raise Usage(f"gate {address} is in a directory shared with the session", "Put it elsewhere.")
    return address


def _check_here(options: RunOptions) -> None:
    """Raise Usage if a relative path is given and the current directory was removed: it still exists for this process,
    but has no path that a session could be given."""
    try:
        if not all(os.path.isabs(path) for path in (options.cwd or "/", *options.shares)):
            os.getcwd()
    except FileNotFoundError as error:
        raise Usage("the directory you are in was removed", "Change to another, or give full paths.") from error


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _check_size(command: tuple[str, ...], values: Mapping[str, str | None]) -> None:
    """Raise Usage if command and environment exceed the kernel's limits. exec would refuse them too, but could report
    it only to a terminal without a reader."""
    strings = [*command, *(f"{key}={value}" for key, value in values.items())]
    lengths = [len(os.fsencode(string)) + 1 for string in strings]
    if max(lengths) > MAX_STRING or sum(lengths) > MAX_STRINGS:
        longest = strings[lengths.index(max(lengths))]
        hint = f"At most {MAX_STRING >> 10} KiB each and {MAX_STRINGS >> 10} KiB in all; put long values into a file."
        raise Usage(f"command and environment are too long ({sum(lengths)} bytes; longest: {longest[:40]!r}…)", hint)


def _check_shares(shares: tuple[str, ...], private: list[str]) -> None:
    for share in shares:
        if share == "/" or share in SPECIAL:
            raise Usage(f"cannot share {share}: every session has its own", "Share a directory below it.")
        for path in private:
            if is_under(path, share) or is_under(share, path):
                hint = "Share a directory that does not hold it, or set state_dir elsewhere."
                raise Usage(f"cannot share {share}: {path} is private to this toolkit", hint)


def _check_state_dir(config: Config) -> None:
    mount = host_mounts.mount_of(os.path.realpath(config.sessions_dir))
    if mount.kind in host_mounts.NOT_UPPER:
        hint = "Set state_dir to a directory on ext4, xfs, btrfs or tmpfs."
        raise Blocked(f"{config.state_dir} is on {mount.kind}, which cannot hold the files that sessions change", hint)


def _check_init() -> None:
    if not os.access(INIT, os.X_OK):
        raise Blocked(f"{INIT} is missing: it is the first process of every session", "Run: cmdop-migrate doctor --fix")
