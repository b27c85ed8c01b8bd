"""Resolve the settings (default < config file < environment < flag) once, into a frozen Config.

An unknown key or a bad value is an error that names its line and the valid choices: a setting that is silently ignored
is worse than no setting.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cmdop_migrate import host_entry, units
from cmdop_migrate.errors import BadConfig, Usage
from cmdop_migrate.host_entry import HostEntry

DEFAULT_FILE = "/etc/cmdop-migrate/config.toml"
DEFAULT_STATE_DIR = "/var/lib/cmdop-migrate"
CONFIG_ENV = "CMDOP_MIGRATE_CONFIG"
ENV_PREFIX = "CMDOP_MIGRATE_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Config:
    """Hold the settings of one host. Two configs with different directories are two hosts, even on one machine."""

    host: str
    state_dir: Path
    run_dir: Path
    store: str
    lease: str
    lease_ttl: float
    key_file: Path
    relay: str | None
    criu: str | None
    ring_size: int
    keep_exited: float
    subnet: str
    hooks_dir: Path
    hook_timeout: float
    gate: str | None
    gate_timeout: float
    gate_on_error: str
    hosts: tuple[HostEntry, ...] = ()
    bandwidth: int | None = None
    relay_credential: Path = Path(DEFAULT_STATE_DIR, "relay.credential")
    dirty_tracking: str = "auto"
    ready: bool = True

    @property
    def sessions_dir(self) -> Path:
        return self.state_dir / "sessions"

    @property
    def log_file(self) -> Path:
        return self.state_dir / "log" / "cmdop-migrate.log"


def host_name(text: str) -> str:
    """Return `text` if it is a valid host name. Raise Usage."""
    if not _NAME.fullmatch(text):
        raise Usage(f"not a host name: {text!r}", "Use letters, digits, '.', '_' and '-', at most 63.")
    return text


def _absolute(text: str) -> str:
    if not os.path.isabs(text):
        raise Usage(f"not an absolute path: {text!r}", "Start it with '/'.")
    return os.path.normpath(text)


def _url(*schemes: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not text.startswith(tuple(f"{scheme}://" for scheme in schemes)):
            raise Usage(f"not a URL: {text!r}", "Valid: " + ", ".join(f"{s}://…" for s in schemes) + ".")
        return text

    return check


def _duration_text(text: str) -> str:
    if units.duration(text) <= 0:
        raise Usage(f"must be greater than zero: {text!r}", "Write it like 15s.")
    return text


def _ttl(text: str) -> str:
    if not 0.2 <= units.duration(text) <= 86400:  # what lease/margins.py can work with
        raise Usage(f"out of range: {text!r}", "Between 200ms and 24h; 15s is usual.")
    return text


def _ring(text: str) -> str:
    if not 4096 <= units.size(text) <= 256 << 20:
        raise Usage(f"out of range: {text!r}", "Between 4KiB and 256MiB.")
    return text


def _bandwidth(text: str) -> str:
    if units.size(text) < 64 << 10:
        raise Usage(f"too small: {text!r}", "At least 64KiB per second.")
    return text


def gate(text: str) -> str:
    """Return `text` if it is an absolute path or an http(s) URL. Raise Usage."""
    if text.startswith(("http://", "https://")) and len(text) > len("https://"):
        return text
    if not os.path.isabs(text):
        raise Usage(f"neither an absolute path nor a URL: {text!r}", "Write it like /etc/gate or https://….")
    return os.path.normpath(text)


def _gate_timeout(text: str) -> str:
    if not 0 < units.duration(text) <= 60:
        raise Usage(f"out of range: {text!r}", "Greater than zero, and at most 60s: input is blocked for that long.")
    return text


def _one_of(*words: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in words:
            raise Usage(f"not a choice: {text!r}", f"Valid: {', '.join(words)}.")
        return text

    return check


def _subnet(text: str) -> str:
    import ipaddress

    try:
        net = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise Usage(f"not an IPv4 network: {text!r} ({error})", "Write it like 100.64.0.0/10.") from error
    if net.prefixlen > 24:
        raise Usage(f"too small for sessions: {text!r}", "A /24 or larger; each session takes four addresses.")
    return str(net)


class Setting(NamedTuple):
    """Describe one key. STATE_DIR in a default is filled in last; `about` is its text in docs/reference/settings.md."""

    default: str | None
    check: Callable[[str], str]
    about: str


KEYS: dict[str, Setting] = {
    "host": Setting(None, host_name, "name of this host; without it, the machine's host name"),
    "state_dir": Setting(
        DEFAULT_STATE_DIR, _absolute, "directory for sessions, their files, events, logs and the private CRIU"
    ),
    "run_dir": Setting("/run/cmdop-migrate", _absolute, "directory for the sessions' sockets"),
    "store": Setting("file://STATE_DIR/store", _url("file", "s3"), "store for checkpoints; see [stores](stores.md)"),
    "lease": Setting(
        "sqlite://STATE_DIR/lease.db",
        _url("sqlite", "s3", "etcd"),
        "lease store, which decides which host may run a session; shared by all hosts that share a store",
    ),
    "lease_ttl": Setting("15s", _ttl, "how long a host may run a session without renewing its lease; 200ms to 24h"),
    "key_file": Setting("STATE_DIR/keys", _absolute, "file with the keys that seal checkpoints"),
    "relay": Setting(
        None,
        _url("wss", "ws"),
        "relay through which clients reach this host's sessions; see [relay](../operations/relay.md)",
    ),
    "relay_credential": Setting(
        "STATE_DIR/relay.credential", _absolute, "file with this host's credential for the relay"
    ),
    "criu": Setting(None, _absolute, "CRIU binary to use; without it, the one `doctor` finds or fetches"),
    "ring_size": Setting("1MiB", _ring, "how much output a session keeps; 4KiB to 256MiB"),
    "keep_exited": Setting("24h", _duration_text, "how long an ended session stays listed and readable"),
    "bandwidth": Setting(
        None, _bandwidth, "limit for what a command sends to the store, in bytes per second; without it, no limit"
    ),
    "dirty_tracking": Setting(
        "auto",
        _one_of("auto", "off"),
        "`--pre-ship` reads only pages written since its last round, where the kernel can tell; `off`: all pages",
    ),
    "ready": Setting(
        "true",
        _one_of("true", "false", "1", "0"),
        "the agent keeps a [fork server](../decisions/0007-ready.md), whose forks run most commands",
    ),
    "subnet": Setting(
        "100.64.0.0/10",
        _subnet,
        "IPv4 range for the private networks of sessions; a /24 or larger, four addresses each",
    ),
    "hooks_dir": Setting(
        "/etc/cmdop-migrate/hooks", _absolute, "directory of this host's [hooks](../operations/hooks.md), in EVENT.d"
    ),
    "hook_timeout": Setting("30s", _duration_text, "how long one hook may run; then it is killed and counts as failed"),
    "gate": Setting(None, gate, "executable or http(s) URL that [decides](../operations/actors.md) on each input line"),
    "gate_timeout": Setting("5s", _gate_timeout, "how long the gate may take; then it counts as failed. At most 60s"),
    "gate_on_error": Setting(
        "deny", _one_of("deny", "allow"), "what happens to a line when the gate fails: `deny` or `allow`"
    ),
}


def load(
    path: str | None = None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Resolve all settings. `path` is --config; a file that is named explicitly must exist. Raise BadConfig."""
    environ = os.environ if environ is None else environ
    chosen: dict[str, str] = {}
    hosts: tuple[HostEntry, ...] = ()
    if path == "":
        raise BadConfig("--config names no file", "Give its path, or leave --config out.")
    named = path or environ.get(CONFIG_ENV)
    file = Path(named or DEFAULT_FILE)
    if named or file.exists():
        from_file, hosts = _from_file(file)
        chosen.update(from_file)
    for key in KEYS:
        variable = ENV_PREFIX + key.upper()
        if environ.get(variable):
            chosen[key] = _checked(key, environ[variable], f"environment variable {variable}")
    for key, value in (flags or {}).items():
        chosen[key] = _checked(key, value, f"--{key.replace('_', '-')}")
    return _build(chosen, hosts)


