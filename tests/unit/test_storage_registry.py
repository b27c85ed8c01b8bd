"""Test store URLs, the translation of boto3's failures, and that boto3 is loaded only for S3."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from botocore import exceptions as boto

from cmdop_migrate.errors import BadConfig, StoreDenied, StoreUnreachable
from cmdop_migrate.storage.local import LocalStore
from cmdop_migrate.storage.registry import open_reliable, open_store, s3_place
from cmdop_migrate.storage.retry import RetryStore
from cmdop_migrate.storage.s3 import S3Store
from cmdop_migrate.storage.s3client import S3Place
from cmdop_migrate.storage.s3errors import translated


def test_file_url_is_taken_literally(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/a b%20?c#d/")
    assert isinstance(store, LocalStore)
    assert store.root == tmp_path / "a b%20?c#d" and store.url == f"file://{tmp_path}/a b%20?c#d"
    assert list(tmp_path.iterdir()) == []


def test_s3_url(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    plain, full = "s3://bucket", f"s3://bucket/a/B-1/?endpoint=https://h.example:9000&region=eu-1&ca={ca}"
    assert s3_place(plain) == S3Place(plain, "bucket")
    assert s3_place(full) == S3Place(full, "bucket", "a/B-1", "https://h.example:9000", "eu-1", str(ca))
    assert s3_place("s3://b-1?endpoint=http%3A%2F%2F%5B%3A%3A1%5D%3A9000").endpoint == "http://[::1]:9000"
    assert isinstance(open_store(plain), S3Store)
    reliable = open_reliable(plain)
    assert isinstance(reliable, RetryStore) and reliable.url == plain


@pytest.mark.parametrize(
    "url",
    [
        "",
        "store",
        "/var/store",
        "ftp://host/x",
        "memory://",
        "file://",
        "file:///",
        "file:////",
        "file:///..",
        "file://host/dir",
        "file://./dir",
        "file:///a\0b",
        "s3://",
        "s3:///prefix",
        "s3://b",
        "s3://bu cket",
        "s3://bucket/../x",
        "s3://bucket/a//b",
        "s3://bucket/ü",
        "s3://bucket/p#frag",
        "s3://bucket?endpoint=",
        "s3://bucket?endpoint=localhost:9000",
        "s3://bucket?endpoint=ftp://h",
        "s3://bucket?endpoint=http://",
        "s3://bucket?endpoint=http://h:99999",
        "s3://bucket?endpoint=http://h:x",
        "s3://bucket?endpoint=http://h&endpoint=http://i",
        "s3://bucket?region",
        "s3://bucket?regoin=x",
        "s3://bucket?ca=/no/such/file",
        "s3://[bad/x",
    ],
)
def test_invalid_store_url_is_refused_with_the_valid_forms(url: str) -> None:
    with pytest.raises(BadConfig) as caught:
        open_store(url)
    assert caught.value.hint and caught.value.exit == 2


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/x",
        "s3://key:a/hunter2@bucket/x",
        "s3://bucket?endpoint=http://key:hunter2@host",
        "s3://b?endpoint=http://key:hunter2@host",
        "s3://bucket/ü?endpoint=http://key:hunter2@host",
        "s3://bucket/ü?endpoint=http%3A%2F%2Fkey:hunter2%40host",
        "s3://bucket?endpoint=http://key:hunter2@host&endpoint=http://host",
        "s3://bucket?region=&endpoint=http://key:a/hunter2@host",
        "s3://bucket?secret=hunter2",
        "https://key:hunter2@host/bucket",
    ],
)
def test_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(BadConfig) as caught:
        open_store(url)
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_missing_aws_profile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(BadConfig, match="no-such-profile") as caught:
        open_store("s3://bucket")
    assert "AWS_PROFILE" in caught.value.hint


def test_boto3_is_loaded_only_for_s3() -> None:
    code = (
        "import sys\n"
        "from cmdop_migrate.errors import BadConfig\n"
        "from cmdop_migrate.storage.registry import open_reliable\n"
        "open_reliable('file:///x')\n"
        "try: open_reliable('s3://')\n"
        "except BadConfig: pass\n"
        "print(sorted(m for m in ('boto3', 'botocore', 'urllib3') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def answered(status: int, code: str = "") -> boto.ClientError:
    return boto.ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


@pytest.mark.parametrize(
    ("error", "kind", "hint"),
    [
        (boto.EndpointConnectionError(endpoint_url="x"), StoreUnreachable, "endpoint runs"),
        (boto.ConnectTimeoutError(endpoint_url="x"), StoreUnreachable, "endpoint runs"),
        (boto.ReadTimeoutError(endpoint_url="x"), StoreUnreachable, "endpoint runs"),
        (boto.ConnectionClosedError(endpoint_url="x"), StoreUnreachable, "endpoint runs"),
        (boto.ResponseStreamingError(error="x"), StoreUnreachable, "endpoint runs"),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), StoreUnreachable, "endpoint runs"),
        (boto.SSLError(endpoint_url="x", error="EOF"), StoreUnreachable, "endpoint runs"),
        (boto.SSLError(endpoint_url="x", error="CERTIFICATE_VERIFY_FAILED"), StoreDenied, "ca="),
        (boto.NoCredentialsError(), StoreDenied, "AWS_ACCESS_KEY_ID"),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), StoreDenied, "AWS_ACCESS_KEY_ID"),
        (answered(500, "InternalError"), StoreUnreachable, "server's log"),
        (answered(503, "SlowDown"), StoreUnreachable, "server's log"),
        (answered(507), StoreUnreachable, "server's log"),
        (answered(429), StoreUnreachable, "server's log"),
        (answered(400, "RequestTimeout"), StoreUnreachable, "server's log"),
        (answered(400, "BadDigest"), StoreUnreachable, "server's log"),
        (answered(409, "OperationAborted"), StoreUnreachable, "server's log"),
        (answered(0, "InternalError"), StoreUnreachable, "server's log"),  # one key of a batch
        (answered(0, "AccessDenied"), StoreDenied, "AWS_ACCESS_KEY_ID"),
        (answered(403, "AccessDenied"), StoreDenied, "AWS_ACCESS_KEY_ID"),
        (answered(400, "ExpiredToken"), StoreDenied, "AWS_ACCESS_KEY_ID"),
        (answered(403, "RequestTimeTooSkewed"), StoreDenied, "clock"),
        (answered(404, "NoSuchBucket"), StoreDenied, "Create the bucket b"),
        (answered(301, "PermanentRedirect"), StoreDenied, "region="),
        (answered(400, "AuthorizationHeaderMalformed"), StoreDenied, "region="),
        (answered(405), StoreDenied, "endpoint="),
    ],
)
def test_botocore_error_is_translated(error: boto.BotoCoreError | boto.ClientError, kind: type, hint: str) -> None:
    found = translated(error, "store a", "s3://b", "b")
    assert type(found) is kind and hint in found.hint
    assert found.message.startswith("cannot store a in s3://b: ")
