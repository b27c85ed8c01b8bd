"""One object of a bucket as a cell: read it with its ETag, replace it on condition. Errors of botocore as they are."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError

from cmdop_migrate.lease.register import Cell
from cmdop_migrate.storage.s3client import S3Place, content_md5
from cmdop_migrate.storage.s3errors import error_code, http_status

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_LOST = {404, 409, 412}


class S3Cells:
    def __init__(self, client: S3Client, place: S3Place) -> None:
        self.url = place.url
        self._client = client
        self._bucket = place.bucket

    def fetch(self, key: str) -> Cell | None:
        try:
            answer = cast(dict[str, Any], self._client.get_object(Bucket=self._bucket, Key=key))
        except ClientError as error:
            if http_status(error) == 404 and error_code(error) != "NoSuchBucket":
                return None
            raise
        with contextlib.closing(answer["Body"]) as body:
            data = cast(bytes, body.read())
        if len(data) != answer.get("ContentLength"):
            raise ConnectionClosedError(endpoint_url=self.url)
        return Cell(data, self._etag(answer))

    def swap(self, key: str, data: bytes, expected: str | None, quoted: bool) -> str | None:
        """One conditional PUT: the new ETag, or None: refused. `quoted`: how the ETag goes back to the server."""
        condition: dict[str, Any] = {"IfNoneMatch": "*"}
        if expected is not None:
            condition = {"IfMatch": f'"{expected}"' if quoted else expected}
        try:
            answer = self._client.put_object(
                Bucket=self._bucket, Key=key, Body=data, ContentMD5=content_md5(data), **condition
            )
        except ClientError as error:
            if http_status(error) in _LOST and error_code(error) != "NoSuchBucket":
                return None
            raise
        return self._etag(cast(dict[str, Any], answer))

    def remove(self, key: str) -> None:
        """For the probe's own objects; a lease is never removed."""
        with contextlib.suppress(BotoCoreError, ClientError):  # litter of some bytes is no reason to refuse a server
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def _etag(self, answer: dict[str, Any]) -> str:
        """botocore takes an answer that was cut within its headers for a whole one; without an ETag it is none."""
        etag = str(answer.get("ETag", "")).strip('"')
        if not etag:
            raise ConnectionClosedError(endpoint_url=self.url)
        return etag
