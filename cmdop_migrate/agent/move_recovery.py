"""Recover migrations whose command is gone: decide about sessions that are frozen here, by their leases."""

from __future__ import annotations

from collections.abc import Callable

from cmdop_migrate import log
from cmdop_migrate.errors import CmdopError
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import Move, Moves
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.migration.ownership import MoveOutcome, MoveSettlement

HOLDER_TIMEOUT = 1.0  # seconds; short, because the agent has other sessions to renew
_log = log.get("agent")


class MoveRecovery:
    """Settle open migrations. What was seen of each lease is kept from one step to the next."""

    def __init__(self, this_host: Host, leases: LeaseStore, back: Callable[[str, int], None]) -> None:
        """Settle the migrations of `this_host`. `back` is called, and must not block, with a session that resumes here
        and the token that it had."""
        self._this_host, self._leases, self._back = this_host, leases, back
        self._moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)
        self._watched: dict[str, MoveSettlement] = {}

    def step(self) -> bool:
        """Try to settle each open migration once. Return whether a session is still frozen for one."""
        self._moves.replace_missing(self._this_host)
        open_moves = self._moves.open()
        phases = {record.session: record.phase for record in self._this_host.all()} if open_moves else {}
        # Also sessions that run: their migration failed, and must not be taken for unfinished later.
        moves = [move for move in open_moves if phases.get(move.session) in ("handing", "live")]
        self._watched = {move.id: self._watched[move.id] for move in moves if move.id in self._watched}
        for move in moves:
            with self._moves.lock(move.session) as is_ours:
                if is_ours:
                    self._settle(move)
        return "handing" in phases.values()

    def _settle(self, move: Move) -> None:
        move = self._moves.find(move.id)  # again: with the lock held
        if move.end is not None:
            return
        settling = self._watched.get(move.id) or MoveSettlement(
            self._this_host, self._leases, move, self._back, HOLDER_TIMEOUT
        )
        self._watched[move.id] = settling
        try:
            outcome = settling.once()
        except CmdopError as error:
            _log.warning("session %s, on its way to %s: %s", move.name, move.target, error.message)
            return
        if isinstance(outcome, MoveOutcome):
            self._moves.end(move, outcome.end, told=False)
            self._this_host.note(
                "migration_settled",
                move.session,
                name=move.name,
                migration=move.id,
                end=outcome.end,
                token=outcome.token,
            )
