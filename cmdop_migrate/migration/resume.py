"""Finish or undo the moves that were cut off, and say where each session is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cmdop_migrate.errors import Blocked, CmdopError
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import LOCK_TIMEOUT, End, Move, Moves
from cmdop_migrate.migration import ownership
from cmdop_migrate.migration.ownership import settle
from cmdop_migrate.remote.peer import Peer

TIMEOUT = 600.0
Show = Callable[[str], None]


def resume(
    this_host: Host, reference: str | None, target_of: Callable[[str], Peer], progress: Show = lambda _: None
) -> tuple[list[Move], list[tuple[Move, CmdopError]]]:
    """Every move that nobody was told the end of, ended; and those whose end cannot be known yet, with the reason."""
    moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)
    moves.replace_missing(this_host)
    wanted = [moves.find(reference)] if reference is not None else [one for one in moves.all() if not one.told]
    done: list[Move] = []
    failed: list[tuple[Move, CmdopError]] = []
    for one in wanted:
        with moves.lock(one.session, LOCK_TIMEOUT) as is_ours:
            if not is_ours:
                words = f"session {one.name!r} is being moved to {one.target} right now"
                failed.append((one, Blocked(words, "Wait for that.")))
                continue
            try:
                done.append(_resume(this_host, moves, one.id, target_of, progress))
            except CmdopError as error:
                failed.append((one, error))
    moves.forget_old()
    return done, failed


def _resume(this_host: Host, moves: Moves, ident: str, target_of: Callable[[str], Peer], progress: Show) -> Move:
    move = moves.find(ident)  # again: with the lock held
    if move.end is None:
        progress(f"asking the lease of {move.name}")
        end = settle(this_host, move).end
        if end is End.PARKED and move.checkpoint is not None:
            end = _roll_forward(this_host, move, target_of, progress)
        move = moves.end(move, end, told=True)
    return move if move.told else moves.save(replace(move, told=True))


def _roll_forward(this_host: Host, move: Move, target_of: Callable[[str], Peer], progress: Show) -> End:
    """No copy of it is left here, and the target has not taken it: once more. It stays parked when that fails."""
    assert move.checkpoint is not None
    progress(f"restoring {move.name} on {move.target}")
    try:
        answer = target_of(move.target).call("restore", move.checkpoint, timeout=TIMEOUT)
        ownership.note_moved(this_host, move.session, move.target, int(answer["token"]))
        return End.ON_TARGET
    except CmdopError:
        return settle(this_host, move).end
