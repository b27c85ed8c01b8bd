"""Test what is special to the servers behind leases: broken conditions, lost members, TLS, lost answers."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate import config as settings
from cmdop_migrate.errors import BadConfig, LeaseUnreachable
from cmdop_migrate.host import leases
from cmdop_migrate.lease import s3
from cmdop_migrate.lease.etcd import EtcdRegister, server_ttl
from cmdop_migrate.lease.etcdhttp import EtcdLimits
from cmdop_migrate.lease.register import Swap
from cmdop_migrate.lease.registry import etcd_place, open_lease
from cmdop_migrate.lease.s3 import S3Register
from cmdop_migrate.lease.s3_cas import S3Cells
from cmdop_migrate.lease.s3probe import probe
from cmdop_migrate.lease.store import Held, LeaseStore, Waiting
from cmdop_migrate.storage.registry import s3_place
from cmdop_migrate.storage.s3client import S3Limits
from tests.support.etcd_server import Cluster, etcd
from tests.support.faulty_proxy import Proxy
from tests.support.patience import bound
from tests.support.servers import S3Server

pytestmark = pytest.mark.server


def held(answer: object) -> Held:
    assert isinstance(answer, Held), answer
    return answer


class Liar:
    """Serve a minimal S3. `honours`: nothing; only `If-None-Match`; all but slowly looked up (a race); all, with bare
    ETags only as Ceph does."""

    def __init__(self, honours: str) -> None:
        objects: dict[str, bytes] = {}
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", etag: str = "") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if etag:
                    self.send_header("ETag", f'"{etag}"')
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                found = objects.get(self.path)
                if found is None:
                    return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                return self.answer(200, found, hashlib.md5(found).hexdigest())

            def do_DELETE(self) -> None:
                objects.pop(self.path, None)
                self.answer(204)

            def holds(self) -> bool:
                found = objects.get(self.path)
                now = None if found is None else hashlib.md5(found).hexdigest()
                if honours != "nothing" and self.headers["If-None-Match"] and now is not None:
                    return False
                wanted = self.headers["If-Match"]
                if honours in ("race", "bare") and wanted:
                    return wanted == now if honours == "bare" else wanted.strip('"') == now
                return True

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if honours == "race":
                    good = self.holds()
                    time.sleep(0.05)
                    if good:
                        objects[self.path] = body
                else:
                    with lock:
                        good = self.holds()
                        if good:
                            objects[self.path] = body
                if not good:
                    return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return self.answer(200, b"", hashlib.md5(body).hexdigest())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"s3://bucket/p?endpoint=http://127.0.0.1:{self.server.server_port}&region=us-east-1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def liar(request: pytest.FixtureRequest, s3_server: S3Server) -> Iterator[Liar]:
    made = Liar(request.param)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize("liar", ["nothing", "none-match", "race"], indirect=True)
def test_server_that_ignores_conditions_is_refused(liar: Liar) -> None:
    store = open_lease(liar.url)
    with pytest.raises(BadConfig, match="conditional writes") as told:
        store.check()
    assert "etcd://" in told.value.hint
    with pytest.raises(BadConfig):
        store.acquire("s", "host-a", "ia", 20)
    assert store.inspect("s") is None, "nothing was written"


@pytest.mark.parametrize("liar", ["bare"], indirect=True)
@pytest.mark.parametrize("proven", [True, False])
def test_server_that_expects_bare_etags_works(liar: Liar, proven: bool) -> None:
    store = open_lease(liar.url, proven)
    one = held(store.acquire("s", "host-a", "ia", 20))
    assert held(store.renew(one)).record.renewals == 1
    assert isinstance(store.acquire("s", "host-b", "ib", 20), Waiting)


def test_truncated_s3_answer_is_settled_by_reading(s3_url: str, s3_server: S3Server, proxy: Proxy) -> None:
    url = s3_url.replace(s3_server.endpoint, proxy.endpoint)
    store = LeaseStore(S3Register(s3_place(url), S3Limits(connect=1.0, read=2.0), proven=True))
    one = held(store.acquire("s", "host-a", "ia", 20))
    cut = proxy.after("down", 60)  # past "100 Continue": the body goes, its answer does not come
    two = held(store.renew(one))
    assert cut.is_set() and two.record.renewals == 1
    proxy.after("up", 200)  # within the request's headers: it never arrives whole
    with pytest.raises(LeaseUnreachable):
        store.renew(two)
    assert held(store.renew(two)).record.renewals == 2


def test_s3_write_cut_after_its_headers_keeps_the_record(s3_url: str, s3_server: S3Server, proxy: Proxy) -> None:
    url = s3_url.replace(s3_server.endpoint, proxy.endpoint)
    store = LeaseStore(S3Register(s3_place(url), S3Limits(connect=1.0, read=2.0), proven=True))
    lease = held(store.acquire("s", "host-a", "ia", 20))
    for sent in (300, 600, 700, 800, 900, 1000, 1100):
        proxy.after("up", sent)
        try:
            answer: object = store.renew(lease)
        except LeaseUnreachable:
            answer = store.renew(lease)
        lease = held(answer)
        seen = open_lease(s3_url, proven=True).inspect("s")
        assert seen is not None and seen.record.token == 1


def test_server_is_probed_once_per_boot_and_by_every_agent(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def counted(server: S3Cells, folder: str) -> bool:
        tried.append(server.url)
        return probe(server, folder)

    monkeypatch.setattr(s3, "probe", counted)
    config = settings.load(environ={"CMDOP_MIGRATE_LEASE": s3_url, "CMDOP_MIGRATE_RUN_DIR": str(tmp_path)})
    for times, fresh in ((1, False), (1, False), (2, True), (2, False)):
        leases.open_store(config, fresh).check()
        assert len(tried) == times
    other = replace(config, lease=s3_url.replace("?", "-other?"))
    leases.open_store(other).check()
    assert len(tried) == 3 and [one.name for one in tmp_path.iterdir()] == [leases.PROOF]
    leases.open_store(config).check()
    assert len(tried) == 4  # what is noted is one address
    nowhere = replace(config, run_dir=tmp_path / "gone")
    leases.open_store(nowhere).check()  # cannot be noted: as good, only slower the next time


def test_missing_bucket_and_missing_server(s3_server: S3Server) -> None:
    with pytest.raises(LeaseUnreachable, match="bucket") as told:
        open_lease(s3_server.url("there-is-no-such")).acquire("s", "host-a", "ia", 20)
    assert told.value.hint
    for nobody in ("s3://bucket/p?endpoint=http://127.0.0.1:9&region=us-east-1", "etcd://127.0.0.1:9/p"):
        begun = time.monotonic()
        with pytest.raises(LeaseUnreachable):
            open_lease(nobody).inspect("s")
        assert time.monotonic() - begun < bound(15)


def test_etcd_reports_a_lapsed_record(etcd_one: Cluster) -> None:
    """Report it not before the time a holder may run is over, and then without any contender having waited."""
    store = open_lease(etcd_one.url("lapse"))
    one = held(store.acquire("s", "host-a", "ia", 1.0))
    deadline = time.monotonic() + bound(30)
    while not (seen := store.inspect("s")) or not seen.lapsed:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    waited = time.clock_gettime(time.CLOCK_BOOTTIME) - one.started
    assert waited >= 1.0
    assert held(open_lease(etcd_one.url("lapse")).acquire("s", "host-b", "ib", 1.0)).token == 2


def test_expired_etcd_lease_is_requested_again(etcd_one: Cluster) -> None:
    register = EtcdRegister(etcd_place(etcd_one.url("revoked")))
    store = LeaseStore(register)
    one = held(store.acquire("s", "host-a", "ia", 1.0))
    ids = [grant[0] for grant in register._grants.values()]
    for number in ids:
        etcd_one.members[0].call("/v3/lease/revoke", {"ID": number})
    two = held(store.renew(one))
    assert two.token == 1
    seen = store.inspect("s")
    assert seen is not None and not seen.lapsed
    assert server_ttl(1.0) >= 2


@pytest.mark.slow
def test_etcd_survives_the_loss_of_one_of_three_members(tmp_path: Path) -> None:
    """Kill the leader during renewals: each renewal is proven again while the one before is fresh. Then kill a second
    member: unreachable, until it is back."""
    ttl = 8.0
    with etcd(tmp_path, members=3) as cluster:
        store = LeaseStore(EtcdRegister(etcd_place(cluster.url("p")), EtcdLimits(attempt=0.5, total=2.0)))
        leases = [held(store.acquire(f"s{n}", "host-a", "ia", ttl)) for n in range(5)]
        cluster.leader().stop()
        gap = _renew_for(store, leases, 4.0)
        assert gap < 0
        next(one for one in cluster.members if one.process is not None).stop()
        begun = time.monotonic()
        assert all(isinstance(answer, LeaseUnreachable) for answer in store.renew_many(leases))
        assert time.monotonic() - begun < bound(10)
        for one in cluster.members:
            if one.process is None:
                one.start()
        cluster.wait_ready()
        assert all(held(answer).token == 1 for answer in store.renew_many(leases))


def _renew_for(store: LeaseStore, leases: list[Held], seconds: float) -> float:
    """Return by how much the latest renewal came too late; negative if none did."""
    worst = float("-inf")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for at, answer in enumerate(store.renew_many(leases)):
            if isinstance(answer, LeaseUnreachable):
                continue
            done = time.clock_gettime(time.CLOCK_BOOTTIME)
            worst = max(worst, done - leases[at].fresh_until)
            leases[at] = held(answer)
        time.sleep(0.2)
    assert worst > float("-inf"), "no renewal went through"
    return worst


def test_server_that_is_not_etcd_is_refused(s3_server: S3Server) -> None:
    with pytest.raises(LeaseUnreachable):
        open_lease(f"etcd://127.0.0.1:{s3_server.port}/p").inspect("s")


def test_one_dead_etcd_endpoint_is_skipped(etcd_one: Cluster) -> None:
    port = etcd_one.members[0].client_port
    store = open_lease(f"etcd://127.0.0.1:9,127.0.0.1:{port}/dead-endpoint")
    one = held(store.acquire("s", "host-a", "ia", 20))
    assert store.register.write(Swap("s", b"x", "1")) is None
    assert held(store.renew(one)).token == 1
