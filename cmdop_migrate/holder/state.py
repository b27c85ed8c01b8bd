"""Define the state of one incarnation as its holder sees it, and every change of that state. Pure: no clock, no I/O.

A checkpoint command freezes the session over one connection, which owns the
frozen session until the connection closes. Two questions decide what the holder
may do, and both are answered by the state alone: may another copy of the session
run, or be restored, elsewhere; and is input still applied here.

    RUNNING       not owned by a checkpoint command
    FROZEN        owned by one, which reads its memory
    COMMITTING    the owner is about to park it: it may be parked in the lease store from now on
    UNCERTAIN     the owner's connection closed while it was COMMITTING; the lease decides
    KILL_PENDING  a user killed it while it was COMMITTING or UNCERTAIN: it must not be restored, parked or not
    HANDED_OVER   another host may run this checkpoint; only the lease says which copy may run
    PARKED        it is in the store, and this copy is being killed
    LEFT          it runs elsewhere under a higher fencing token, and this copy is being killed

The table has a row for each event and a column for each mode. `-`: no change.
`!`: refused, no change. Freeze, thaw, commit, hand over and park belong to a
connection; all but freeze are refused unless that connection is the owner (a
thaw is then ignored).

    event            RUNNING  FROZEN       COMMITTING    UNCERTAIN     KILL_PENDING  HANDED_OVER  PARKED  LEFT
    Freeze           FROZEN   !            !             FROZEN        !             !            !       !
    Thaw             -        RUNNING      RUNNING       -             -             -            -       -
    Commit           !        COMMITTING   COMMITTING    !             !             !            !       !
    HandOver         !        HANDED_OVER  HANDED_OVER   !             !             !            !       !
    Park             !        PARKED       PARKED        !             !             !            !       !
    OwnerGone        -        RUNNING      UNCERTAIN     -             -             -            -       -
    Renewed          -        -            -             RUNNING       -             -            -       -
    Kill             -        RUNNING      KILL_PENDING  KILL_PENDING  -             -            -       -
    TakeBack         !        !            !             !             !             RUNNING      !       !
    Moved            !        !            !             !             !             LEFT         !       !
    Superseded       LEFT     LEFT         LEFT          LEFT          LEFT          LEFT         -       -
    ParkedInStore    PARKED   PARKED       PARKED        PARKED        -             PARKED       -       -
    MemoryLost       PARKED   PARKED       PARKED        PARKED        -             PARKED       -       -

Whether the processes run is not in here alone: the lease watchdog and a seized
write turn freeze a session in any mode (`may_run` of the lease watchdog, `frozen` of the turn).
"""

from __future__ import annotations

from enum import Enum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from cmdop_migrate.model import ExitKind


class Mode(Enum):
    RUNNING = "running"
    FROZEN = "frozen"
    COMMITTING = "committing"
    UNCERTAIN = "uncertain"
    KILL_PENDING = "kill_pending"
    HANDED_OVER = "handed_over"
    PARKED = "parked"
    LEFT = "left"


class Value:
    """Compare by content. The fields are Final: mypy refuses to change them. Not a dataclass or named tuple: the holder
    would import 2 to 5 ms of the standard library more for that, at the start of every session."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"


class Left(Value):
    """Say why this copy must not run, and where the session runs: the fields of a `model.Exit`."""

    def __init__(self, kind: ExitKind, to: str | None, token: int | None, reason: str) -> None:
        self.kind: Final[ExitKind] = kind
        self.to: Final = to
        self.token: Final = token
        self.reason: Final = reason


class State(Value):
    """Hold all that decides what this copy may do. `owner`: the connection that froze the session. `checkpoint`: which
    one was handed over, or is parked. `why`: what people are told about a parking that no command asked for.
    `was_handed_over`: of a LEFT session."""

    def __init__(
        self,
        mode: Mode = Mode.RUNNING,
        *,
        owner: int | None = None,
        checkpoint: str | None = None,
        why: str = "",
        left: Left | None = None,
        was_handed_over: bool = False,
    ) -> None:
        self.mode: Final = mode
        self.owner: Final = owner
        self.checkpoint: Final = checkpoint
        self.why: Final = why
        self.left: Final = left
        self.was_handed_over: Final = was_handed_over

    @property
    def withholds_input(self) -> bool:
        """Return whether input must not reach the terminal: its content is being captured, or input that reached it now
        would be lost although the client takes it for applied."""
        return self.owner is not None or self.mode is Mode.HANDED_OVER or self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether this copy must never run again, and is being killed."""
        return self.mode in (Mode.PARKED, Mode.LEFT)

    @property
    def may_be_elsewhere(self) -> bool:
        """Return whether another copy may run or be restored: then not one more instruction may run here."""
        return self.mode not in (Mode.RUNNING, Mode.FROZEN)