def to_environment(config: Config) -> dict[str, str]:
    """Return the settings as environment variables for a process that this one starts, which then ignores its own
    config file and environment. Other hosts are not included: only commands contact them."""
    values = {
        "host": config.host,
        "state_dir": str(config.state_dir),
        "run_dir": str(config.run_dir),
        "store": config.store,
        "lease": config.lease,
        "lease_ttl": units.exact_duration(config.lease_ttl),
        "key_file": str(config.key_file),
        "relay": config.relay or "",
        "relay_credential": str(config.relay_credential),
        "criu": config.criu or "",
        "ring_size": f"{config.ring_size}B",
        "keep_exited": units.exact_duration(config.keep_exited),
        "subnet": config.subnet,
        "bandwidth": f"{config.bandwidth}B" if config.bandwidth is not None else "",
        "dirty_tracking": config.dirty_tracking,
        "ready": "true" if config.ready else "false",
        "hooks_dir": str(config.hooks_dir),
        "hook_timeout": units.exact_duration(config.hook_timeout),
        "gate": config.gate or "",
        "gate_timeout": units.exact_duration(config.gate_timeout),
        "gate_on_error": config.gate_on_error,
    }
    return {CONFIG_ENV: os.devnull, **{ENV_PREFIX + key.upper(): value for key, value in values.items()}}


