"""Leases in a bucket: `s3://bucket/prefix?endpoint=…`. Nothing else to run, if the server honours conditional writes.

One object per session, always one PUT, always with a condition and an MD5. The
ETag is the version: the nonce in every record makes no two alike. Whether the
server means its conditions is tried at start-up (lease/s3probe.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, cast

from botocore.exceptions import BotoCoreError, ClientError

from cmdop_migrate.errors import LeaseUnreachable
from cmdop_migrate.lease.base import Cell, Register, Swap
from cmdop_migrate.lease.record import check_session, is_session_id
from cmdop_migrate.lease.s3probe import probe
from cmdop_migrate.storage.s3client import S3Limits, S3Place, content_md5, s3_client
from cmdop_migrate.storage.s3errors import error_code, http_status, translated

SOON = S3Limits(connect=2.0, read=3.0)
_LOST = {404, 409, 412}


class S3Register(Register):
    threads = 16

    def __init__(self, place: S3Place, limits: S3Limits = SOON) -> None:
        self.url = place.url
        self._place = place
        self._client = s3_client(place, limits)
        root = f"{place.prefix}/" if place.prefix else ""
        self._folder = f"{root}lease/"
        self._probe_folder = f"{root}probe/"
        self._lock = threading.Lock()
        self._quoted: bool | None = None  # how this server wants its ETags back; None: not tried yet

    def check(self) -> None:
        self._etags_quoted()

    def read(self, session: str) -> Cell | None:
        check_session(session)
        with self._failures("read the lease"):
            return self.fetch(self._folder + session)

    def write(self, swap: Swap) -> str | None:
        check_session(swap.session)
        quoted = self._etags_quoted()
        try:
            with self._failures("write the lease"):
                return self.swap(self._folder + swap.session, swap.data, swap.expected, quoted)
        except LeaseUnreachable as error:
            if http_status(error.__cause__) in _LOST and error_code(error.__cause__) != "NoSuchBucket":
                return None
            raise

    def sessions(self) -> Iterator[str]:
        found: list[str] = []
        with self._failures("list the leases"):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._place.bucket, Prefix=self._folder):
                found += [entry["Key"].removeprefix(self._folder) for entry in page.get("Contents", [])]
        return (name for name in sorted(found) if is_session_id(name))

    def close(self) -> None:
        self._client.close()

    def fetch(self, key: str) -> Cell | None:
        """One object with its ETag; botocore's errors as they are."""
        try:
            answer = cast(dict[str, Any], self._client.get_object(Bucket=self._place.bucket, Key=key))
        except ClientError as error:
            if http_status(error) == 404 and error_code(error) != "NoSuchBucket":
                return None
            raise
        with contextlib.closing(answer["Body"]) as body:
            return Cell(cast(bytes, body.read()), _bare(answer["ETag"]))

    def swap(self, key: str, data: bytes, expected: str | None, quoted: bool) -> str:
        """One conditional PUT; botocore's errors as they are, 412 among them."""
        condition: dict[str, Any] = {"IfNoneMatch": "*"}
        if expected is not None:
            condition = {"IfMatch": f'"{expected}"' if quoted else expected}
        answer = self._client.put_object(
            Bucket=self._place.bucket, Key=key, Body=data, ContentMD5=content_md5(data), **condition
        )
        return _bare(answer["ETag"])

    def remove(self, key: str) -> None:
        """For the probe's own objects; a lease is never removed."""
        with contextlib.suppress(BotoCoreError, ClientError):  # litter of some bytes is no reason to refuse a server
            self._client.delete_object(Bucket=self._place.bucket, Key=key)

    def _etags_quoted(self) -> bool:
        """Before the first write of this object: does the server mean its conditions?"""
        with self._lock:
            if self._quoted is None:
                with self._failures("try conditional writes"):
                    self._quoted = probe(self, self._probe_folder)
            return self._quoted

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            told = translated(error, what, self.url, self._place.bucket)
            raise LeaseUnreachable(told.message, told.hint) from error


def _bare(etag: str) -> str:
    return etag.strip('"')
