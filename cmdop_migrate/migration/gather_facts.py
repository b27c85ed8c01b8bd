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

from blake3 import blake3

from cmdop_migrate import __version__, log
from cmdop_migrate.config import Config
from cmdop_migrate.criu.install import find
from cmdop_migrate.errors import BadConfig, Blocked, CmdopError
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import doctor, draining, leases, resources, talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.files import walk
from cmdop_migrate.images.files.host_files import HostFile, HostFiles, Verdict, compare
from cmdop_migrate.images.format import keys
from cmdop_migrate.lease.store_id import identity
from cmdop_migrate.migration import compatibility
from cmdop_migrate.model import PROTOCOL, Record
from cmdop_migrate.preflight.facts import cpu
from cmdop_migrate.preflight.facts import machine as facts_machine
from cmdop_migrate.preflight.facts.host import Ask, HostFacts, Need, Port, Service, Standing, Wanting
from cmdop_migrate.preflight.facts.session import HeldFile, Measured, SessionFacts
from cmdop_migrate.preflight.rules import doctor as rules_doctor
from cmdop_migrate.session import files_in_use, inspect, open_files, tcp_connections
from cmdop_migrate.session.holder_client import HolderGone
from cmdop_migrate.snapshot.capture import dump_checks
from cmdop_migrate.storage import registry
from cmdop_migrate.util import trusted_file

RELAY_TIMEOUT = 3.0
MEASURED_CHECKPOINTS = 20
_log = log.get("plan")


def gather_host(this_host: Host, ask: Ask) -> HostFacts:
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
    _save_digests(known)
    wanting: dict[str, Wanting] = {}
    for path, verdict in verdicts:
        if verdict not in (Verdict.SAME, Verdict.GROWN):
            wanting[path] = "missing" if verdict is Verdict.MISSING else "different"
    return wanting


def _save_digests(known: HostFiles) -> None:
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
    found = {port for one in inspect.host_sockets() if (port := _as_port(one)) is not None and port.port in ports}
    return tuple(sorted(found, key=lambda one: (one.port, one.kind, one.address)))


def _as_port(one: inspect.Socket) -> Port | None:
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


def gather_session(this_host: Host, reference: str) -> SessionFacts:
    """Of a live session; of one that is not, the error that says what it is."""
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
        raise HolderGone  # it has just ended
    uppers = [directory / f"layers/{number}/upper" for number in range(len(record.layers))]
    sizes = [walk.measure(upper) for upper in uppers]
    found = files_in_use.look(pids, files_in_use.Layers(record.layers, uppers))
    return SessionFacts(
        session=record.session,
        name=record.name,
        host=record.host,
        token=record.token,
        state=talk.state_of(record, status, cgroup.is_frozen(group) and not _is_seized(status)),
        private_net=record.link is not None,
        tree=dump_checks.tree(group, record),
        memory=memory(pids),
        files=sum(one.data_bytes for one in sizes),
        held=_held(this_host, found),
        outside=tuple(_shown(one) for one in tcp_connections.external(group, record.link is not None)),
        ports=_ports(group) if record.link is None else (),
        layers=record.layers,
        shares=record.binds,
        hooks=tuple(sorted({path for _, path in record.spec.hooks} | _own_gate(record))),
        unseen=tuple(sorted(map(str, found.watched.lost))),
        nodes=tuple(dump_checks.device_nodes(record, sizes)),
        databases=_databases(group, record),
        measured=measured(this_host),
    )


def _is_seized(status: Mapping[str, Any]) -> bool:
    """It stands still because somebody wants it so, and will on the other host: that is no obstacle."""
    return bool((status.get("turn") or {}).get("frozen"))


def _own_gate(record: Record) -> set[str]:
    gate = record.spec.gate
    return {gate} if gate is not None and gate.startswith("/") else set()


def memory(pids: list[int]) -> int:
    """Bytes a dump would carry, about: anonymous and shared memory, resident or swapped out, each page once."""
    return sum(_anonymous(pid) for pid in pids)


def _anonymous(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0  # a zombie, or gone
    sizes = {match[1]: int(match[2]) for match in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    parts = ("Pss_Anon", "Pss_Shmem") if "Pss_Anon" in sizes else ("Pss",)
    return 1024 * sum(sizes.get(name, 0) for name in (*parts, "SwapPss"))


def _held(this_host: Host, found: files_in_use.Touched) -> tuple[HeldFile, ...]:
    known = HostFiles(this_host.config.state_dir / "cache" / "hostfiles.json", blake3, "blake3")
    held = []
    for path in sorted(found.mapped | found.opened):
        one = known.describe(path)
        if one is not None:
            held.append(HeldFile(path, one.size, one.mtime_ns, one.build_id, one.digest, path in found.mapped))
    _save_digests(known)
    return tuple(held)


def _shown(one: tcp_connections.Connection) -> str:
    return f"{one.command} to {one.remote}:{one.remote_port}"


def _ports(group: str) -> tuple[Port, ...]:
    found = {port for one in inspect.sockets(group) if (port := _as_port(one)) is not None}
    return tuple(sorted(found, key=lambda one: (one.port, one.kind, one.address)))


def _databases(group: str, record: Record) -> tuple[str, ...]:
    """In a shared directory they are the same files after the move."""
    shared = tuple(f"{path.rstrip('/')}/" for path in record.binds)
    return tuple(path for path in open_files.rollback_databases(group) if not path.startswith(shared))


def measured(this_host: Host) -> tuple[Measured, ...]:
    """This host's last checkpoints, oldest first, as its events tell them."""
    found = [_measured(event) for event in this_host.events.read() if event.get("event") == "checkpointed"]
    return tuple(one for one in found[-MEASURED_CHECKPOINTS:] if one is not None)


def _measured(event: dict[str, Any]) -> Measured | None:
    try:
        memory, files, new = (int(event[name]) for name in ("memory", "files", "new"))
        return Measured(str(event["session"]), memory, files, new, float(event["frozen_s"]), float(event["upload_s"]))
    except (KeyError, TypeError, ValueError):
        return None  # of a version that did not write them
