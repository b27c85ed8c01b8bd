"""Identify a lease store independently of its address, by a record that is written once.

Two hosts share a lease store if they read the same id in it. Addresses cannot tell: one service has several, and one
address (a file, a loopback port) is another service on another machine.
"""

from __future__ import annotations

import os

from cmdop_migrate.errors import LeaseUnreachable
from cmdop_migrate.lease.margins import TTL_MIN
from cmdop_migrate.lease.record import LeaseRecord
from cmdop_migrate.lease.register import Swap
from cmdop_migrate.lease.store import LeaseStore

NAME = "store.id"


def identity(leases: LeaseStore) -> str:
    """Return the id of this lease store; the first caller creates it."""
    for _ in range(2):
        seen = leases.inspect(NAME)
        if seen is not None:
            return seen.record.instance
        # A free lease that is never taken: listings skip it, and every version of cmdop-migrate can read it.
        mine = LeaseRecord(NAME, 1, "free", "none", os.urandom(12).hex(), TTL_MIN, 0, None, os.urandom(8).hex())
        if leases.register.write(Swap(NAME, mine.to_bytes(), None)) is not None:
            return mine.instance
    raise LeaseUnreachable("the lease store refuses to create its id but does not return one", "Try again.")
