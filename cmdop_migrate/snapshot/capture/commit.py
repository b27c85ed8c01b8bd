"""Commit a checkpoint to the session's lease: the point of no return.

The lease store refuses a host whose fencing token was superseded; the manifest it published is then ignored.
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

SETTLE_SECONDS = 10.0  # to find out whether a park whose answer was lost took effect


class LeaseCommit:
    """Commit one checkpoint of a session to its lease.

    `hand_over` is called with the published manifest before another host may take the session; the session then stays
    here, frozen."""

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
        self.in_doubt = False  # the lease may be parked: the session must not be thawed on our request
        self.handed_over = False  # the code that settles the move thaws the session if it stays, and runs the hooks

    def run(self, manifest: Manifest) -> None:
        """Commit the checkpoint. Raises Fenced or LeaseUnreachable when it was not committed, or, if `in_doubt` is set,
        when that is unknown."""
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
            self._find_out_parked(store, lease, manifest)

    def _check(self, answer: object) -> None:
        if isinstance(answer, Lost):
            raise leases.fenced(self._record.name, answer)

    def _announce(self, manifest: Manifest) -> None:
        """Tell the holder that the commit begins. If this process dies after that, the holder keeps the session frozen
        until the lease store has been asked."""
        if self._hand_over is None:
            self._channel.ask(op="committing")
            return
        self.handed_over = True
        answer = self._channel.ask(op="hand_over", checkpoint=manifest.checkpoint)
        if answer.get("error"):
            self.handed_over = False
            words = f"session {self._record.name!r} cannot be handed over: {answer['error']}"
            raise Blocked(words, "It keeps running here.")

    def _find_out_parked(self, store: LeaseStore, lease: Held, manifest: Manifest) -> None:
        """Find out by a renewal whether a park whose answer was lost took effect. Return if it did. A lease that is
        still held was not parked and will not be: raise LeaseUnreachable."""
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
            self.in_doubt = self._hand_over is not None  # after a hand-over only the owner of the lease may thaw it
            raise LeaseUnreachable(
                "the lease store did not take the checkpoint", "The session keeps running; try again."
            )
        holder = answer.holder
        if answer.why is not Why.PARKED or holder is None or holder.checkpoint != manifest.checkpoint:
            raise leases.fenced(self._record.name, answer)
