"""Test what only a server can do: refuse, stop, hang, cut the connection, lose an answer, damage a byte."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import EndpointConnectionError
from urllib3 import HTTPResponse

from cmdop_migrate.errors import StoreDenied, StoreUnreachable
from cmdop_migrate.storage.registry import open_store, s3_place
from cmdop_migrate.storage.retry import RetryPolicy, RetryStore
from cmdop_migrate.storage.s3 import S3Store
from cmdop_migrate.storage.s3client import S3Limits
from tests.support.faulty_proxy import Proxy
from tests.support.meter_store import MeterStore
from tests.support.patience import bound
from tests.support.servers import S3Server

BIG = bytes(range(256)) * (40 << 12)  # 40 MiB: several parts
SOME = bytes(range(256)) * (4 << 12)  # 4 MiB: one PUT
ANSWER = len("HTTP/1.1 100 Continue\r\n\r\n") + 3  # within the answer to an upload
SOON = S3Limits(connect=1.0, read=2.0)
QUICK = RetryPolicy(tries=5, total=30.0, first=0.05, longest=0.2)


def through(proxy: Proxy, url: str) -> S3Store:
    """Return the store at `url`, through the proxy, with the bucket checked already."""
    place = s3_place(url)
    store = S3Store(s3_place(url.replace(str(place.endpoint), proxy.endpoint)), SOON)
    assert store.stat("warm") is None
    return store


def test_tls_with_the_ca_in_the_url(s3_server: S3Server, s3_url: str) -> None:
    url = s3_url.replace(s3_server.endpoint, s3_server.https_endpoint)
    store = open_store(f"{url}&ca={s3_server.ca}")
    store.put("big", BIG)
    assert store.put_new("small", b"1") is True
    assert store.put_new("small", b"2") is False
    assert store.get("big") == BIG
    assert store.get("big", 5, 5) == BIG[5:10]
    assert [info.name for info in store.list()] == ["big", "small"]
    store.delete(["big", "small"])
    assert list(store.list()) == []


def test_tls_with_the_ca_in_the_environment(s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_url.replace(s3_server.endpoint, s3_server.https_endpoint)
    with pytest.raises(StoreDenied) as caught:
        open_store(url).put("a", b"1")
    assert "ca=" in caught.value.hint
    monkeypatch.setenv("AWS_CA_BUNDLE", str(s3_server.ca))
    store = open_store(url)
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_wrong_and_missing_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    _denied_everywhere(open_store(s3_url), "AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    _denied_everywhere(open_store(s3_url), "AWS_ACCESS_KEY_ID")


def test_read_only_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(s3_url).put("a", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "cmdop-reader")
    store = open_store(s3_url)
    assert store.get("a") == b"1" and [info.name for info in store.list()] == ["a"]
    for act in (
        lambda: store.put("b", b""),
        lambda: store.put_new("b", b""),
        lambda: store.put("b", BIG),
        lambda: store.delete(["a"]),
        lambda: store.delete(["a", "b"]),
    ):
        with pytest.raises(StoreDenied):
            act()
    assert store.get("a") == b"1"


def test_missing_bucket_is_never_created(s3_server: S3Server) -> None:
    _denied_everywhere(open_store(s3_server.url("no-such-bucket", "x")), "Create the bucket no-such-bucket")
    assert "no-such-bucket" not in {b["Name"] for b in s3_server.client().list_buckets()["Buckets"]}


def _denied_everywhere(store: object, hint: str) -> None:
    assert isinstance(store, S3Store)
    for act in (
        lambda: store.put("a", b"1"),
        lambda: store.put("a", BIG),
        lambda: store.put_new("a", b"1"),
        lambda: store.get("a"),
        lambda: store.stat("a"),
        lambda: list(store.list()),
        lambda: store.delete(["a", "b"]),
    ):
        with pytest.raises(StoreDenied) as caught:
            act()
        assert hint in caught.value.hint
        assert caught.value.exit == 6


def test_foreign_keys_are_skipped(s3_server: S3Server, s3_url: str) -> None:
    place, store = s3_place(s3_url), open_store(s3_url)
    store.put("a", b"1")
    for key in (f"{place.prefix}/UPPER", f"{place.prefix}/.tmp", f"{place.prefix}-other/b"):
        s3_server.client().put_object(Bucket=place.bucket, Key=key, Body=b"")
    assert [info.name for info in store.list()] == ["a"]


def test_server_without_batch_delete(s3_url: str) -> None:
    store = S3Store(s3_place(s3_url))
    asked: list[str] = []

    def refuse(request: object, **_: object) -> AWSResponse:
        asked.append("batch")
        response = AWSResponse("", 501, {}, None)
        response._content = b"<Error><Code>NotImplemented</Code><Message>no</Message></Error>"
        return response

    store._client.meta.events.register("before-send.s3.DeleteObjects", refuse)
    for _ in range(2):
        for name in ("a", "b", "c"):
            store.put(name, b"1")
        store.delete(["a", "b", "never"])
        assert [info.name for info in store.list()] == ["c"]
    assert asked == ["batch"], "learnt once"


def test_page_of_a_proxy_is_not_an_answer(s3_url: str) -> None:
    store = S3Store(s3_place(s3_url))
    store.put("a", b"1")

    def page(request: object, **_: object) -> AWSResponse:
        text = b'<html xmlns="http://www.w3.org/1999/xhtml"><body>Please log in.</body></html>'
        body = HTTPResponse(io.BytesIO(text), preload_content=False)
        return AWSResponse("", 200, {"Content-Type": "application/xhtml+xml"}, body)

    asked = [f"before-send.s3.{one}" for one in ("PutObject", "HeadObject", "ListObjectsV2")]
    for one in asked:
        store._client.meta.events.register(one, page)
    for act in (lambda: store.put("a", b"2"), lambda: store.put("a", SOME), lambda: store.stat("a"), store.list):
        with pytest.raises(StoreUnreachable, match="not from an S3 server"):
            act()
    with pytest.raises(StoreUnreachable, match="not from an S3 server"):
        store.put_new("b", b"2")
    store._client.meta.events.register("before-send.s3.GetObject", page)
    with pytest.raises(StoreUnreachable, match="not from an S3 server"):  # and not: it is not there (KeyError)
        store.get("a")
    with pytest.raises(StoreUnreachable, match="not from an S3 server"):  # and not: another was first
        store.put_new("b", b"2")
    for step in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"):
        store._client.meta.events.register(f"before-send.s3.{step}", page)
        with pytest.raises(StoreUnreachable, match="not from an S3 server"):
            store.put("a", BIG)
        store._client.meta.events.unregister(f"before-send.s3.{step}", page)
    for one in (*asked, "before-send.s3.GetObject"):
        store._client.meta.events.unregister(one, page)
    assert [info.name for info in store.list()] == ["a"] and store.get("a") == b"1"


def test_no_server_at_the_endpoint(tmp_path: Path, s3_url: str) -> None:
    place = s3_place(s3_url)
    with Proxy(1) as gone:
        pass
    store = S3Store(s3_place(s3_url.replace(str(place.endpoint), gone.endpoint)), SOON)
    began = time.monotonic()
    for act in (lambda: store.put_new("a", b"1"), lambda: store.get("a"), lambda: store.stat("a"), store.list):
        with pytest.raises(StoreUnreachable) as caught:
            act()
        assert "endpoint" in caught.value.hint
    assert time.monotonic() - began < bound(20)


def test_upload_cut_half_way(proxy: Proxy, s3_server: S3Server, s3_url: str) -> None:
    store = through(proxy, s3_url)
    for data, cut_at in ((SOME, 2 << 20), (BIG, 20 << 20)):
        store.put("a", b"old")
        sprung = proxy.after("up", cut_at)
        with pytest.raises(StoreUnreachable):
            store.put("a", data)
        assert sprung.is_set()
        assert store.get("a") == b"old"
        proxy.after("up", cut_at)
        RetryStore(store, QUICK).put("a", data)
        assert store.get("a") == data
    place = s3_place(s3_url)
    left = s3_server.client().list_multipart_uploads(Bucket=place.bucket, Prefix=place.prefix)
    assert left.get("Uploads", []) == [], "a failed upload is taken back"


def test_checksum_that_the_server_ignores_is_not_used(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use CRC-32 only where a wrong one is refused; the probe leaves nothing, and no caller waits twice for it."""
    store = S3Store(s3_place(s3_url))
    sent: list[set[str]] = []
    answers: list[str] = []
    real = store._client.put_object

    def put_object(**request: Any) -> Any:
        sent.append(request.keys() & {"ChecksumCRC32", "ContentMD5"})
        if "ChecksumCRC32" in request and answers:
            answer = answers.pop(0)
            if answer == "none":
                raise EndpointConnectionError(endpoint_url="http://localhost")
            del request["ChecksumCRC32"]  # a server that does not know it
        return real(**request)

    monkeypatch.setattr(store._client, "put_object", put_object)
    answers[:] = ["none"]
    with pytest.raises(StoreUnreachable):
        store.put("a", SOME)
    store.put("a", SOME)
    assert sent == [{"ChecksumCRC32"}, {"ContentMD5"}], "not asked a second time"
    store._checks_crc32 = None
    answers[:] = ["takes anything"]
    sent.clear()
    store.put("b", SOME)
    store.put("c", SOME)
    assert sent == [{"ChecksumCRC32"}, {"ContentMD5"}, {"ContentMD5"}]
    store._checks_crc32 = None
    sent.clear()
    store.put("d", SOME)
    store.put("e", b"little")
    assert sent == [{"ChecksumCRC32"}, {"ChecksumCRC32"}, {"ContentMD5"}]
    assert store.get("d") == SOME
    place = s3_place(s3_url)
    keys = store._client.list_objects_v2(Bucket=place.bucket, Prefix=place.prefix)["Contents"]
    assert sorted(one["Key"].rpartition("/")[2] for one in keys) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("data", [b"new", SOME, BIG])
