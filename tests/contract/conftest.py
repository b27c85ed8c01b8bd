"""Provide backends for the contract suites; the S3 server is real and shared by a whole run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate.lease.memory import MemoryRegister
from cmdop_migrate.lease.register import Register
from cmdop_migrate.lease.registry import open_register
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.memory import MemoryStore
from cmdop_migrate.storage.registry import open_store
from cmdop_migrate.storage.retry import RetryStore
from tests.support.etcd_server import Cluster, etcd
from tests.support.faulty_proxy import Proxy
from tests.support.meter_store import MeterStore
from tests.support.servers import S3Server, seaweed

# Backends that need a real server; `scripts/test --fast` leaves them out (tests/conftest.py).
S3, ETCD_ONE, ETCD_THREE = (pytest.param(kind, marks=pytest.mark.server) for kind in ("s3", "etcd-one", "etcd-three"))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with seaweed(tmp_path_factory.mktemp("s3"), tls=True) as server:
        yield server


@pytest.fixture(scope="session")
def shared_bucket(shared_server: S3Server) -> str:
    return shared_server.new_bucket()


@pytest.fixture
def s3_server(shared_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Return the shared server, with its credentials in the environment. Do not stop it."""
    for key, value in shared_server.environ().items():
        monkeypatch.setenv(key, value)
    return shared_server


@pytest.fixture
def s3_url(s3_server: S3Server, shared_bucket: str) -> str:
    """Return the URL of this test's own prefix in the shared server."""
    return s3_server.url(shared_bucket, f"t-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Start a server that the test may kill."""
    with seaweed(tmp_path) as server:
        for key, value in server.environ().items():
            monkeypatch.setenv(key, value)
        yield server


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    """Start a proxy in front of the shared server."""
    with Proxy(s3_server.port) as made:
        yield made


@pytest.fixture(params=["file", S3])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty store that several processes can open."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return str(request.getfixturevalue("s3_url"))


@pytest.fixture(params=["memory", "decorated", "file", S3])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store of every kind. `decorated` shows that the wrappers keep the contract."""
    match request.param:
        case "memory":
            return MemoryStore()
        case "decorated":
            return RetryStore(MeterStore(MemoryStore()))
        case "file":
            return open_store(f"file://{tmp_path}/store")
        case _:
            return open_store(request.getfixturevalue("s3_url"))


@pytest.fixture(scope="session")
def etcd_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with etcd(tmp_path_factory.mktemp("etcd-one")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def etcd_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a shared cluster. Do not stop its members."""
    with etcd(tmp_path_factory.mktemp("etcd-three"), members=3) as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", S3, ETCD_ONE, ETCD_THREE])
def lease_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty lease store that several processes can open."""
    match request.param:
        case "sqlite":
            return f"sqlite://{tmp_path}/lease.db"
        case "s3":
            return str(request.getfixturevalue("s3_url"))
        case kind:
            cluster: Cluster = request.getfixturevalue(kind.replace("-", "_"))
            return cluster.url(f"t-{uuid.uuid4().hex[:8]}")


@pytest.fixture(params=["memory", "sqlite", S3, ETCD_ONE, ETCD_THREE])
def register(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Register]:
    """Return an empty register of every kind."""
    if request.param == "memory":
        yield MemoryRegister()
        return
    match request.param:
        case "sqlite":
            url = f"sqlite://{tmp_path}/lease.db"
        case "s3":
            url = str(request.getfixturevalue("s3_url"))
        case kind:
            url = request.getfixturevalue(kind.replace("-", "_")).url(f"t-{uuid.uuid4().hex[:8]}")
    made = open_register(url, proven=True)
    yield made
    made.close()
