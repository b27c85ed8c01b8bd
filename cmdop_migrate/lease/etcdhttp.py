"""Call etcd's HTTP gateway (/v3), over several endpoints.

A request is tried at one endpoint after the other until one answers or the time is up. That may send it twice, so use
it only for requests where this is harmless (reads, grants, and transactions that compare what they replace).
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import BadConfig, LeaseUnreachable

PORT = 2379
_RETRY_PAUSE = 0.05
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_DOWN_HINT = "Check that a majority of the etcd members runs and is reachable from this host, then try again."


@dataclass(frozen=True)
class EtcdPlace:
    """Locate the keys. With `ca` or `cert` the endpoints use TLS."""

    url: str
    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class EtcdLimits:
    """Set the seconds for one endpoint to answer, and for all tries together."""

    attempt: float = 0.8
    total: float = 3.0


class EtcdRefused(Exception):
    """Report that etcd answered with an error that another endpoint would give too."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EtcdClient:
    """Send requests to etcd. Thread-safe; keeps idle connections."""

    def __init__(self, place: EtcdPlace, limits: EtcdLimits) -> None:
        self.url = place.url
        self._place = place
        self._limits = limits
        self._tls = _tls(place)
        self._lock = threading.Lock()
        self._first = 0  # the endpoint that answered last
        self._idle: dict[int, list[http.client.HTTPConnection]] = {}
        self._wait = threading.Event().wait

    def call(self, path: str, request: dict[str, Any], clock: Callable[[], float] = boottime) -> dict[str, Any]:
        """Return the answer. Raise EtcdRefused if etcd refuses; LeaseUnreachable if no endpoint answered, in which case
        the request may or may not have taken effect."""
        body = json.dumps(request).encode()
        until = clock() + self._limits.total
        trouble = "no endpoint tried"
        at = self._first
        while (left := until - clock()) > 0:
            try:
                answer = self._once(at, path, body, min(self._limits.attempt, left))
                self._first = at
                return answer
            except (OSError, http.client.HTTPException, ValueError) as error:
                host, port = self._place.endpoints[at]
                trouble = f"{host}:{port}: {error or type(error).__name__}"
            at = (at + 1) % len(self._place.endpoints)
            self._wait(min(_RETRY_PAUSE, max(0.0, until - clock())))
        raise LeaseUnreachable(f"no answer from {self.url} ({trouble})", _DOWN_HINT)

    def close(self) -> None:
        with self._lock:
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _once(self, at: int, path: str, body: bytes, timeout: float) -> dict[str, Any]:
        connection = self._connection(at, timeout)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(at, []).append(connection)
        return _decoded(answer.status, data)

    def _connection(self, at: int, timeout: float) -> http.client.HTTPConnection:
        with self._lock:
            idle = self._idle.get(at)
            connection = idle.pop() if idle else None
        if connection is None:
            host, port = self._place.endpoints[at]
            if self._tls is not None:
                return http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
            return http.client.HTTPConnection(host, port, timeout=timeout)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection


def _decoded(status: int, data: bytes) -> dict[str, Any]:
    """Return the answer as a dict. Raise ValueError if another endpoint may answer, EtcdRefused if not."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if status == 200 and isinstance(answer, dict):
        return answer
    reason = answer.get("error") or answer.get("message") if isinstance(answer, dict) else None
    message = str(reason or data[:200].decode(errors="replace"))
    if status in _TRANSIENT_STATUS or status == 200:
        raise ValueError(f"{status} {message}")
    raise EtcdRefused(status, message)


def _tls(place: EtcdPlace) -> ssl.SSLContext | None:
    if place.ca is None and place.cert is None:
        return None
    try:
        context = ssl.create_default_context(cafile=place.ca)
        if place.cert is not None:
            context.load_cert_chain(place.cert, place.key)
    except (OSError, ssl.SSLError) as error:
        raise BadConfig(
            f"cannot use the certificates of {place.url}: {error}", "Check the files that ca=, cert= and key= name."
        ) from error
    return context
