"""Store objects in a bucket of any S3-compatible server. The registry imports this module only for an `s3://` URL, so
other commands do not pay for loading boto3.

Nothing is retried here; `retry.RetryStore` does that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError, EndpointConnectionError

from cmdop_migrate import log
from cmdop_migrate.errors import StoreUnreachable
from cmdop_migrate.storage.base import Data, ObjectInfo, Store, check_name, check_prefix, check_range, is_name
from cmdop_migrate.storage.s3client import S3Limits, S3Place, content_crc32, content_md5, s3_client
from cmdop_migrate.storage.s3errors import WRONG_SUM, error_code, http_status, translated

SINGLE_PUT_MAX = 16 << 20
PART_SIZE = 8 << 20
PART_THREADS = 4
PUT_NEW_MAX = 5 << 30  # limit of S3 for one PUT
DELETE_BATCH = 1000
LARGE = 1 << 20  # size from which on the cost of a checksum matters
_PROBE = ".checksum"  # not a valid object name (base.is_name), so it is never listed
# Servers that lack batch deletes, or their checksum, answer with any of these; none means that access is denied.
_NO_BATCH = {400, 405, 411, 501}


class S3Store(Store):
    """Store objects below a prefix of one bucket."""

    def __init__(self, place: S3Place, limits: S3Limits | None = None) -> None:
        self.url = place.url
        self._place = place
        self._client = s3_client(place, limits or S3Limits())
        self._root = f"{place.prefix}/" if place.prefix else ""
        self._bucket_seen = False
        self._batch_delete = True
        self._checks_crc32: bool | None = None  # not known yet
        self._probing = threading.Lock()

    def put(self, name: str, data: Data) -> None:
        key = self._key(name)
        with self._failures(f"store {name}"):
            if len(data) <= SINGLE_PUT_MAX:
                body = _body(data)
                answer = self._client.put_object(Bucket=self._place.bucket, Key=key, Body=body, **self._checksum(body))
                self._check_is_s3(answer, "ETag")
            else:
                self._put_parts(key, data)

    def put_new(self, name: str, data: Data) -> bool:
        # Always one PUT: some servers let two callers win if the condition is on the end of a multipart upload.
        key = self._key(name)
        if len(data) > PUT_NEW_MAX:
            raise ValueError(f"{name}: {len(data)} bytes are more than one conditional write takes")
        body = _body(data)
        try:
            with self._failures(f"store {name}"):
                answer = self._client.put_object(
                    Bucket=self._place.bucket, Key=key, Body=body, ContentMD5=content_md5(body), IfNoneMatch="*"
                )
                self._check_is_s3(answer, "ETag")
            return True
        except StoreUnreachable as error:
            if http_status(error.__cause__) == 412:
                return False
            if isinstance(error.__cause__, EndpointConnectionError | ConnectTimeoutError):
                raise  # the request was never sent
            # Unknown: stored and the answer lost, or another was first (some servers answer 409 or 500 then).
            if (stored := self._find(name)) is None:
                raise
            return stored == body

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        key = self._key(name)
        check_range(start, length)
        if length == 0:  # an HTTP range cannot be empty
            if self.stat(name) is None:
                raise KeyError(name)
            return b""
        whole = start == 0 and length is None
        last = "" if length is None else str(start + length - 1)
        byte_range: dict[str, Any] = {} if whole else {"Range": f"bytes={start}-{last}"}
        with self._failures(f"read {name}", missing=name):
            try:
                answer = cast(dict[str, Any], self._client.get_object(Bucket=self._place.bucket, Key=key, **byte_range))
            except ClientError as error:
                if http_status(error) == 416:  # the range starts at the end or past it
                    return b""
                raise
            self._check_is_s3(answer, "ETag")
            with contextlib.closing(answer["Body"]) as body:
                data = cast(bytes, body.read())
        if len(data) != answer.get("ContentLength"):
            short = f"{self.url} truncated {name}: {len(data)} of {answer.get('ContentLength', '?')} bytes"
            raise StoreUnreachable(short, "Check the network and any proxy in between, then try again.")
        if whole or "ContentRange" in answer:
            return data
        return data[start:] if length is None else data[start : start + length]  # from a server without ranges

    def stat(self, name: str) -> ObjectInfo | None:
        key = self._key(name)
        try:
            with self._failures(f"look at {name}", missing=name):
                head = self._client.head_object(Bucket=self._place.bucket, Key=key)
                self._check_is_s3(head, "LastModified")
        except KeyError:
            return None
        return ObjectInfo(name, head["ContentLength"], head["LastModified"].timestamp())

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        listed = [info for page in self._pages(prefix) for info in page]
        # SeaweedFS and S3's directory buckets list folder by folder (`a/x` before `a-b`).
        listed.sort(key=lambda info: info.name)
        return iter(listed)

    def few(self, prefix: str, most: int) -> Sequence[ObjectInfo] | None:
        listed: list[ObjectInfo] = []
        for page in self._pages(prefix):
            listed += page
            if len(listed) > most:
                return None
        return sorted(listed, key=lambda info: info.name)

    def _pages(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        """Yield the objects below `prefix`, one page per request."""
        check_prefix(prefix)
        with self._failures("list the store"):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._place.bucket, Prefix=self._root + prefix):
                self._check_is_s3(page, "IsTruncated")
                named = [(entry["Key"].removeprefix(self._root), entry) for entry in page.get("Contents", [])]
                yield [
                    ObjectInfo(name, entry["Size"], entry["LastModified"].timestamp())
                    for name, entry in named
                    if is_name(name)
                ]

    def delete(self, names: Iterable[str]) -> None:
        keys = [self._key(name) for name in names]
        for start in range(0, len(keys), DELETE_BATCH):
            some = keys[start : start + DELETE_BATCH]
            if len(some) == 1 or not self._delete_batch(some):
                for key in some:
                    with self._failures(f"delete {key}"), contextlib.suppress(self._client.exceptions.NoSuchKey):
                        self._client.delete_object(Bucket=self._place.bucket, Key=key)

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        """Delete several keys with one request. Return False if the server does not support it."""
        if not self._batch_delete:
            return False
        objects: Any = [{"Key": key} for key in keys]
        with self._failures(f"delete {len(keys)} objects"):
            try:
                answer = self._client.delete_objects(
                    Bucket=self._place.bucket, Delete={"Objects": objects, "Quiet": True}
                )
            except ClientError as error:
                if http_status(error) not in _NO_BATCH:
                    raise
                log.get("storage").info("%s has no batch delete, deleting one by one: %s", self.url, error)
                self._batch_delete = False
                return False
            for failed in answer.get("Errors", []):
                if failed.get("Code") != "NoSuchKey":
                    raise ClientError({"Error": cast(Any, failed)}, "DeleteObjects")
        return True

    def _put_parts(self, key: str, data: Data) -> None:
        """Upload in parts, in parallel. The name is free until the last request, and a failure leaves no part
        behind."""
        bucket = self._place.bucket
        begun = self._client.create_multipart_upload(Bucket=bucket, Key=key)
        self._check_is_s3(begun, "UploadId")
        upload = begun["UploadId"]
        failed = threading.Event()

        def send(number: int, part: memoryview) -> Any:
            if failed.is_set():
                raise StoreUnreachable(f"{key}: another part failed")
            body = bytes(part)
            answer = self._client.upload_part(
                Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=body, ContentMD5=content_md5(body)
            )
            self._check_is_s3(answer, "ETag")
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            with memoryview(data).cast("B") as view, ThreadPoolExecutor(PART_THREADS, "s3-part") as pool:
                size = max(PART_SIZE, -(-len(view) // 10_000))
                parts = (view[at : at + size] for at in range(0, len(view), size))
                sent = [pool.submit(send, number, part) for number, part in enumerate(parts, 1)]
                try:
                    done = [future.result() for future in sent]
                except BaseException:
                    failed.set()
                    raise
            answer = self._client.complete_multipart_upload(
                Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": done}
            )
            self._check_is_s3(answer, "ETag")
        except BaseException:
            self._abort(key, upload)
            raise

    def _checksum(self, body: bytes) -> dict[str, Any]:
        """Return the header by which the server refuses a damaged body. All servers support MD5, which is slow."""
        if len(body) < LARGE or not self._knows_crc32():
            return {"ContentMD5": content_md5(body)}
        return {"ChecksumCRC32": content_crc32(body)}

    def _knows_crc32(self) -> bool:
        """Tell whether the server verifies CRC32, by trying once per store: a server that accepts a wrong sum does not
        check it. If the server does not answer, the upload fails, as it would have anyway, and the probe is not
        repeated: no caller waits twice for a server that hangs."""
        with self._probing:
            if self._checks_crc32 is None:
                self._checks_crc32 = False
                self._checks_crc32 = self._refuses_wrong_crc32()
            return self._checks_crc32

    def _refuses_wrong_crc32(self) -> bool:
        bucket, key = self._place.bucket, self._root + _PROBE
        try:
            self._client.put_object(Bucket=bucket, Key=key, Body=b"not zero", ChecksumCRC32=content_crc32(b""))
            self._client.delete_object(Bucket=bucket, Key=key)
        except ClientError as error:
            return http_status(error) == 400 and error_code(error) in WRONG_SUM
        return False

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._client.abort_multipart_upload(Bucket=self._place.bucket, Key=key, UploadId=upload)
        except (BotoCoreError, ClientError) as error:
            # Only the first failure is reported; a lifecycle rule of the bucket removes parts that are left.
            log.get("storage").warning("cannot remove the uploaded parts of %s from %s: %s", key, self.url, error)

    def _check_is_s3(self, answer: Mapping[str, Any], field: str) -> None:
        """Raise StoreUnreachable if the answer lacks `field`, which every S3 server sends. A proxy may answer 200 with
        a page of its own: then nothing is stored, and an empty listing means nothing."""
        if field not in answer:
            reason = f"the answer from {self.url} is not from an S3 server: it has no {field}"
            raise StoreUnreachable(reason, "Check that endpoint= is an S3 server, and any proxy in between.")

    def _find(self, name: str) -> bytes | None:
        try:
            return self.get(name)
        except (KeyError, StoreUnreachable):
            return None

    def _key(self, name: str) -> str:
        check_name(name)
        return self._root + name

    def _check_bucket(self) -> None:
        """Check once per store that the bucket exists: some servers create a missing bucket on the first write, and a
        HEAD does not tell whether bucket or object is missing. A 403 is no answer: the request itself will tell."""
        if self._bucket_seen:
            return
        try:
            self._client.head_bucket(Bucket=self._place.bucket)
        except ClientError as error:
            if http_status(error) == 404:
                error.response["Error"]["Code"] = "NoSuchBucket"
            if http_status(error) != 403:
                raise
        self._bucket_seen = True

    @contextlib.contextmanager
    def _failures(self, what: str, missing: str | None = None) -> Iterator[None]:
        """Translate errors of botocore into those of the contract; with `missing`, a 404 raises KeyError(missing)."""
        try:
            self._check_bucket()
            yield
        except (BotoCoreError, ClientError) as error:
            if missing is not None and http_status(error) == 404 and error_code(error) != "NoSuchBucket":
                raise KeyError(missing) from None
            raise translated(error, what, self.url, self._place.bucket) from error


def _body(data: Data) -> bytes:
    return data if isinstance(data, bytes) else bytes(data)
