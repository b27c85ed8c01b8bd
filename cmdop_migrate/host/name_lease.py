"""One host, one name: two installations under one name would be taken for one by everyone who reads it.

Nothing of the fence rests on this: a lease is held by an installation, not by a
name. It is for people, who find sessions by the host that has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cmdop_migrate import clock
from cmdop_migrate.errors import Fenced, Unreachable
from cmdop_migrate.host.host import Host
from cmdop_migrate.lease import margins
from cmdop_migrate.lease.rules import Lost, Observation
from cmdop_migrate.lease.store import Held, LeaseStore, Waiting

PATIENCE = 5.0


class HostName:
    """This host's name, as a lease of its own."""

    def __init__(self, leases: LeaseStore, this_host: Host) -> None:
        self._leases, self._host, self._ttl = leases, this_host.config.host, this_host.config.lease_ttl
        self._instance = this_host.host_id()  # the same after a reboot
        self._held: Held | None = None
        self._observation: Observation | None = None

    @property
    def is_ours(self) -> bool:
        return self._held is not None

    def take(self, stopped: Callable[[], bool]) -> None:
        """Fenced when another installation lives under it; waits for a dead one's lease to run out."""
        until = clock.boottime() + margins.contender_wait(self._ttl) + PATIENCE
        answer = self._ask()
        while isinstance(answer, Waiting) and clock.boottime() < until and not stopped():
            before = answer.observation
            time.sleep(min(answer.seconds + 0.01, 0.5))
            answer = self._ask()
            if isinstance(answer, Waiting) and answer.observation != before:
                break  # it renews: it lives
        if not isinstance(answer, Held):
            raise same_name(self._host)

    def keep(self) -> None:
        """Renews it; or, once lost, tries to get it back. What runs here runs on either way."""
        try:
            if self._held is None:
                self._ask()
                return
            answer = self._leases.renew(self._held)
            self._held = answer if isinstance(answer, Held) else None
        except Unreachable:
            return

    def let_go(self) -> None:
        """Nothing runs here any more: the name is anybody's."""
        held, self._held = self._held, None
        if held is None:
            return
        try:
            self._leases.release(held)
        except Unreachable:
            return

    def _ask(self) -> Held | Waiting | Lost:
        name = _lease_of(self._host)
        seen = self._leases.inspect(name, self._observation)
        own = seen is not None and seen.record.state == "held" and seen.record.instance == self._instance
        answer = self._leases.acquire(
            name,
            self._host,
            self._instance,
            self._ttl,
            observation=seen.observation if seen else None,
            resume_token=seen.record.token if seen is not None and own else None,
        )
        self._observation = answer.observation if isinstance(answer, Waiting) else None
        self._held = answer if isinstance(answer, Held) else None
        return answer


def is_taken(leases: LeaseStore, this_host: Host) -> bool:
    """Whether another installation has this host's name now, dead or alive."""
    seen = leases.inspect(_lease_of(this_host.config.host))
    return seen is not None and seen.record.state == "held" and seen.record.instance != this_host.host_id()


def check(leases: LeaseStore, this_host: Host) -> None:
    """Fenced when another installation has this host's name now."""
    if is_taken(leases, this_host):
        raise same_name(this_host.config.host)


def same_name(host: str) -> Fenced:
    return Fenced(
        f"another installation runs under the name {host!r}", "Give this host another name: the `host` setting."
    )


def _lease_of(host: str) -> str:
    return f"host.{host}"
