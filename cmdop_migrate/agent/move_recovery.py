"""Moves whose command is gone: the agent decides about sessions that stand still here, by their leases."""

from __future__ import annotations

from collections.abc import Callable

from cmdop_migrate import log
from cmdop_migrate.errors import CmdopError
from cmdop_migrate.host.host import Host
from cmdop_migrate.host.move_journal import Move, Moves
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.migration.ownership import MoveOutcome, MoveSettlement

HOLDER_TIMEOUT = 1.0  # the agent has other sessions to renew
_log = log.get("agent")


class Handovers:
    """What each lease was seen to be is remembered from one look to the next."""

    def __init__(self, this_host: Host, leases: LeaseStore, back: Callable[[str, int], None]) -> None:
        """`back` must not wait: it hears of a session that goes on here, and the token it had before."""
        self._this_host, self._leases, self._back = this_host, leases, back
        self._moves = Moves(this_host.config.state_dir, this_host.config.keep_exited)
        self._watched: dict[str, MoveSettlement] = {}

    def step(self) -> bool:
        """One look at each. -> whether there is any."""
        self._moves.stand_in(self._this_host)
        open_moves = self._moves.open()
        phases = {one.session: one.phase for one in self._this_host.all()} if open_moves else {}
        # Also those that run: their move came to nothing, and whoever asks later must not take it for unfinished.
        moves = [one for one in open_moves if phases.get(one.session) in ("handing", "live")]
        self._watched = {one.id: self._watched[one.id] for one in moves if one.id in self._watched}
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
            found = settling.once()
        except CmdopError as error:
            _log.warning("session %s, on its way to %s: %s", move.name, move.target, error.message)
            return
        if isinstance(found, MoveOutcome):
            self._moves.end(move, found.end, told=False)
            self._this_host.note(
                "migration_settled", move.session, name=move.name, migration=move.id, end=found.end, token=found.token
            )
