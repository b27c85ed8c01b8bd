"""Keep leases in a bucket: `s3://bucket/prefix?endpoint=…`. Needs no other service, if the server honours conditional
writes.

One object per session, always one PUT, always with a condition and an MD5. The ETag is the version: the nonce in every
record makes no two alike. Whether the server honours its conditions is tried at start-up (lease/s3probe.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from botocore.exceptions import BotoCoreError, ClientError

from cmdop_migrate.errors import LeaseUnreachable
from cmdop_migrate.lease.record import can_name_lease, check_session
from cmdop_migrate.lease.register import Cell, Register, Swap
from cmdop_migrate.lease.s3_cas import S3Cells
from cmdop_migrate.lease.s3probe import probe
from cmdop_migrate.storage.s3client import S3Limits, S3Place, s3_client
from cmdop_migrate.storage.s3errors import translated

REQUEST_LIMITS = S3Limits(connect=2.0, read=3.0)
PROBE_LIMITS = S3Limits(connect=2.0, read=20.0)  # SeaweedFS delays some racers for one object, a second at a time


class S3Register(Register):
    """Hold one record per session in a bucket. `proven`: `check` already succeeded on this host for this address, run
    by an agent at its start for example; commands then need not spend the seconds it may take. `on_proof` is called
    when it succeeds here."""

    threads = 16

    def __init__(
        self,
        place: S3Place,
        limits: S3Limits = REQUEST_LIMITS,
        proven: bool = False,
        on_proof: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = place.url
        self._place = place
        self._client = s3_client(place, limits)
        self._cells = S3Cells(self._client, place)
        root = f"{place.prefix}/" if place.prefix else ""
        self._folder = f"{root}lease/"
        self._probe_folder = f"{root}probe/"
        self._lock = threading.Lock()
        self._proven, self._on_proof = proven, on_proof
        self._quoted = True  # whether this server expects ETags in quotes: Ceph accepts them only bare

    def check(self) -> None:
        """Check, before the first write of this object, that the server honours conditions."""
        with self._lock:
            if self._proven:
                return
            client = s3_client(self._place, PROBE_LIMITS)
            try:
                with self._failures("try conditional writes"):
                    self._quoted = probe(S3Cells(client, self._place), self._probe_folder)
            finally:
                client.close()
            self._proven = True
            self._on_proof()

    def read(self, session: str) -> Cell | None:
        check_session(session)
        with self._failures("read the lease"):
            return self._cells.fetch(self._folder + session)

    def write(self, swap: Swap) -> str | None:
        check_session(swap.session)
        self.check()
        key = self._folder + swap.session
        with self._failures("write the lease"):
            version = self._cells.swap(key, swap.data, swap.expected, self._quoted)
            if version is None and swap.expected is not None and self._quoted:
                current = self._cells.fetch(key)
                if current is not None and current.version == swap.expected:
                    # Refused though nothing changed. The second try is conditional too.
                    version = self._cells.swap(key, swap.data, swap.expected, quoted=False)
                    self._quoted = version is None
            return version

    def sessions(self) -> Iterator[str]:
        names: list[str] = []
        with self._failures("list the leases"):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._place.bucket, Prefix=self._folder):
                names += [entry["Key"].removeprefix(self._folder) for entry in page.get("Contents", [])]
        return (name for name in sorted(names) if can_name_lease(name))

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            failure = translated(error, what, self.url, self._place.bucket)
            raise LeaseUnreachable(failure.message, failure.hint) from error
