"""Leases in a bucket: `s3://bucket/prefix?endpoint=…`. Nothing else to run, if the server honours conditional writes.

One object per session, always one PUT, always with a condition and an MD5. The
ETag is the version: the nonce in every record makes no two alike. Whether the
server means its conditions is tried at start-up (lease/s3probe.py).
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

SOON = S3Limits(connect=2.0, read=3.0)
PATIENT = S3Limits(connect=2.0, read=20.0)  # SeaweedFS lets some racers for one object wait, a second at a time


class S3Register(Register):
    """`proven`: someone on this host has run `check` on this address already, an agent at its start say; commands then
    need not spend the seconds it may take. `on_proof` hears when it went well here."""

    threads = 16

    def __init__(
        self,
        place: S3Place,
        limits: S3Limits = SOON,
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
        self._quoted = True  # how this server wants its ETags back: Ceph takes them only bare

    def check(self) -> None:
        """Before the first write of this object: does the server mean its conditions?"""
        with self._lock:
            if self._proven:
                return
            patient = s3_client(self._place, PATIENT)
            try:
                with self._failures("try conditional writes"):
                    self._quoted = probe(S3Cells(patient, self._place), self._probe_folder)
            finally:
                patient.close()
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
                found = self._cells.fetch(key)
                if found is not None and found.version == swap.expected:
                    # Refused though nothing changed. The condition goes with the second try too.
                    version = self._cells.swap(key, swap.data, swap.expected, quoted=False)
                    self._quoted = version is None
            return version

    def sessions(self) -> Iterator[str]:
        found: list[str] = []
        with self._failures("list the leases"):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._place.bucket, Prefix=self._folder):
                found += [entry["Key"].removeprefix(self._folder) for entry in page.get("Contents", [])]
        return (name for name in sorted(found) if can_name_lease(name))

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            told = translated(error, what, self.url, self._place.bucket)
            raise LeaseUnreachable(told.message, told.hint) from error
