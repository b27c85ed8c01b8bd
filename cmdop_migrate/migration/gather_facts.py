"""Gather the facts that a plan needs: of this host, as a source or on request of another host, and of a running
session.

Nothing is frozen or changed, except that a store or lease store that has no id yet gets one, and that digests of files
are cached.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cmdop_migrate import __version__, log
from cmdop_migrate.config import Config
from cmdop_migrate.criu.install import find
from cmdop_migrate.errors import BadConfig, Blocked, CmdopError
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import doctor, drain_journal, leases, resources, talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.files import walk
from cmdop_migrate.images.files.host_files import FileMatch, HostFile, HostFiles, compare
from cmdop_migrate.images.format import keys
from cmdop_migrate.lease.store_id import identity
from cmdop_migrate.migration import compatibility
from cmdop_migrate.model import PROTOCOL, Record
from cmdop_migrate.preflight.facts import cpu
from cmdop_migrate.preflight.facts import machine as facts_machine
from cmdop_migrate.preflight.facts.host import (
    FileDifference,
    HostFacts,
    HostProblem,
    HostQuery,
    LeaseFacts,
    Port,
    Service,
)
from cmdop_migrate.preflight.facts.session import HeldFile, PastCheckpoint, SessionFacts
from cmdop_migrate.preflight.rules import doctor as rules_doctor
from cmdop_migrate.session import files_in_use, inspect, open_files, tcp_connections
from cmdop_migrate.session.holder_client import HolderGone
from cmdop_migrate.snapshot.capture import dump_checks
from cmdop_migrate.storage import registry
from cmdop_migrate.util import trusted_file
from cmdop_migrate.util.digest import blake3

RELAY_TIMEOUT = 3.0
MEASURED_CHECKPOINTS = 20
_log = log.get("plan")


def gather_host(this_host: Host, ask: HostQuery) -> HostFacts:
    """Gather the facts of this host that `ask` needs. A store, lease store or relay that does not answer is a fact too,
    and is not waited for long."""
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
                HostProblem(check.name, check.message, check.fix, check.fatal)
                for check in rules_doctor.run(machine)
                if check.level != "ok"
            ),
            *_drained(config),
        ),
        wanting=_wanting(config, ask),
        users=_users(ask.uids),
        listening=_listening({port.port for port in ask.ports}) if ask.ports else (),
        addresses=_addresses() if ask.ports else frozenset(),
        directories=frozenset(path for path in ask.directories if os.path.isdir(path)),
        hooks=frozenset(path for path in ask.hooks if not trusted_file.refusal(path)),
        keys=frozenset(ring),
        key=ring[0] if ring else None,
        standing=standing,
        relay=_relay(config),
        name_taken=any(
            record.name == ask.name and record.session != ask.session and record.phase != "exited"
            for record in this_host.all()
        ),
    )


def _drained(config: Config) -> Iterator[HostProblem]:
    """Yield a fatal need if this host is being drained: no session can be moved here then."""
    if drain_journal.read_flag(config.state_dir) is not None:
        check = doctor.DRAINED
        yield HostProblem(check.name, f"{config.host} is being drained", check.fix, fatal=True)


def _group_room(group: str) -> Iterator[int]:
    """Yield the bytes left under each memory limit that applies to a session's cgroup."""
    for parent in Path(group).parents:
        try:
            most, used = (
                (parent / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current")
            )
        except OSError:
            continue  # not created yet, without the memory controller, or no cgroup
        if most.isdecimal() and used.isdecimal():
            yield max(0, int(most) - int(used))


def _criu(config: Config) -> facts_machine.CriuFacts:
    """Return the facts of the CRIU that `checkpoint` and `restore` would use."""
    try:
        criu = resources.find_criu(config)
    except Blocked as error:
        return facts_machine.CriuFacts(problems=(error.message,))
    version = ".".join(map(str, criu.version))
    return facts_machine.CriuFacts(version, criu.source, find.features(criu, doctor.FEATURES))


def _wanting(config: Config, ask: HostQuery) -> dict[str, FileDifference]:
    """Return the files that are missing or different here, by the same comparison that a restore makes."""
    known = HostFiles(config.state_dir / "cache" / "hostfiles.json", blake3, "blake3")
    verdicts = compare((HostFile.from_json(list(row)) for row in ask.files), known.describe, known.begins)
    _save_digests(known)
    wanting: dict[str, FileDifference] = {}
    for path, verdict in verdicts:
        if verdict not in (FileMatch.SAME, FileMatch.GROWN):
            wanting[path] = "missing" if verdict is FileMatch.MISSING else "different"
    return wanting


def _save_digests(known: HostFiles) -> None:
    """Save the cache of digests. On a full disk they are computed again next time: a plan must work there too."""
    try:
        if known.hashed:
            known.save()
    except OSError as error:
        _log.warning("the cache of file digests cannot be written: %s", error)


def _store(config: Config) -> Service:
    try:
        return Service(config.store, id=compatibility.store_identity(registry.open_store(config.store)))
    except CmdopError as error:
        return Service(config.store, error.message)


def _lease(config: Config, session: str) -> tuple[Service, LeaseFacts | None]:
    try:
        store = leases.open_store(config)
        service, seen = Service(config.lease, id=identity(store)), store.inspect(session)
    except CmdopError as error:
        return Service(config.lease, error.message), None
    if seen is None:
        return service, None
    lease = seen.record
    return service, LeaseFacts(lease.state, lease.host, lease.instance, lease.token)


def _keys(config: Config) -> list[str]:
    """Return the fingerprints of this host's keys, the current one first. No key is created."""
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
    names = {}
    for uid in uids:
        try:
            names[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            continue  # no user of this host has this uid
    return names


def _listening(ports: set[int]) -> tuple[Port, ...]:
    """Return those of `ports` that are in use in the host's network: listening TCP, bound UDP."""
    return _sorted_ports(port for port in map(_as_port, inspect.host_sockets()) if port and port.port in ports)


def _sorted_ports(ports: Iterable[Port]) -> tuple[Port, ...]:
    return tuple(sorted(set(ports), key=lambda port: (port.port, port.kind, port.address)))


def _as_port(sock: inspect.Socket) -> Port | None:
    """Return the port that a socket occupies; None for a connection, or a socket without a port."""
    if sock.kind not in ("tcp", "udp") or (sock.kind == "tcp" and sock.state != "LISTEN"):
        return None
    address, _, port = sock.local.rpartition(":")
    return None if sock.remote or port == "0" else Port(sock.kind, address, int(port))


def _addresses() -> frozenset[str]:
    import psutil  # here: only sessions on the host's own network need it

    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in families]
    return frozenset(entry.address.partition("%")[0] for entry in addresses)


def gather_session(this_host: Host, reference: str) -> SessionFacts:
    """Gather the facts of a live session. For one that is not live, raise the error that names its state."""
    record, channel = talk.open_channel(this_host, reference)
    try:
        with channel:
            status = channel.ask(op="status")
            return _session_facts(this_host, record, status)
    except HolderGone:
        raise talk.over(talk.after_loss(this_host, record)) from None


def _session_facts(this_host: Host, record: Record, status: dict[str, Any]) -> SessionFacts:
    group, directory = this_host.cgroup(record.session), this_host.directory(record.session)
    pids = cgroup.pids(group)
    if not pids:
        raise HolderGone  # the session has just ended
    uppers = [directory / f"layers/{number}/upper" for number in range(len(record.layers))]
    sizes = [walk.measure(upper) for upper in uppers]
    in_use = files_in_use.look(pids, files_in_use.Layers(record.layers, uppers))
    return SessionFacts(
        session=record.session,
        name=record.name,
        host=record.host,
        token=record.token,
        state=talk.state_of(record, status, cgroup.is_frozen(group) and not _is_seized(status)),
        private_net=record.link is not None,
        tree=dump_checks.read_tree(group, record),
        memory=memory(pids),
        files=sum(size.data_bytes for size in sizes),
        held=_held(this_host, in_use),
        outside=tuple(map(_shown, tcp_connections.external(group, record.link is not None))),
        ports=_ports(group) if record.link is None else (),
        layers=record.layers,
        shares=record.binds,
        hooks=tuple(sorted({path for _, path in record.spec.hooks} | _own_gate(record))),
        unseen=tuple(sorted(map(str, in_use.watched.lost))),
        nodes=tuple(dump_checks.device_nodes(record, sizes)),
        databases=_databases(group, record),
        measured=measured(this_host),
    )


def _is_seized(status: Mapping[str, Any]) -> bool:
    """Return whether the session is frozen by `turn seize --freeze`: it stays so on the other host, and can be
    moved."""
    return bool((status.get("turn") or {}).get("frozen"))


def _own_gate(record: Record) -> set[str]:
    gate = record.spec.gate
    return {gate} if gate is not None and gate.startswith("/") else set()


def memory(pids: list[int]) -> int:
    """Estimate the bytes that a dump would contain: anonymous and shared memory, resident or swapped out, each page
    once."""
    return sum(_anonymous(pid) for pid in pids)


def _anonymous(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0  # a zombie, or a process that has ended
    sizes = {match[1]: int(match[2]) for match in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    parts = ("Pss_Anon", "Pss_Shmem") if "Pss_Anon" in sizes else ("Pss",)
    return 1024 * sum(sizes.get(name, 0) for name in (*parts, "SwapPss"))


def _held(this_host: Host, in_use: files_in_use.Touched) -> tuple[HeldFile, ...]:
    known = HostFiles(this_host.config.state_dir / "cache" / "hostfiles.json", blake3, "blake3")
    held = []
    for path in sorted(in_use.mapped | in_use.opened):
        file = known.describe(path)
        if file is not None:
            held.append(HeldFile(path, file.size, file.mtime_ns, file.build_id, file.digest, path in in_use.mapped))
    _save_digests(known)
    return tuple(held)


def _shown(connection: tcp_connections.Connection) -> str:
    return f"{connection.command} to {connection.remote}:{connection.remote_port}"


def _ports(group: str) -> tuple[Port, ...]:
    return _sorted_ports(port for port in map(_as_port, inspect.sockets(group)) if port)


def _databases(group: str, record: Record) -> tuple[str, ...]:
    """Return the SQLite databases that a restore would disturb, except those in shared directories, which are the same
    files after the move."""
    shared = tuple(f"{path.rstrip('/')}/" for path in record.binds)
    return tuple(path for path in open_files.rollback_databases(group) if not path.startswith(shared))


def measured(this_host: Host) -> tuple[PastCheckpoint, ...]:
    """Return the measurements of this host's last checkpoints from its events, oldest first."""
    measurements = [_measured(event) for event in this_host.events.read() if event.get("event") == "checkpointed"]
    return tuple(measurement for measurement in measurements[-MEASURED_CHECKPOINTS:] if measurement is not None)


def _measured(event: dict[str, Any]) -> PastCheckpoint | None:
    try:
        memory, files, new = (int(event[name]) for name in ("memory", "files", "new"))
        return PastCheckpoint(
            str(event["session"]), memory, files, new, float(event["frozen_s"]), float(event["upload_s"])
        )
    except (KeyError, TypeError, ValueError):
        return None  # written by a version without these fields
