"""Answer the requests of clients: a table of operations, each with the type of its request and its function.

A function gets the holder, the client and the parsed request, and returns the
answer's fields; `answer` adds the operation's name. None means that the answer
follows later. A request that the session's state does not allow changes nothing
and is answered with the error of `state.NotAllowed`.
"""

from __future__ import annotations

import os
import termios
import time

from cmdop_migrate.holder import cgroup, protocol, start, state
from cmdop_migrate.holder.clients import Client
from cmdop_migrate.holder.state import Event, after
from cmdop_migrate.util import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from cmdop_migrate.holder.process import Holder

Message = dict[str, object]


def answer(holder: Holder, client: Client, message: Message) -> Message | None:
    """Carry out one request and return its answer; None: it follows later. KeyError or ValueError: it is malformed."""
    name = message["op"]
    if not isinstance(name, str) or name not in OPERATIONS:
        raise ValueError(f"unknown request {name!r}")
    parse, run = OPERATIONS[name]
    request = parse(protocol.Fields(message))
    try:
        fields = run(holder, client, request)
    except state.NotAllowed as error:
        fields = {"error": str(error)}
    if fields is None or "event" in fields:
        return fields
    return {"re": name, **fields}


def _save(holder: Holder, **changes: object) -> str:
    """Change the record and write it. Return "", or why it cannot be written: then the record is as before."""
    before = {key: holder.record.get(key) for key in changes}
    holder.record.update(changes)
    try:
        holder.save()
    except OSError as error:
        holder.record.update(before)
        return f"its record cannot be written: {error}"
    return ""


def _is_idle(holder: Holder, seconds: float | None) -> bool:
    """Return whether no terminal is attached and nothing has happened for `seconds`. None: always True."""
    if seconds is None:
        return True
    holder.idle.look()
    return not holder.clients.attached() and _idle_for(holder) >= seconds


def _idle_for(holder: Holder) -> float:
    """Return the seconds since the session or a client of it last did something."""
    return min(holder.idle.seconds(), time.monotonic() - holder.clients.left)


# What users ask


def _attach(holder: Holder, client: Client, request: protocol.Attach) -> Message:
    ring = holder.ring
    client.actor, client.read_only = request.actor, request.read_only
    seq = ring.start if request.start is None else request.start
    if seq > ring.end or seq < 0:
        return {"error": "range", "start": ring.start, "end": ring.end}
    client.cursor = seq  # if the ring no longer has that byte, pump() tells the client how much it missed
    client.attached = request.is_terminal
    if request.size is not None and not client.read_only:
        holder.terminal.set_size(request.size.rows, request.size.cols)
    if client.attached:
        _note_attached(holder, client, seq)
    fields: Message = {"start": ring.start, "end": ring.end}
    if request.token is not None:
        fields["since"] = holder.admission.streams.since(request.token)
    if request.stream is not None:
        client.stream = request.stream
        fields["applied"] = holder.admission.streams.open(client.stream)
    return {**fields, "modes": ring.modes.on()}


def _note_attached(holder: Holder, client: Client, seq: int) -> None:
    """Note that a terminal was attached which is shown the output from byte `seq`: that the process is the same as
    before, how much output is replayed, and how much is no longer kept."""
    lost = max(0, holder.ring.start - seq)
    shown = {"from": seq, "replayed": holder.ring.end - seq - lost, "lost": lost}
    facts = {"actor": client.actor, "read_only": client.read_only, "pid": holder.pid, "token": holder.token}
    holder.admission.note("attached", **facts, **shown)


def _type(holder: Holder, client: Client, request: protocol.Typed) -> Message:
    return holder.admission.receive_numbered(client, request.at, request.data)


def _resize(holder: Holder, _: Client, request: protocol.Size) -> Message:
    holder.terminal.set_size(request.rows, request.cols)
    return {}


def _send(holder: Holder, client: Client, request: protocol.Send) -> Message | None:
    return holder.admission.send(client, request)


def _turn(holder: Holder, client: Client, request: protocol.TurnRequest) -> Message | None:
    return holder.admission.change_turn(client, request)