def test_upload_cut_between_headers_and_body(proxy: Proxy, s3_url: str, data: bytes) -> None:
    # SeaweedFS stores an empty object then, unless the upload came with a checksum.
    store = through(proxy, s3_url)
    assert store._knows_crc32(), "else what is cut below is the answer to that"
    store.put("old", b"old")
    for name, before in (("old", b"old"), ("fresh", None)):
        sprung = proxy.after("down", 3)
        with pytest.raises(StoreUnreachable):
            store.put(name, data)
        assert sprung.is_set()
        time.sleep(0.2)  # what the server does with it, it does after the cut
        assert store._find(name) == before
    if len(data) <= len(SOME):
        proxy.after("down", 3)
        with pytest.raises(StoreUnreachable):
            store.put_new("fresh", data)
        time.sleep(0.2)
        assert store.put_new("fresh", data) is True and store.get("fresh") == data


def test_download_cut_half_way(proxy: Proxy, s3_url: str) -> None:
    store = through(proxy, s3_url)
    store.put("a", SOME)
    for start, length in ((0, None), (100, 3 << 20)):
        sprung = proxy.after("down", 1 << 20)
        with pytest.raises(StoreUnreachable):
            store.get("a", start, length)
        assert sprung.is_set()
        sprung = proxy.after("down", 1 << 20)
        meter = MeterStore(store)
        data = RetryStore(meter, QUICK).get("a", start, length)
        assert data == (SOME if length is None else SOME[start : start + length])
        assert sprung.is_set() and meter.counts()["get"].requests == 2 and meter.counts()["get"].failed == 1