def _build(chosen: Mapping[str, str], hosts: tuple[HostEntry, ...]) -> Config:
    def value(key: str) -> str | None:
        text = chosen.get(key, KEYS[key].default)
        return text.replace("STATE_DIR", state_dir) if text and key not in chosen else text

    def must(key: str) -> str:
        text = value(key)
        assert text is not None
        return text

    state_dir = chosen.get("state_dir") or str(KEYS["state_dir"].default)
    return Config(
        host=value("host") or host_name(socket.gethostname().split(".")[0]),
        state_dir=Path(state_dir),
        run_dir=Path(must("run_dir")),
        store=must("store"),
        lease=must("lease"),
        lease_ttl=units.duration(must("lease_ttl")),
        key_file=Path(must("key_file")),
        relay=value("relay"),
        criu=value("criu"),
        ring_size=units.size(must("ring_size")),
        keep_exited=units.duration(must("keep_exited")),
        subnet=must("subnet"),
        hooks_dir=Path(must("hooks_dir")),
        hook_timeout=units.duration(must("hook_timeout")),
        gate=value("gate"),
        gate_timeout=units.duration(must("gate_timeout")),
        gate_on_error=must("gate_on_error"),
        hosts=hosts,
        bandwidth=units.size(limit) if (limit := value("bandwidth")) is not None else None,
        relay_credential=Path(must("relay_credential")),
        dirty_tracking=must("dirty_tracking"),
        ready=must("ready") in ("true", "1"),
    )


def _from_file(file: Path) -> tuple[dict[str, str], tuple[HostEntry, ...]]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(
            f"cannot read the config file {file}: {error}", "Check --config and its permissions."
        ) from error
    import tomllib  # most hosts have no config file

    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{file}: not valid TOML: {error}", 'Write settings like: host = "host-a"') from error
    hosts = _hosts(file, text, table.pop("hosts", {}))
    return {key: _file_value(file, text, key, value) for key, value in table.items()}, hosts


def _hosts(file: Path, text: str, table: object) -> tuple[HostEntry, ...]:
    """Return the hosts of the `[hosts.NAME]` tables. Raise BadConfig."""
    hosts = []
    for name, entry in table.items() if isinstance(table, dict) else [("", table)]:
        line = _line_of(text, f"hosts.{name}" if name else "hosts") or _line_of(text, "hosts") or 1
        if not isinstance(entry, dict):
            raise BadConfig(f"{file}:{line}: hosts must have one table per host", host_entry.EXAMPLE)
        for key, value in entry.items():
            place = f"{file}:{_line_of(text, key, line) or line}"
            try:
                host_entry.check_field(key, value)
            except Usage as error:
                raise BadConfig(f"{place}: {error.message}", error.hint) from error
        try:
            hosts.append(host_entry.make(name, entry))
        except Usage as error:
            raise BadConfig(f"{file}:{line}: {error.message}", error.hint) from error
    return tuple(hosts)


def _file_value(file: Path, text: str, key: str, value: object) -> str:
    place = f"{file}:{_line_of(text, key) or 1}"
    if key not in KEYS:
        valid = ", ".join(sorted(KEYS))
        raise BadConfig(f"{place}: unknown key {key!r}", f"Valid keys: {valid}; and tables [hosts.NAME].")
    if not isinstance(value, str):
        example = KEYS[key].default or "…"
        raise BadConfig(f"{place}: {key} must be a string, in quotes", f'Write it like: {key} = "{example}"')
    return _checked(key, value, place)


def _line_of(text: str, key: str, after: int = 0) -> int | None:
    """Return the first line below `after` with this key or table, or None."""
    parts = r"\s*\.\s*".join(rf"[\"']?{re.escape(part)}\b[\"']?" for part in key.split(".", 1))
    pattern = re.compile(rf"\s*\[*\s*{parts}")
    lines = enumerate(text.splitlines(), 1)
    return next((number for number, line in lines if number > after and pattern.match(line)), None)


def _checked(key: str, value: str, place: str) -> str:
    try:
        return KEYS[key].check(value)
    except Usage as error:
        raise BadConfig(f"{place}: {key}: {error.message}", error.hint) from error
