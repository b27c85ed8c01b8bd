"""Start a session."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from cmdop_migrate import clock
from cmdop_migrate import config as settings
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, Usage
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import agent_process, hooks, leases, name_lease
from cmdop_migrate.host.hook_process import Outcome
from cmdop_migrate.host.host import Host
from cmdop_migrate.lease.registry import RELAY, sibling
from cmdop_migrate.model import NetMode, Record, Spec, new_session_id, session_name
from cmdop_migrate.session import host_mounts, network
from cmdop_migrate.session.spawn_holder import Starter, make_stores, overlays
from cmdop_migrate.util import trusted_file
from cmdop_migrate.util.paths import SPECIAL, is_under
from cmdop_migrate.util.timings import Phases

INIT = "/usr/bin/tini-static"
KEPT = ("LANG", "LANGUAGE", "TZ", "COLORTERM", "PATH")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOLDERS = "holders"
TRIES = 5
MAX_STRING, MAX_STRINGS = 128 << 10, 1 << 20  # the kernel's limit for one string; half its usual limit for all


@dataclass(frozen=True)
class Wish:
    """What the person asked for, before it is looked at."""

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


def run(config: Config, wish: Wish, environ: Mapping[str, str] | None = None) -> tuple[Record, list[Outcome]]:
    """The record of a session that now lives, and how the hooks went that were told of its token; or an error and
    nothing left behind."""
    this_host = Host(config)
    this_host.prepare()
    spec = specify(wish, os.environ if environ is None else environ)
    name = session_name(wish.name) if wish.name is not None else None
    _check_init()
    _check_state_dir(config)
    _check_shares(spec.shares, private_paths(config))
    with contextlib.closing(agent_process.Agent(config)) as agent:  # it boots while we go on
        record = _run(this_host, wish, spec, name, agent)
    return record, hooks.run(this_host, hooks.TOKEN, record, reason="run", to=config.host)


def _run(this_host: Host, wish: Wish, spec: Spec, name: str | None, agent: agent_process.Agent) -> Record:
    config = this_host.config
    if leases.must_be_tried(config):
        agent.ready()  # it tries it, for us too
    store, phases = leases.open_store(config), Phases("run")
    if name_lease.is_taken(store, this_host):
        agent.ready()  # it waits for a dead one's name
        name_lease.check(store, this_host)
    for _ in range(TRIES):
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
                started = _start(this_host, record, wish, lease.fresh_until, agent)
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
    raise Blocked(f"no free network found in {TRIES} tries", "Set a larger `subnet`.")


def _start(this_host: Host, record: Record, wish: Wish, fresh_until: float, agent: agent_process.Agent) -> Record:
    config, lock = this_host.config, this_host.claim(record)
    try:
        order = holder_order(config, this_host, record)
        order |= {
            "mode": "start",
            "fresh_until": fresh_until,
            "rows": wish.rows,
            "cols": wish.cols,
            "cwd_given": wish.cwd is not None,
            "init": INIT,
        }
        make_stores(this_host.directory(record.session), order["overlays"])
        starter = Starter(order, lock, config.log_file.with_name("holder.log"))
        try:
            return _see_through(starter, order["record"], agent)
        except BaseException:
            starter.abandon()  # the holder undoes what it made
            raise
    except BaseException:
        os.close(lock)
        lock = -1
        this_host.sweep()  # what the holder could not undo, dead as it is now, goes here
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def _see_through(starter: Starter, written: dict[str, Any], agent: agent_process.Agent) -> Record:
    record = Record.from_json(written)
    # The holder says that it forked, its child that it stands in its own network: whoever is quicker comes first.
    said = [starter.expect(), starter.expect()]
    pid = next(one["pid"] for one in said if "pid" in one)
    if record.link is not None:
        try:
            network.connect(pid, record.link)
        except Blocked:
            starter.check()  # a session that fails on its own takes its network along: its own reason comes first
            raise
    agent.ready()  # it does not leave any more, now that the session is claimed
    starter.go()
    starter.expect()
    starter.close()
    return replace(record, phase="live", pid=pid)


def holder_order(config: Config, this_host: Host, record: Record) -> dict[str, Any]:
    """What every holder needs to know, of a fresh session or of a restored one."""
    directory, group = this_host.directory(record.session), this_host.cgroup(record.session)
    holders = os.path.join(os.path.dirname(group), HOLDERS)
    cgroup.create(holders)
    hidden = private_paths(config)
    points = list(record.layers) or host_mounts.read_layers(hidden, record.spec.shares)
    resolv = host_mounts.resolv_conf(record.link.gateway if record.link else None)
    record = replace(record, layers=tuple(points), binds=record.spec.shares)
    return {
        "record": record.to_json(),
        "dir": str(directory),
        "root": str(directory / "root"),
        "socket": str(this_host.socket(record.session)),
        "cgroup": group,
        "holders": holders,
        "ring": config.ring_size,
        "overlays": overlays(points),
        "hidden": hidden,
        "resolv": resolv,
        "binds": [[share, False] for share in record.binds],
        "gate": _gate_order(config, record.spec),
    }


def _gate_order(config: Config, spec: Spec) -> dict[str, Any] | None:
    address = spec.gate or config.gate
    if address is None:
        return None
    return {"address": address, "timeout": config.gate_timeout, "on_error": config.gate_on_error}


def specify(wish: Wish, environ: Mapping[str, str]) -> Spec:
    """Checks what can be checked before anything is made."""
    if not wish.command:
        raise Usage("no command given", "Put it after --, for example: cmdop-migrate run -- bash")
    user = wish.user or pwd.getpwuid(os.getuid()).pw_name
    try:
        account = pwd.getpwnam(user)
    except KeyError as error:
        raise Usage(f"no such user: {user}", "See: getent passwd") from error
    _check_here(wish)
    if wish.cwd is not None and not os.path.isdir(wish.cwd):
        raise Usage(f"no such directory: {wish.cwd}", "Name a directory that exists, with --cwd.")
    shares = []
    for share in wish.shares:
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
        **{key: value for key, value in environ.items() if key in KEPT or key.startswith("LC_")},
    }
    for item in wish.env:
        key, given, value = item.partition("=")
        if not key or "\0" in item:
            raise Usage(f"not an environment setting: {item!r}", "Write it like --env KEY=VALUE.")
        if given:
            values[key] = value
        elif key in environ:
            values[key] = environ[key]
        else:
            raise Usage(f"--env {key}: you have no such variable", f"Write it like --env {key}=VALUE.")
    _check_size(wish.command, values)
    env = tuple((key, value) for key, value in values.items() if value is not None)
    cwd = os.path.abspath(wish.cwd) if wish.cwd is not None else _here()
    return Spec(
        wish.command, cwd, user, env, wish.net, tuple(shares), _hooks(wish.hooks, shares), _gate(wish.gate, shares)
    )


def _hooks(given: tuple[str, ...], shares: list[str]) -> tuple[tuple[str, str], ...]:
    found = tuple(hooks.parse(one) for one in given)
    for _, path in found:
        if any(is_under(os.path.realpath(path), share) for share in shares):
            raise Usage(f"hook {path} is in a directory shared with the session", "Put it where only the host writes.")
    return found


def _gate(given: str | None, shares: list[str]) -> str | None:
    if given is None:
        return None
    address = settings.gate(given)
    if address.startswith("/"):
        problem = trusted_file.refusal(address)
        if problem:
            raise Usage(f"gate {address}: {problem}", "Give an executable that root owns and nobody else may write.")
        if any(is_under(os.path.realpath(address), share) for share in shares):
            raise Usage(f"gate {address} is in a directory shared with the session", "Put it elsewhere.")
    return address


def _check_here(wish: Wish) -> None:
    """A directory that was removed is still one to who is in it, but has no name that a session could be given."""
    try:
        if not all(os.path.isabs(path) for path in (wish.cwd or "/", *wish.shares)):
            os.getcwd()
    except FileNotFoundError as error:
        raise Usage("the directory you are in was removed", "Change to another, or give full paths.") from error


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def private_paths(config: Config) -> list[str]:
    """What no session may see: keys, other sessions, the store, the lease."""
    paths = [str(config.state_dir), str(config.run_dir), str(config.key_file), str(config.relay_credential)]
    for url in (config.store, config.lease, sibling(config.lease, RELAY)):
        parts = urlsplit(url)
        if parts.scheme in ("file", "sqlite"):
            paths.append(parts.path)
    paths = [os.path.realpath(path) for path in paths]
    return sorted({path for path in paths if not any(path != top and is_under(path, top) for top in paths)})


def _check_size(command: tuple[str, ...], values: Mapping[str, str | None]) -> None:
    """exec refuses more than this, and could say so only to a terminal nobody looks at."""
    strings = [*command, *(f"{key}={value}" for key, value in values.items())]
    lengths = [len(os.fsencode(one)) + 1 for one in strings]
    if max(lengths) > MAX_STRING or sum(lengths) > MAX_STRINGS:
        worst = strings[lengths.index(max(lengths))]
        hint = f"At most {MAX_STRING >> 10} KiB each and {MAX_STRINGS >> 10} KiB in all; put long values into a file."
        raise Usage(f"command and environment are too long ({sum(lengths)} bytes; longest: {worst[:40]!r}…)", hint)


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
        raise Blocked(f"{config.state_dir} is on {mount.kind}, which cannot hold what sessions change", hint)


def _check_init() -> None:
    if not os.access(INIT, os.X_OK):
        raise Blocked(f"{INIT} is missing: it is the first process of every session", "Run: cmdop-migrate doctor --fix")