class Event(Enum):
    """Name what happens to the session. The comment says which facts `after` needs besides the event."""

    FREEZE = "Freeze"  # by
    THAW = "Thaw"  # by
    COMMIT = "Commit"  # by
    HAND_OVER = "HandOver"  # by, checkpoint
    PARK = "Park"  # by, checkpoint
    OWNER_GONE = "OwnerGone"  # the owner's connection closed without a thaw, a park or a hand-over
    RENEWED = "Renewed"  # the lease was renewed after any doubt about it: this host holds it, and nothing is parked
    KILL = "Kill"  # a user ended the session
    TAKE_BACK = "TakeBack"  # this host holds the lease again
    MOVED = "Moved"  # left
    SUPERSEDED = "Superseded"  # left
    PARKED_IN_STORE = "ParkedInStore"  # checkpoint; the lease store says that it is parked, although no park arrived
    # checkpoint, why; a lazy restore was cut off: the processes have holes in their memory, the checkpoint has none
    MEMORY_LOST = "MemoryLost"


class NotAllowed(Exception):
    """Report an event that this state refuses; the state stays as it is. The argument is for the client."""


NOT_OWNER = "not frozen by you"
_M, _E = Mode, Event
_OWNED = {_M.FROZEN, _M.COMMITTING}
_ALIVE = set(Mode) - {_M.PARKED, _M.LEFT}
_TARGETS: dict[Event, dict[Mode, Mode]] = {
    _E.FREEZE: dict.fromkeys((_M.RUNNING, _M.UNCERTAIN), _M.FROZEN),
    _E.THAW: dict.fromkeys(_OWNED, _M.RUNNING),
    _E.COMMIT: dict.fromkeys(_OWNED, _M.COMMITTING),
    _E.HAND_OVER: dict.fromkeys(_OWNED, _M.HANDED_OVER),
    _E.PARK: dict.fromkeys(_OWNED, _M.PARKED),
    _E.OWNER_GONE: {_M.FROZEN: _M.RUNNING, _M.COMMITTING: _M.UNCERTAIN},
    _E.RENEWED: {_M.UNCERTAIN: _M.RUNNING},
    _E.KILL: {_M.FROZEN: _M.RUNNING, _M.COMMITTING: _M.KILL_PENDING, _M.UNCERTAIN: _M.KILL_PENDING},
    _E.TAKE_BACK: {_M.HANDED_OVER: _M.RUNNING},
    _E.MOVED: {_M.HANDED_OVER: _M.LEFT},
    _E.SUPERSEDED: dict.fromkeys(_ALIVE, _M.LEFT),
    _E.PARKED_IN_STORE: dict.fromkeys(_ALIVE - {_M.KILL_PENDING}, _M.PARKED),
    _E.MEMORY_LOST: dict.fromkeys(_ALIVE - {_M.KILL_PENDING}, _M.PARKED),
}
_OWNERS_EVENTS = (_E.THAW, _E.COMMIT, _E.HAND_OVER, _E.PARK)
# Events that are refused in a mode without a target; all others are ignored there.
_REFUSALS = {
    _E.FREEZE: "busy",
    _E.COMMIT: NOT_OWNER,
    _E.HAND_OVER: NOT_OWNER,
    _E.PARK: NOT_OWNER,
    _E.TAKE_BACK: "it is not being handed over",
    _E.MOVED: "it is not being handed over",
}


def after(
    state: State,
    event: Event,
    *,
    by: int | None = None,
    checkpoint: str | None = None,
    left: Left | None = None,
    why: str = "",
) -> State:
    """Return the state after `event`, as the table in the module says. Raise NotAllowed where it has `!`."""
    target = _TARGETS[event].get(state.mode)
    if event in _OWNERS_EVENTS and (by is None or by != state.owner):
        target = None
    if target is None:
        if event in _REFUSALS:
            raise NotAllowed(_REFUSALS[event])
        return state
    return State(
        target,
        owner=by if target in _OWNED else None,
        checkpoint=checkpoint if target in (Mode.HANDED_OVER, Mode.PARKED) else None,
        why=why,
        left=left if target is Mode.LEFT else None,
        was_handed_over=target is Mode.LEFT and state.mode is Mode.HANDED_OVER,
    )


class Ending(Value):
    """Say what the record tells about an incarnation whose processes have all ended. `checkpoint`: the session is
    parked as that one; None: it ended, as the other fields tell (`model.Exit`)."""

    def __init__(
        self,
        kind: ExitKind | None,
        code: int | None,
        reason: str = "",
        checkpoint: str | None = None,
        left: Left | None = None,
    ) -> None:
        self.kind: Final[ExitKind | None] = kind
        self.code: Final = code
        self.reason: Final = reason
        self.checkpoint: Final = checkpoint
        self.to: Final = left.to if left is not None else None
        self.token: Final = left.token if left is not None else None


def ending(state: State, code: int, is_signal: bool) -> Ending:
    """Return how the session ended, given its state and its first process's end: `code` is an exit status, or 128 + the
    number of the signal. An empty `reason` is for the caller to fill in, from the kind."""
    if state.checkpoint is not None:  # PARKED; or HANDED_OVER, and that checkpoint is all that is left of it here
        return Ending(None, None, state.why or "parked in the store", state.checkpoint)
    if state.left is not None:
        left = state.left
        return Ending(left.kind, None if state.was_handed_over else code, left.reason, None, left)
    if state.mode in (Mode.COMMITTING, Mode.UNCERTAIN):
        return Ending("parking_unknown", None)
    if state.mode is Mode.KILL_PENDING:
        return Ending("kill_pending", code)
    return Ending("killed" if is_signal else "exited", code)
