"""Find out by trying, at start-up, whether an S3 server lets only one of several conditional writes win.

Some servers ignore the conditions, some honour them only for sequential requests. So several threads race, over several
rounds, for one object of the probe's own; each round must have exactly one winner, and its value must stay. A server
with a rare race may pass: the docs name servers known to be sound.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from botocore.exceptions import ClientError, ReadTimeoutError

from cmdop_migrate.errors import BadConfig
from cmdop_migrate.lease.register import Cell
from cmdop_migrate.lease.s3_cas import S3Cells
from cmdop_migrate.storage.s3errors import http_status

ROUNDS = 4
RACERS = 6


def probe(server: S3Cells, folder: str) -> bool:
    """Return whether this server expects ETags in quotes. Raise BadConfig if it does not honour conditions. Errors of
    botocore pass through if the server does not answer."""
    key = folder + os.urandom(16).hex()
    with ThreadPoolExecutor(RACERS, "lease-probe") as pool:
        try:
            won = _round(server, pool, key, None, quoted=True)
            if won is None:
                raise _refused(server, "no writer could create an object (If-None-Match)")
            first, quoted = won, True
            for number in range(1, ROUNDS):
                before, won = won, _round(server, pool, key, won.version, quoted)
                if won is None and number == 1:
                    quoted = False  # Ceph accepts only bare ETags
                    won = _round(server, pool, key, before.version, quoted)
                if won is None:
                    raise _refused(server, "no writer could replace an object by its ETag (If-Match)")
            for stale in (None, first.version):
                if server.swap(key, b"stale", stale, quoted) is not None:
                    raise _refused(server, "it accepted a write whose condition did not hold")
            return quoted
        finally:
            server.remove(key)


def _round(server: S3Cells, pool: ThreadPoolExecutor, key: str, expected: str | None, quoted: bool) -> Cell | None:
    """Return the value after a race in which one racer was told that it won, or None if all were refused. Raise
    BadConfig if the server broke the contract."""
    barrier = threading.Barrier(RACERS)
    bodies = [os.urandom(16).hex().encode() for _ in range(RACERS)]

    def race(body: bytes) -> bool | ClientError | ReadTimeoutError:
        barrier.wait(30)
        try:
            return server.swap(key, body, expected, quoted) is not None
        except (ClientError, ReadTimeoutError) as error:
            if isinstance(error, ClientError) and http_status(error) < 500:
                raise
            return error  # unknown: some servers answer a loser with 500

    answers = list(pool.map(race, bodies))
    winners = [body for body, won in zip(bodies, answers, strict=True) if won is True]
    unknown = {body: won for body, won in zip(bodies, answers, strict=True) if not isinstance(won, bool)}
    stored = server.fetch(key)
    if len(winners) > 1:
        raise _refused(server, f"{len(winners)} of {RACERS} writers were told that they were the only one")
    if winners and (stored is None or stored.data != winners[0]):
        raise _refused(server, "the value of the winning writer was lost")
    if stored is None or stored.version == expected:
        for error in unknown.values():
            raise error
        return None
    if not winners and stored.data not in unknown:
        raise _refused(server, "a write that was refused took effect")
    return stored


def _refused(server: S3Cells, why: str) -> BadConfig:
    return BadConfig(
        f"{server.url} does not honour conditional writes: {why}",
        "Two hosts could both hold a lease there. Use another server for `lease` "
        "(docs/internals/lease-protocol.md names sound ones), or etcd:// or sqlite://; checkpoints may stay.",
    )
