"""List sessions: those of this host (`ls`), one with all its details (`show`), those of all hosts that share the lease
store (`ls --all-hosts`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cmdop_migrate.errors import CheckpointNotFound, ImageRefused, TimedOut
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import talk
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record, State
from cmdop_migrate.session import inspect, open_files
from cmdop_migrate.session.holder_client import Channel, HolderGone
from cmdop_migrate.util import threads

if TYPE_CHECKING:  # loaded only for --all-hosts: a plain `ls` needs neither stores nor keys
    from cmdop_migrate.host.leases import LeaseStatus
    from cmdop_migrate.images.format.keys import KeyRing
    from cmdop_migrate.storage.base import Store

MOVING = "on its way to another host; to see where it is: cmdop-migrate resume"
HOST_LEASES = "host."  # prefix of leases of host names, which are not sessions
_STATES: dict[str, State] = {"held": "running", "parked": "parked", "free": "exited"}


@dataclass(frozen=True)
class SessionRow:
    """Describe one session as `ls` lists it. Of a session of another host only the first five fields are known."""

    session: str
    name: str
    host: str
    state: State
    token: int
    clients: int | None = None
    idle_s: float | None = None
    rss: int | None = None
    pid: int | None = None
    command: tuple[str, ...] = ()
    created: float | None = None
    note: str = ""
    turn: str | None = None


def row(this_host: Host, record: Record) -> SessionRow:
    """Return one row of `ls`. A holder that does not answer is noted in the row, not waited for."""
    status: dict[str, Any] = {}
    note = record.exit.reason if record.exit else MOVING if record.phase == "handing" else ""
    if record.phase == "live":
        try:
            with Channel(this_host.socket(record.session)) as channel:
                status = channel.ask(op="status", timeout=talk.STATUS_TIMEOUT)
        except HolderGone:
            note = "its holder does not listen"
        except TimedOut:
            note = "its holder does not answer"
    if status.get("busy") == "restoring":
        note = _stall(this_host, record) or "its memory is still being read from the store"
    turn = status.get("turn") or {}
    if turn.get("frozen") and not note:
        note = f"seized by {turn['holder']}"
    group = this_host.cgroup(record.session)
    return SessionRow(
        session=record.session,
        name=record.name,
        host=record.host,
        state=talk.state_of(record, status, cgroup.is_frozen(group)),
        token=record.token,
        clients=status.get("clients", 0),
        idle_s=round(status["idle"], 1) if "idle" in status else None,
        rss=inspect.rss(group),
        pid=record.pid,
        command=record.spec.command,
        created=record.created,
        note=note,
        turn=turn.get("holder"),
    )


def _stall(this_host: Host, record: Record) -> str:
    """Return why a lazily restored session waits for its memory; empty if it does not wait."""
    try:
        return (this_host.directory(record.session) / "image" / "stall").read_text()
    except OSError:
        return ""


def list_here(this_host: Host) -> list[SessionRow]:
    """Return the rows of all sessions that this host has on record."""
    return [row(this_host, record) for record in this_host.all() if record.phase != "starting"]


def show(this_host: Host, reference: str) -> dict[str, Any]:
    """Return all details of one session: its row, processes, sockets, open and changed files."""
    record = this_host.find(reference)
    group = this_host.cgroup(record.session)
    directory = this_host.directory(record.session)
    stores = [(point, directory / f"layers/{number}/upper") for number, point in enumerate(record.layers)]
    return {
        **asdict(row(this_host, record)),
        "user": record.spec.user,
        "cwd": record.spec.cwd,
        "net": record.spec.net,
        "address": record.link.address if record.link else None,
        "shares": list(record.spec.shares),
        "hooks": [{"event": event, "path": path} for event, path in record.spec.hooks],
        "gate": record.spec.gate or this_host.config.gate,
        "parent": record.parent,
        "tree": [asdict(process) for process in inspect.processes(group)],
        "sockets": [asdict(socket) for socket in inspect.sockets(group)],
        "open_files": [asdict(file) for file in open_files.opened(group)],
        "files": [asdict(file) for file in inspect.changed_files(stores)],
        "lease": {"holder": record.host, "token": record.token},
        "checkpoint": record.checkpoint,
        "exit": asdict(record.exit) if record.exit else None,
        "output": talk.output_bounds(this_host, record),
    }


def list_everywhere(this_host: Host) -> list[SessionRow]:
    """Return the rows of all sessions that share this host's lease store: its own as `ls` knows them, the others as
    their leases describe them: which host has them, in which state."""
    from cmdop_migrate.host import leases, resources
    from cmdop_migrate.images.store import catalog

    here = {row.session: row for row in list_here(this_host)}
    store, ring = resources.open_store(this_host.config), resources.open_keys(this_host.config)
    rows: list[SessionRow] = []
    others: list[tuple[str, LeaseStatus]] = []
    for session, lease in leases.survey(leases.open_store(this_host.config)).items():
        if session.startswith(HOST_LEASES):
            continue
        own = here.pop(session, None)
        if own is not None and (own.state not in ("parked", "exited") or own.token >= lease.token):
            rows.append(own)
        elif lease.state != "free":
            others.append((session, lease))
    names = threads.each(
        lambda other: _name(store, ring, other[0], other[1].checkpoint), others, catalog.READERS, "names"
    )
    for (session, lease), name in zip(others, names, strict=True):
        rows.append(SessionRow(session, name.result(), lease.host, _STATES[lease.state], lease.token))
    return [*here.values(), *sorted(rows, key=lambda row: row.session)]


def _name(store: Store, ring: KeyRing, session: str, checkpoint: str | None) -> str:
    """Return the session's name from its last checkpoint: its lease holds only ids."""
    from cmdop_migrate.images.store import catalog

    if checkpoint is None:
        return session[:12]
    try:
        return str(catalog.load(store, ring, checkpoint, session).facts.get("name", session[:12]))
    except (CheckpointNotFound, ImageRefused):
        return session[:12]
