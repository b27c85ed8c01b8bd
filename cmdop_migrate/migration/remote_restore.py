"""Restore or fork sessions on another host: restore --to, fork --to."""

from __future__ import annotations

from collections.abc import Callable

from cmdop_migrate import units
from cmdop_migrate.errors import Fenced, SessionNotFound, Usage
from cmdop_migrate.host import references
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration import ownership
from cmdop_migrate.migration.target import RemoteHost
from cmdop_migrate.model import Record, session_name
from cmdop_migrate.snapshot import checkpoint
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions
from cmdop_migrate.snapshot.fork import ForkResult, record_fork
from cmdop_migrate.snapshot.restore_options import RestoreOptions, RestoreResult

RESTORE_TIMEOUT = 3600.0  # a restore there may wait for a lease, and fetch a lot


def restore(this_host: Host, reference: str | None, options: RestoreOptions, target: RemoteHost) -> RestoreResult:
    """Restore a session on `target`. A session that is parked here is recorded as moved then. Raises Fenced if the
    session runs here."""
    record = _local_record(this_host, reference)
    if record is not None and record.phase in ("live", "handing") and options.fork is None:
        raise Fenced(
            f"session {record.name!r} runs on {record.host} (token {record.token})",
            f"Move it: cmdop-migrate migrate {record.name} --to {target.name}",
        )
    named = record.session if record is not None else reference
    words = [*([named] if named is not None else []), *_flags(options)]
    result = RestoreResult.from_json(target.call("restore", *words, timeout=RESTORE_TIMEOUT))
    if options.fork is None:
        ownership.note_moved(this_host, result.session, result.host, result.token)
    return result


def fork(this_host: Host, reference: str, name: str, target: RemoteHost, progress: Callable[[str], None]) -> ForkResult:
    """Fork a session, which keeps running here, onto `target`."""
    session_name(name)
    options = CheckpointOptions(leave_running=True, reason="fork", to=target.name)
    saved = checkpoint.checkpoint(this_host, reference, options, progress)
    progress(f"restoring on {target.name}")
    answer = target.call("restore", saved.manifest.checkpoint, "--fork", name, timeout=RESTORE_TIMEOUT)
    return record_fork(this_host, ForkResult(saved, RestoreResult.from_json(answer)))


def _local_record(this_host: Host, reference: str | None) -> Record | None:
    """Return this host's record of the session, None if it has none: the other host then looks in the store. Raises
    Usage if no session is named and several are parked."""
    if reference is None:
        parked = references.parked(this_host)
        if len(parked) > 1:
            names = ", ".join(record.name for record in parked)
            raise Usage(f"several sessions are parked: {names}", "Name one, or restore them all with --all.")
        return parked[0] if parked else None
    try:
        return this_host.find(reference)
    except SessionNotFound:
        return None


def _flags(options: RestoreOptions) -> list[str]:
    return [
        *(["--fork", options.fork] if options.fork is not None else []),
        *(["--lazy"] if options.lazy else []),
        *(["--allow-devices"] if options.allow_devices else []),
        *(["--accept-files"] if options.accept_files else []),
        *(["--wait", units.exact_duration(options.wait)] if options.wait else []),
    ]