def test_lost_answer_to_put_new(proxy: Proxy, s3_url: str) -> None:
    store = through(proxy, s3_url)
    sprung = proxy.after("down", ANSWER)
    assert store.put_new("a", b"ours") is True, "stored, the answer lost: it is ours by its content"
    assert sprung.is_set()
    proxy.after("down", ANSWER)
    assert store.put_new("a", b"another's") is False
    assert store.get("a") == b"ours"


def test_retried_put_new_recognises_its_object(proxy: Proxy, s3_url: str) -> None:
    store = through(proxy, s3_url)
    # The first try is stored but neither its answer nor the question about it comes through.
    store._find = lambda name: None  # type: ignore[method-assign]
    sprung = proxy.after("down", ANSWER)
    assert RetryStore(store, QUICK).put_new("a", b"ours") is True
    assert sprung.is_set() and store.get("a") == b"ours"


def test_upload_damaged_in_transit_is_refused(proxy: Proxy, s3_url: str) -> None:
    store = through(proxy, s3_url)
    sprung = proxy.after("up", 1 << 20, flip=True)
    with pytest.raises(StoreUnreachable):
        store.put("a", SOME)
    assert sprung.is_set() and store.stat("a") is None
    proxy.after("up", 1 << 20, flip=True)
    RetryStore(store, QUICK).put("a", SOME)
    assert store.get("a") == SOME


def test_server_is_killed_and_restarted(own_server: S3Server) -> None:
    url = own_server.url(own_server.new_bucket(), "p")
    with Proxy(own_server.port) as proxy:
        store = through(proxy, url)
        RetryStore(store, QUICK).put("before/big", BIG)  # the set-up may take longer than a read timeout under load
        assert store.put_new("before/small", b"1") is True
        for name, data in (("single", SOME), ("parts", BIG)):
            sprung = proxy.after("up", len(data) // 2, then=own_server.stop)
            began = time.monotonic()
            with pytest.raises(StoreUnreachable):
                store.put(name, data)
            assert sprung.wait(10) and time.monotonic() - began < bound(30)
            with pytest.raises(StoreUnreachable):
                store.get("before/small")
            own_server.start()
            assert store.stat(name) is None, "no part under the name"
            RetryStore(store, QUICK).put(name, data)
            assert store.get(name) == data
        assert store.get("before/big") == BIG
        assert store.put_new("before/small", b"2") is False


def test_server_that_hangs(own_server: S3Server) -> None:
    store = S3Store(s3_place(own_server.url(own_server.new_bucket())), S3Limits(connect=1.0, read=1.0))
    store.put("a", b"1")
    with own_server.frozen():
        began = time.monotonic()
        for act in (lambda: store.get("a"), lambda: store.put("b", SOME), lambda: store.put_new("c", b"1"), store.list):
            with pytest.raises(StoreUnreachable):
                act()
        assert time.monotonic() - began < bound(30)
    assert RetryStore(store, QUICK).get("a") == b"1"
