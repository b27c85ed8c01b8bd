"""Read one object of a bucket with its ETag, and replace it conditionally. Errors of botocore pass through."""

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
    """Access objects of one bucket as cells."""

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
        """Send one conditional PUT. Return the new ETag, or None if refused. `quoted`: how the ETag is sent."""
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
        """Delete an object of the probe, best effort; a lease is never removed."""
        with contextlib.suppress(BotoCoreError, ClientError):  # a small leftover is no reason to fail
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def _etag(self, answer: dict[str, Any]) -> str:
        """Return the ETag. botocore takes an answer that was cut within its headers for a complete one; without an ETag
        raise ConnectionClosedError."""
        etag = str(answer.get("ETag", "")).strip('"')
        if not etag:
            raise ConnectionClosedError(endpoint_url=self.url)
        return etag
