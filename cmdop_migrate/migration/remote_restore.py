"""Bring sessions back on another host: restore --to, fork --to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cmdop_migrate import units
from cmdop_migrate.errors import Fenced, SessionNotFound, Usage
from cmdop_migrate.host import references
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration import ownership
from cmdop_migrate.migration.target import Target
from cmdop_migrate.model import Record, session_name
from cmdop_migrate.snapshot import checkpoint
from cmdop_migrate.snapshot import fork as snapshot_fork
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions
from cmdop_migrate.snapshot.rebuild.restore_session import Wanted

TIMEOUT = 3600.0  # a restore there may wait for a lease, and fetch a lot


def restore(this_host: Host, reference: str | None, wanted: Wanted, target: Target) -> dict[str, Any]:
    """What `restore` answers there. A session that is parked here is on record as moved then."""
    record = _meant(this_host, reference)
    if record is not None and record.phase in ("live", "handing") and wanted.fork is None:
        raise Fenced(
            f"session {record.name!r} runs on {record.host} (token {record.token})",
            f"Move it: cmdop-migrate migrate {record.name} --to {target.name}",
        )
    named = record.session if record is not None else reference
    answer = target.call("restore", *([named] if named is not None else []), *_flags(wanted), timeout=TIMEOUT)
    if wanted.fork is None:
        ownership.note_moved(this_host, str(answer["session"]), str(answer["host"]), int(answer["token"]))
    return answer


def fork(this_host: Host, reference: str, name: str, target: Target, progress: Callable[[str], None]) -> dict[str, Any]:
    """A branch of a session that goes on here, running there."""
    session_name(name)
    wanted = CheckpointOptions(leave_running=True, reason="fork", to=target.name)
    saved = checkpoint.checkpoint(this_host, reference, wanted, progress)
    progress(f"restoring on {target.name}")
    answer = target.call("restore", saved.manifest.checkpoint, "--fork", name, timeout=TIMEOUT)
    return snapshot_fork.branched(this_host, saved, answer)


def _meant(this_host: Host, reference: str | None) -> Record | None:
    """None: not known on this host. The other one will find it in the store, or not."""
    if reference is None:
        here = references.parked(this_host)
        if len(here) > 1:
            names = ", ".join(record.name for record in here)
            raise Usage(f"several sessions are parked: {names}", "Name one, or restore them all with --all.")
        return here[0] if here else None
    try:
        return this_host.find(reference)
    except SessionNotFound:
        return None


def _flags(wanted: Wanted) -> list[str]:
    return [
        *(["--fork", wanted.fork] if wanted.fork is not None else []),
        *(["--lazy"] if wanted.lazy else []),
        *(["--allow-devices"] if wanted.allow_devices else []),
        *(["--accept-files"] if wanted.accept_files else []),
        *(["--wait", units.exact_duration(wanted.wait)] if wanted.wait else []),
    ]
