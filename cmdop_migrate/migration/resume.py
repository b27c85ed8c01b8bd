"""Finish or undo interrupted moves, and report where each session is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cmdop_migrate.errors import Blocked, CmdopError
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import LOCK_TIMEOUT, End, Move, Moves
from cmdop_migrate.migration import ownership
from cmdop_migrate.migration.ownership import settle
from cmdop_migrate.remote.peer import Peer

RESTORE_TIMEOUT = 600.0
Show = Callable[[str], None]


@dataclass(frozen=True)
class ResumeResult:
    """List the moves that have ended, and those whose end is not known yet, each with the reason."""

    done: tuple[Move, ...]
    failed: tuple[tuple[Move, CmdopError], ...]


def resume(
    this_host: Host, reference: str | None, target_of: Callable[[str], Peer], progress: Show = lambda _: None
) -> ResumeResult:
    """End the move `reference`, or every move whose end was not reported to a user yet."""
    moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)
    moves.replace_missing(this_host)
    open_moves = [moves.find(reference)] if reference is not None else [move for move in moves.all() if not move.told]
    done: list[Move] = []
    failed: list[tuple[Move, CmdopError]] = []
    for move in open_moves:
        with moves.lock(move.session, LOCK_TIMEOUT) as is_ours:
            if not is_ours:
                words = f"session {move.name!r} is being moved to {move.target} right now"
                failed.append((move, Blocked(words, "Wait for that.")))
                continue
            try:
                done.append(_resume(this_host, moves, move.id, target_of, progress))
            except CmdopError as error:
                failed.append((move, error))
    moves.forget_old()
    return ResumeResult(tuple(done), tuple(failed))


def _resume(this_host: Host, moves: Moves, ident: str, target_of: Callable[[str], Peer], progress: Show) -> Move:
    move = moves.find(ident)  # again: with the lock held
    if move.end is None:
        progress(f"reading the lease of {move.name}")
        end = settle(this_host, move).end
        if end is End.PARKED and move.checkpoint is not None:
            end = _roll_forward(this_host, move, target_of, progress)
        move = moves.end(move, end, told=True)
    return move if move.told else moves.save(replace(move, told=True))


def _roll_forward(this_host: Host, move: Move, target_of: Callable[[str], Peer], progress: Show) -> End:
    """Restore on the target a session that is parked, with no copy left here. It stays parked if that fails."""
    assert move.checkpoint is not None
    progress(f"restoring {move.name} on {move.target}")
    try:
        answer = target_of(move.target).call("restore", move.checkpoint, timeout=RESTORE_TIMEOUT)
        ownership.note_moved(this_host, move.session, move.target, int(answer["token"]))
        return End.ON_TARGET
    except CmdopError:
        return settle(this_host, move).end