def _status(holder: Holder, _: Client, __: protocol.Empty) -> Message:
    holder.idle.look()
    admission, journal = holder.admission, holder.inputs.journal
    is_handed_over = holder.state.mode is state.Mode.HANDED_OVER
    return {
        "record": holder.record,
        "frozen": cgroup.is_frozen(holder.cgroup),
        "busy": "checkpointing" if holder.state.withholds_input else "restoring" if holder.pager else "",
        "handing": holder.state.checkpoint if is_handed_over else None,
        "first_output": holder.terminal.first_output,
        "fenced": holder.watchdog.fenced,
        "fresh_until": holder.watchdog.until,
        "clients": holder.clients.attached(),
        "start": holder.ring.start,
        "end": holder.ring.end,
        "idle": _idle_for(holder),
        "holder": os.getpid(),
        "turn": admission.describe(),
        "gate": admission.gate.address if admission.gate else None,
        "journal": {"next": journal.next, "head": journal.head},
        "input": admission.counts(),
    }


def _kill(holder: Holder, _: Client, request: protocol.Kill) -> Message:
    if not _is_idle(holder, request.only_idle):
        return {"error": "active"}
    owner = None if holder.state.owner is None else holder.clients.find(holder.state.owner)
    if owner is not None:
        holder.clients.drop(owner)  # the checkpoint command notices, and gives up
    holder.release_if_owner_gone()
    holder.end(request.signal, request.grace)
    holder.state = after(holder.state, Event.KILL)
    return {}


# What the agent says about the lease


def _fresh(holder: Holder, _: Client, request: protocol.Renewal) -> Message:
    """Extend the lease watchdog's deadline, for this fencing token and no other."""
    if request.token != holder.token:
        return {"error": "token"}
    holder.watchdog.renewed(request.until, request.since)
    if not holder.watchdog.fenced:
        holder.state = after(holder.state, Event.RENEWED)
    holder.idle.look()
    idle = 0.0 if holder.clients.attached() else _idle_for(holder)
    return {"fenced": holder.watchdog.fenced, "idle": round(idle, 1)}


def _superseded(holder: Holder, _: Client, request: protocol.Superseded) -> Message:
    """Kill this copy: another incarnation took over, and this one must not run one more instruction."""
    to, token = request.host, request.token
    if token <= holder.token:
        return {"error": "token"}
    reason = protocol.exit_reason("superseded", to=to, token=token)
    holder.state = after(holder.state, Event.SUPERSEDED, left=state.Left("superseded", to, token, reason))
    cgroup.kill(holder.cgroup)
    return {}


def _doubt(holder: Holder, _: Client, __: protocol.Empty) -> Message:
    holder.watchdog.doubt()
    return {}


def _parked(holder: Holder, _: Client, request: protocol.Checkpoint) -> Message:
    """Kill this copy: the lease store says that it is parked, although the command that parked it could not tell us."""
    holder.state = after(holder.state, Event.PARKED_IN_STORE, checkpoint=request.checkpoint)
    cgroup.kill(holder.cgroup)
    return {}


# What checkpoint, migrate and resume ask


def _freeze(holder: Holder, client: Client, request: protocol.Freeze) -> Message:
    """Freeze the session for as long as `client` stays connected, and write its output to disk."""
    frozen = after(holder.state, Event.FREEZE, by=client.number)
    if holder.pager is not None:
        return {"error": "busy"}
    holder.idle.look()
    if not _is_idle(holder, request.only_idle):
        return {"error": "active"}
    if not cgroup.freeze(holder.cgroup):
        holder.thaw_if_allowed()
        return {"error": "stuck"}
    holder.state = frozen
    holder.admission.stop()
    holder.terminal.read_all()
    try:
        atomic.replace(f"{holder.dir}/output.ring", holder.ring.save(), durable=False)
    except OSError as error:
        holder.state = after(holder.state, Event.THAW, by=client.number)
        holder.resume()
        return {"error": "disk", "why": str(error)}
    rows, cols = holder.terminal.size()
    return {
        "pid": holder.pid,
        "unwritten": "",  # input that waits is in `queued` with its authors; older hosts read this field
        "staged": holder.inputs.staged(),
        "streams": holder.admission.streams.save(),
        **holder.admission.save(),
        "rows": rows,
        "cols": cols,
        "end": holder.ring.end,
        "printed_at": holder.terminal.printed_at,
    }


def _thaw(holder: Holder, client: Client, _: protocol.Empty) -> Message:
    """Resume the session. Only the owner may: another client would let it run while its memory is being read."""
    before = holder.state
    holder.state = after(holder.state, Event.THAW, by=client.number)
    if holder.state != before:
        holder.resume()
    return {}


