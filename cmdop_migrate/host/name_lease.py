"""Give each host name to one installation: two installations under one name would be taken for one by every reader.

The fence does not depend on this: a lease is held by an installation, not by a name. It is for people, who find
sessions by the name of the host that has them.
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

EXTRA_WAIT = 5.0  # seconds beyond the time in which a dead holder's lease runs out


class HostName:
    """Hold this host's name, as a lease of its own."""

    def __init__(self, leases: LeaseStore, this_host: Host) -> None:
        self._leases, self._host, self._ttl = leases, this_host.config.host, this_host.config.lease_ttl
        self._instance = this_host.host_id()  # the same after a reboot
        self._held: Held | None = None
        self._observation: Observation | None = None

    @property
    def is_ours(self) -> bool:
        return self._held is not None

    def take(self, stopped: Callable[[], bool]) -> None:
        """Acquire the name. Wait for a dead installation's lease to run out. Raise Fenced if a live one has it."""
        until = clock.boottime() + margins.contender_wait(self._ttl) + EXTRA_WAIT
        answer = self._ask()
        while isinstance(answer, Waiting) and clock.boottime() < until and not stopped():
            before = answer.observation
            time.sleep(min(answer.seconds + 0.01, 0.5))
            answer = self._ask()
            if isinstance(answer, Waiting) and answer.observation != before:
                break  # the lease was renewed: its holder is alive
        if not isinstance(answer, Held):
            raise same_name(self._host)

    def keep(self) -> None:
        """Renew the lease of the name or, once it is lost, try to acquire it again. Sessions of this host keep running
        either way."""
        try:
            if self._held is None:
                self._ask()
                return
            answer = self._leases.renew(self._held)
            self._held = answer if isinstance(answer, Held) else None
        except Unreachable:
            return

    def let_go(self) -> None:
        """Release the name: no session runs here any more."""
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
    """Tell whether another installation has this host's name now, dead or alive."""
    seen = leases.inspect(_lease_of(this_host.config.host))
    return seen is not None and seen.record.state == "held" and seen.record.instance != this_host.host_id()


def check(leases: LeaseStore, this_host: Host) -> None:
    """Raise Fenced if another installation has this host's name now."""
    if is_taken(leases, this_host):
        raise same_name(this_host.config.host)


def same_name(host: str) -> Fenced:
    """Return the error for a host name that another installation has."""
    return Fenced(
        f"another installation runs under the name {host!r}", "Give this host another name: the `host` setting."
    )


def _lease_of(host: str) -> str:
    return f"host.{host}"
