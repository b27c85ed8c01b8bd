"""A running session's facts for a move. Looked at from outside: nothing of it is stopped for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.files import walk
from cmdop_migrate.images.files.host_files import HostFiles
from cmdop_migrate.migration.gather_host_facts import as_port, save
from cmdop_migrate.model import Record
from cmdop_migrate.preflight.facts.host import Port
from cmdop_migrate.preflight.facts.session import HeldFile, Measured, SessionFacts
from cmdop_migrate.session import files_in_use, inspect, open_files, tcp_connections
from cmdop_migrate.session.holder_client import HolderGone
from cmdop_migrate.snapshot.capture import dump_checks
from cmdop_migrate.util.digest import blake3

_MEASURED = 20


def gather(this_host: Host, reference: str) -> SessionFacts:
    """Of a live session; of one that is not, the error that says what it is."""
    record, channel = talk.open_channel(this_host, reference)
    try:
        with channel:
            status = channel.ask(op="status")
            return _gather(this_host, record, status)
    except HolderGone:
        raise talk.over(talk.after_loss(this_host, record)) from None


def _gather(this_host: Host, record: Record, status: dict[str, Any]) -> SessionFacts:
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
    save(known)
    return tuple(held)


def _shown(one: tcp_connections.Connection) -> str:
    return f"{one.command} to {one.remote}:{one.remote_port}"


def _ports(group: str) -> tuple[Port, ...]:
    found = {port for one in inspect.sockets(group) if (port := as_port(one)) is not None}
    return tuple(sorted(found, key=lambda one: (one.port, one.kind, one.address)))


def _command(pid: int) -> str:
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})"
    except OSError:
        return f"pid {pid}"


def _databases(group: str, record: Record) -> tuple[str, ...]:
    """In a shared directory they are the same files after the move."""
    shared = tuple(f"{path.rstrip('/')}/" for path in record.binds)
    return tuple(path for path in open_files.rollback_databases(group) if not path.startswith(shared))


def measured(this_host: Host) -> tuple[Measured, ...]:
    """This host's last checkpoints, oldest first, as its events tell them."""
    found = [_measured(event) for event in this_host.events.read() if event.get("event") == "checkpointed"]
    return tuple(one for one in found[-_MEASURED:] if one is not None)


def _measured(event: dict[str, Any]) -> Measured | None:
    try:
        memory, files, new = (int(event[name]) for name in ("memory", "files", "new"))
        return Measured(str(event["session"]), memory, files, new, float(event["frozen_s"]), float(event["upload_s"]))
    except (KeyError, TypeError, ValueError):
        return None  # of a version that did not write them