def _typeahead(holder: Holder, client: Client, _: protocol.Empty) -> Message:
    """Take the input that lies unread in the terminal, for the image; it is kept here in case the session resumes."""
    if holder.state.owner != client.number:
        return {"error": state.NOT_OWNER}
    if not cgroup.is_to_freeze(holder.cgroup):
        return {"error": "another process has thawed it"}
    from cmdop_migrate.holder import typeahead  # rarely needed: not loaded by every holder

    try:
        holder.terminal.unread += typeahead.take(holder.pid)
    except (OSError, termios.error) as error:  # the session may have unmounted its /dev, or mounted another there
        return {"error": f"its terminal cannot be read: {error}"}
    return {"unread": holder.terminal.unread.decode("latin-1")}


def _committing(holder: Holder, client: Client, _: protocol.Empty) -> Message:
    """Note that `client` is about to park the session: if its connection closes now, only the lease knows."""
    holder.state = after(holder.state, Event.COMMIT, by=client.number)
    return {"error": None}


def _saved(holder: Holder, _: Client, request: protocol.Checkpoint) -> Message:
    """Record that a copy is in the store while the session keeps running. On a full disk the next change saves it."""
    holder.record["checkpoint"] = request.checkpoint
    try:
        holder.save()
    except OSError as error:
        holder.complain(str(error))
    return {}


def _park(holder: Holder, client: Client, request: protocol.Checkpoint) -> Message:
    """Kill this copy: its checkpoint is safe in the store, and the lease says so."""
    holder.state = after(holder.state, Event.PARK, by=client.number, checkpoint=request.checkpoint)
    cgroup.kill(holder.cgroup)
    holder.admission.refuse_withheld()
    return {}


def _hand_over(holder: Holder, client: Client, request: protocol.Checkpoint) -> Message:
    """Keep the session frozen from now on, whether `client` stays or not: another host may run this checkpoint. Only a
    request that speaks for the lease ends that: `take_back`, `moved`, `superseded` or `parked`."""
    handed_over = after(holder.state, Event.HAND_OVER, by=client.number, checkpoint=request.checkpoint)
    if error := _save(holder, phase="handing", checkpoint=request.checkpoint):
        return {"error": error}
    holder.state = handed_over
    return {}


def _take_back(holder: Holder, _: Client, request: protocol.Renewal) -> Message:
    """Resume the session here: this host holds the lease again, under this fencing token."""
    taken_back = after(holder.state, Event.TAKE_BACK)
    if request.token < holder.token:
        return {"error": "it was handed over under a higher token"}
    if error := _save(holder, phase="live", token=request.token):
        return {"error": error}
    holder.token = holder.inputs.token = request.token
    start.write_token(holder.pid, request.token)
    # Before the state changes: a fence that is lifted here must not thaw it yet; `resume` does, with all else in place.
    holder.watchdog.renewed(request.until, request.since)
    holder.state = taken_back
    holder.admission.streams.begin(request.token, holder.ring.end)
    holder.resume()
    return {}


def _moved(holder: Holder, _: Client, request: protocol.Moved) -> Message:
    """Kill this copy: the session runs elsewhere."""
    holder.state = after(holder.state, Event.MOVED, left=state.Left("moved", request.to, request.token, request.why))
    cgroup.kill(holder.cgroup)
    holder.admission.refuse_withheld()
    return {}


OPERATIONS: dict[str, tuple[Callable[[protocol.Fields], Any], Callable[[Holder, Client, Any], Message | None]]] = {
    "attach": (protocol.Attach, _attach),
    "type": (protocol.Typed, _type),
    "resize": (protocol.Size, _resize),
    "send": (protocol.Send, _send),
    "turn": (protocol.TurnRequest, _turn),
    "status": (protocol.Empty, _status),
    "kill": (protocol.Kill, _kill),
    "fresh": (protocol.Renewal, _fresh),
    "superseded": (protocol.Superseded, _superseded),
    "doubt": (protocol.Empty, _doubt),
    "parked": (protocol.Checkpoint, _parked),
    "freeze": (protocol.Freeze, _freeze),
    "thaw": (protocol.Empty, _thaw),
    "typeahead": (protocol.Empty, _typeahead),
    "committing": (protocol.Empty, _committing),
    "saved": (protocol.Checkpoint, _saved),
    "park": (protocol.Checkpoint, _park),
    "hand_over": (protocol.Checkpoint, _hand_over),
    "take_back": (protocol.Renewal, _take_back),
    "moved": (protocol.Moved, _moved),
}
