"""Keep leases in etcd: `etcd://host:port,host:port/prefix`. The distributed register: survives the loss of a minority.

Two keys per session: `PREFIX/lease/SESSION` holds the record, `PREFIX/live/SESSION` is attached to a lease of etcd's
own and vanishes when that expires. Both are written in one transaction and read in one, so "held, but not live" says
that the time of exactly this record is over, and a contender need not wait for it to stay unchanged.

Why that is as safe as waiting: the record of a renewal begun at S is written with an etcd lease that was *granted* for
it (never kept alive: a deposed leader that does not know it yet can acknowledge a keep-alive; a grant goes through the
log). The grant took effect at K, and etcd drops the key no earlier than its TTL after K by its leader's clock; a new
leader starts the whole TTL anew. With `server_ttl` below that is no earlier than S + ttl on a reference clock: the very
line of margins.py.
"""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import LeaseUnreachable
from cmdop_migrate.lease.etcdhttp import EtcdClient, EtcdLimits, EtcdPlace, EtcdRefused
from cmdop_migrate.lease.margins import RHO
from cmdop_migrate.lease.record import can_name_lease, check_session
from cmdop_migrate.lease.register import Cell, Register, Swap

REUSE = 1.0
"""Seconds after its request during which one grant serves further writes, on this host's clock."""
_NOT_FOUND = 404


def server_ttl(live_for: float) -> int:
    """Return the TTL to request from etcd, in whole seconds. A write may use a grant that is REUSE older than its call,
    by a clock up to RHO slow; etcd's own clock may run up to RHO fast."""
    return math.ceil((live_for + REUSE / (1 - RHO)) * (1 + RHO))


class EtcdRegister(Register):
    """Hold one record per session in etcd, with etcd telling when it has lapsed."""

    batch = 50  # two operations each; etcd allows 128 in a transaction

    def __init__(
        self, place: EtcdPlace, limits: EtcdLimits | None = None, clock: Callable[[], float] = boottime
    ) -> None:
        self.url = place.url
        self._client = EtcdClient(place, limits or EtcdLimits())
        self._clock = clock
        self._lease_keys = f"{place.prefix}/lease/"
        self._live_keys = f"{place.prefix}/live/"
        self._lock = threading.Lock()
        self._grants: dict[int, tuple[str, float]] = {}  # server TTL: (id of the etcd lease, time of the request)

    def read(self, session: str) -> Cell | None:
        check_session(session)
        keys = (self._lease_keys + session, self._live_keys + session)
        answer = self._call("/v3/kv/txn", {"success": [{"request_range": {"key": _b64(key)}} for key in keys]})
        record, live = (part.get("response_range", {}).get("kvs", []) for part in answer["responses"])
        if not record:
            return None
        return Cell(base64.b64decode(record[0].get("value", "")), str(record[0]["mod_revision"]), lapsed=not live)

    def write(self, swap: Swap) -> str | None:
        return self._swap_all([swap])

    def write_many(self, swaps: Sequence[Swap]) -> list[str | LeaseUnreachable | None]:
        """Write each `batch` of swaps in one transaction. If one condition fails nothing is written, and each swap of
        the batch is tried by itself."""
        answers: list[str | LeaseUnreachable | None] = []
        for at in range(0, len(swaps), self.batch):
            some = swaps[at : at + self.batch]
            try:
                version = self._swap_all(some)
                answers += [version] * len(some) if version is not None else super().write_many(some)
            except LeaseUnreachable as error:
                answers += [error] * len(some)
        return answers

    def sessions(self) -> Iterator[str]:
        start = self._lease_keys
        end = start[:-1] + chr(ord(start[-1]) + 1)
        answer = self._call("/v3/kv/range", {"key": _b64(start), "range_end": _b64(end), "keys_only": True})
        keys = [base64.b64decode(row["key"]).decode(errors="replace") for row in answer.get("kvs", [])]
        return (name for key in sorted(keys) if can_name_lease(name := key.removeprefix(start)))

    def close(self) -> None:
        self._client.close()

    def _swap_all(self, swaps: Sequence[Swap]) -> str | None:
        for swap in swaps:
            check_session(swap.session)
        if any(swap.expected is not None and not swap.expected.isdecimal() for swap in swaps):
            return None
        try:
            return self._transaction(swaps)
        except EtcdRefused as error:
            if error.status != _NOT_FOUND:
                raise self._refused(error) from error
        # The etcd lease expired meanwhile (this process was stopped, or etcd was restored). Nothing was written.
        with self._lock:
            self._grants.clear()
        try:
            return self._transaction(swaps)
        except EtcdRefused as error:
            raise self._refused(error) from error

    def _transaction(self, swaps: Sequence[Swap]) -> str | None:
        compare: list[dict[str, Any]] = []
        success: list[dict[str, Any]] = []
        for swap in swaps:
            key, live = _b64(self._lease_keys + swap.session), _b64(self._live_keys + swap.session)
            compare.append({"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": swap.expected or "0"})
            success.append({"request_put": {"key": key, "value": base64.b64encode(swap.data).decode()}})
            if swap.live_for is None:
                success.append({"request_delete_range": {"key": live}})
            else:
                success.append({"request_put": {"key": live, "lease": self._grant(swap.live_for)}})
        answer = self._client.call("/v3/kv/txn", {"compare": compare, "success": success})
        return str(answer["header"]["revision"]) if answer.get("succeeded") else None

    def _grant(self, live_for: float) -> str:
        """Return an etcd lease that was granted after the caller's call began, or at most REUSE before."""
        ttl = server_ttl(live_for)
        with self._lock:
            known = self._grants.get(ttl)
            asked = self._clock()
            if known is not None and 0 <= asked - known[1] < REUSE:
                return known[0]
        answer = self._client.call("/v3/lease/grant", {"TTL": str(ttl)})
        with self._lock:
            self._grants[ttl] = str(answer["ID"]), asked
        return str(answer["ID"])

    def _call(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._client.call(path, request)
        except EtcdRefused as error:
            raise self._refused(error) from error

    def _refused(self, error: EtcdRefused) -> LeaseUnreachable:
        return LeaseUnreachable(
            f"{self.url} refused the request: {error} ({error.status})",
            "Check that the URL names etcd's client port, its version (3.4 or newer), and its access rules.",
        )


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
