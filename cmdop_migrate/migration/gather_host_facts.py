"""This host's facts for a move, its own or another's question answered. Nothing changes but that a store nobody
asked before gets its id."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from cmdop_migrate import __version__, log
from cmdop_migrate.config import Config
from cmdop_migrate.criu.install import find
from cmdop_migrate.errors import BadConfig, Blocked, CmdopError
from cmdop_migrate.host import doctor, draining, leases, resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.files.host_files import HostFile, HostFiles, Verdict, compare
from cmdop_migrate.images.format import keys
from cmdop_migrate.lease.store_id import identity
from cmdop_migrate.migration import compatibility
from cmdop_migrate.model import PROTOCOL
from cmdop_migrate.preflight.facts import cpu
from cmdop_migrate.preflight.facts import machine as facts_machine
from cmdop_migrate.preflight.facts.host import Ask, HostFacts, Need, Port, Service, Standing, Wanting
from cmdop_migrate.preflight.rules import doctor as rules_doctor
from cmdop_migrate.session import inspect
from cmdop_migrate.storage import registry
from cmdop_migrate.util import trusted_file
from cmdop_migrate.util.digest import blake3

RELAY_TIMEOUT = 3.0
_log = log.get("plan")


def gather(this_host: Host, ask: Ask) -> HostFacts:
    """Everything a plan wants to know of this host. What does not answer is said, never waited for long."""
    config = this_host.config
    machine = facts_machine.gather(config.state_dir, _criu(config))
    lease, standing = _lease(config, ask.session)
    ring = _keys(config)
    return HostFacts(
        host=config.host,
        instance=this_host.instance(),
        version=__version__,
        protocol=PROTOCOL,
        cpu=cpu.read(),
        kernel=machine.release,
        criu=machine.criu.version,
        criu_features=machine.criu.features,
        memory_available=min([machine.memory_available, *_group_room(this_host.cgroup(ask.session))]),
        state_dir=str(config.state_dir),
        disk_free=machine.state.free,
        store=_store(config),
        lease=lease,
        needs=(
            *(
                Need(one.name, one.message, one.fix, one.fatal)
                for one in rules_doctor.run(machine)
                if one.level != "ok"
            ),
            *_drained(config),
        ),
        wanting=_wanting(config, ask),
        users=_users(ask.uids),
        listening=_listening({one.port for one in ask.ports}) if ask.ports else (),
        addresses=_addresses() if ask.ports else frozenset(),
        directories=frozenset(path for path in ask.directories if os.path.isdir(path)),
        hooks=frozenset(path for path in ask.hooks if not trusted_file.refusal(path)),
        keys=frozenset(ring),
        key=ring[0] if ring else None,
        standing=standing,
        relay=_relay(config),
        name_taken=any(
            one.name == ask.name and one.session != ask.session and one.phase != "exited" for one in this_host.all()
        ),
    )


def _drained(config: Config) -> Iterator[Need]:
    """To who wants to send a session here this is as good as a broken machine."""
    if draining.read(config.state_dir) is not None:
        one = doctor.DRAINED
        yield Need(one.name, f"{config.host} is being drained", one.fix, fatal=True)


def _group_room(group: str) -> Iterator[int]:
    """Bytes left under each memory limit that a session's cgroup would be under; none where nobody set one."""
    for parent in Path(group).parents:
        try:
            most, used = (
                (parent / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current")
            )
        except OSError:
            continue  # not made yet, not controlled, or no cgroup any more
        if most.isdecimal() and used.isdecimal():
            yield max(0, int(most) - int(used))


def _criu(config: Config) -> facts_machine.CriuFacts:
    """The one that `checkpoint` and `restore` would use."""
    try:
        found = resources.find_criu(config)
    except Blocked as error:
        return facts_machine.CriuFacts(problems=(error.message,))
    return facts_machine.CriuFacts(
        ".".join(map(str, found.version)), found.source, find.features(found, doctor.FEATURES)
    )


def _wanting(config: Config, ask: Ask) -> dict[str, Wanting]:
    """By the same comparison that a restore makes."""
    known = HostFiles(config.state_dir / "cache" / "hostfiles.json", blake3, "blake3")
    verdicts = compare((HostFile.from_json(list(row)) for row in ask.files), known.describe, known.begins)
    save(known)
    wanting: dict[str, Wanting] = {}
    for path, verdict in verdicts:
        if verdict not in (Verdict.SAME, Verdict.GROWN):
            wanting[path] = "missing" if verdict is Verdict.MISSING else "different"
    return wanting


def save(known: HostFiles) -> None:
    """Where the disk is full the digests are made again next time: looking must work there too."""
    try:
        if known.hashed:
            known.save()
    except OSError as error:
        _log.warning("cannot keep the digests of files: %s", error)


def _store(config: Config) -> Service:
    try:
        return Service(config.store, id=compatibility.store_identity(registry.open_store(config.store)))
    except CmdopError as error:
        return Service(config.store, error.message)


def _lease(config: Config, session: str) -> tuple[Service, Standing | None]:
    try:
        store = leases.open_store(config)
        service, seen = Service(config.lease, id=identity(store)), store.inspect(session)
    except CmdopError as error:
        return Service(config.lease, error.message), None
    if seen is None:
        return service, None
    one = seen.record
    return service, Standing(one.state, one.host, one.instance, one.token)


def _keys(config: Config) -> list[str]:
    """Fingerprints, the current one first. A host that has none yet makes none for being asked."""
    try:
        return [key.fingerprint for key in keys.load(config.key_file).keys]
    except BadConfig:
        return []


def _relay(config: Config) -> Service | None:
    if config.relay is None:
        return None
    try:
        parts = urlsplit(config.relay)
        port = parts.port or (443 if parts.scheme == "wss" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=RELAY_TIMEOUT):
            return Service(config.relay)
    except (OSError, ValueError) as error:
        return Service(config.relay, str(error))


def _users(uids: Iterable[int]) -> dict[int, str]:
    found = {}
    for uid in uids:
        try:
            found[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            continue  # nobody has this number here
    return found


def _listening(ports: set[int]) -> tuple[Port, ...]:
    """Whoever has these ports in this network: TCP that listens, UDP that is bound."""
    found = {port for one in inspect.host_sockets() if (port := as_port(one)) is not None and port.port in ports}
    return tuple(sorted(found, key=lambda one: (one.port, one.kind, one.address)))


def as_port(one: inspect.Socket) -> Port | None:
    """What nobody else can then bind to; None for a connection, or a socket without a port."""
    if one.kind not in ("tcp", "udp") or (one.kind == "tcp" and one.state != "LISTEN"):
        return None
    address, _, port = one.local.rpartition(":")
    return None if one.remote or port == "0" else Port(one.kind, address, int(port))


def _addresses() -> frozenset[str]:
    import psutil  # here: only sessions on the host's own network need it

    families = (socket.AF_INET, socket.AF_INET6)
    each = [one for several in psutil.net_if_addrs().values() for one in several if one.family in families]
    return frozenset(one.address.partition("%")[0] for one in each)
