"""A checkpoint's point of no return: the session's lease names it.

The lease store itself refuses a host that was superseded: its manifest then counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cmdop_migrate.errors import Blocked, LeaseUnreachable
from cmdop_migrate.host import leases
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.lease.rules import Lost, Why
from cmdop_migrate.lease.store import Held, LeaseStore
from cmdop_migrate.model import Record
from cmdop_migrate.session.holder_client import Channel
from cmdop_migrate.util.timings import Phases

SETTLE_SECONDS = 10.0


class Commit:
    """`hand_over` is called with what is whole in the store now, and that another host may have the session from; it
    then stays here, frozen."""

    def __init__(
        self,
        this_host: Host,
        record: Record,
        channel: Channel,
        phases: Phases,
        leave_running: bool,
        hand_over: Callable[[Manifest], None] | None,
    ) -> None:
        self._this_host, self._record, self._channel, self._phases = this_host, record, channel, phases
        self._leave_running, self._hand_over = leave_running, hand_over
        self.in_doubt = False  # it may be parked: nobody may thaw it on our word
        self.handed = False  # whoever settles the move thaws it, if it stays, and tells so

    def run(self, manifest: Manifest) -> None:
        """Fenced, LeaseUnreachable: not committed, or (`in_doubt`) not known."""
        if self._hand_over is not None:
            self._hand_over(manifest)
        store = leases.open_store(self._this_host.config)
        lease = leases.prove(store, self._this_host, self._record)
        if self._leave_running:
            self._check(store.commit_checkpoint(lease, manifest.checkpoint))
            return
        self._announce(manifest)
        self.in_doubt = True
        self._phases.reach("committing")
        try:
            self._check(store.park(lease, manifest.checkpoint))
        except LeaseUnreachable:
            self._is_parked(store, lease, manifest)

    def _check(self, answer: object) -> None:
        if isinstance(answer, Lost):
            raise leases.fenced(self._record.name, answer)

    def _announce(self, manifest: Manifest) -> None:
        """Should we be gone after this, the holder lets it run only when someone has asked the lease store."""
        if self._hand_over is None:
            self._channel.ask(op="committing")
            return
        self.handed = True
        answer = self._channel.ask(op="hand_over", checkpoint=manifest.checkpoint)
        if answer.get("error"):
            self.handed = False
            words = f"session {self._record.name!r} cannot be handed over: {answer['error']}"
            raise Blocked(words, "It goes on here.")

    def _is_parked(self, store: LeaseStore, lease: Held, manifest: Manifest) -> None:
        """The answer got lost. A renewal tells: held, then it was not parked and will not be; or it was."""
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                answer = store.renew(lease)
                break
            except LeaseUnreachable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)
        if isinstance(answer, Held):
            self.in_doubt = self._hand_over is not None  # handed over, only the lease's holder may thaw it
            raise LeaseUnreachable("the lease store did not take the checkpoint", "The session goes on; try again.")
        holder = answer.holder
        if answer.why is not Why.PARKED or holder is None or holder.checkpoint != manifest.checkpoint:
            raise leases.fenced(self._record.name, answer)
