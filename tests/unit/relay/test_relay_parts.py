"""The relay's small parts: throttle, door, line budget, pages, register of credentials, certificate, addresses."""

from __future__ import annotations

import http
import os
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.datastructures import Headers
from websockets.http11 import Request

from cmdop_migrate.errors import BadConfig, LeaseUnreadable, NotFound, Usage
from cmdop_migrate.gateway import serve_relay as flow
from cmdop_migrate.lease.memory import MemoryRegister
from cmdop_migrate.lease.register import Swap
from cmdop_migrate.lease.registry import open_register, sibling
from cmdop_migrate.relay import certificate
from cmdop_migrate.relay import http as relay_http
from cmdop_migrate.relay.connection_limits import origin_allowed
from cmdop_migrate.relay.credential_registry import CredentialRegistry
from cmdop_migrate.relay.credentials import Claims, issue
from cmdop_migrate.relay.log_budget import LogBudget
from cmdop_migrate.relay.metrics import relay_metrics
from cmdop_migrate.relay.throttle import Throttle, group


def test_failures_of_an_address_are_forgiven_with_time() -> None:
    throttle = Throttle(failures=3, refill=1)
    for _ in range(3):
        assert throttle.allows("10.0.0.1", 0)
        throttle.failed("10.0.0.1", 0)
    assert not throttle.allows("10.0.0.1", 0.9) and throttle.allows("10.0.0.2", 0)
    assert throttle.allows("10.0.0.1", 1.0) and not throttle.allows("10.0.0.1", 0.5)


def test_throttle_table_is_bounded() -> None:
    throttle = Throttle(failures=1, refill=0, addresses=10)
    for number in range(1000):
        throttle.failed(f"10.0.{number // 250}.{number % 250}", 0)
    assert len(throttle._left) == 10 and not throttle.allows("10.0.3.249", 0)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("unknown", "unknown"),
    ],
)
def test_what_counts_as_one_address(address: str, key: str) -> None:
    assert group(address) == key


@pytest.mark.parametrize(
    ("origins", "host", "allowed", "answer"),
    [
        ([], "relay:7443", (), True),
        (["https://relay:7443"], "relay:7443", (), True),
        (["https://RELAY:7443"], "relay:7443", (), True),
        (["https://relay"], "relay:7443", (), False),
        (["https://evil"], "relay:7443", (), False),
        (["https://evil"], None, (), False),
        (["null"], "relay", (), False),
        (["https://ops"], "relay", ("https://ops",), True),
        (["https://relay", "https://evil"], "relay", (), False),
    ],
)
def test_origins(origins: list[str], host: str | None, allowed: tuple[str, ...], answer: bool) -> None:
    assert origin_allowed(origins, host, allowed) is answer


def test_log_budget_limits_each_kind_and_counts_suppressed_lines() -> None:
    lines = LogBudget(2)
    assert [lines.take("a", 5.0) for _ in range(4)] == [0, 0, None, None]
    assert lines.take("b", 5.9) == 0 and lines.take("a", 6.0) == 2 and lines.take("a", 6.1) == 0


def test_metrics_have_samples_from_the_start() -> None:
    metrics = relay_metrics()
    metrics.add("refused_total", label="full")
    metrics.set("hosts", 2)
    assert "cmdop_migrate_relay_hosts 2" in metrics.text() and "cmdop_migrate_relay_clients 0" in metrics.text()
    assert 'cmdop_migrate_relay_refused_total{code="full"} 1' in metrics.text()


def test_pages_come_from_the_table_only(tmp_path: Path) -> None:
    assets = tmp_path / "web"
    (assets / "lib").mkdir(parents=True)
    (assets / "index.html").write_text("<p>")
    (assets / "lib" / "x.js").write_text("1")
    (assets / "lib" / "y.wasm").write_bytes(b"\0asm")
    (assets / ".hidden").write_text("no")
    (tmp_path / "keys").write_text("no")
    served = relay_http.Pages({"/healthz": lambda: relay_http.text("ok")}, assets)

    def get(path: str) -> tuple[int, str, bytes]:
        answer = served.answer(Request(path, Headers()))
        assert answer.headers["X-Content-Type-Options"] == "nosniff" and relay_http.POLICY in answer.headers.values()
        return answer.status_code, answer.headers["Content-Type"], bytes(answer.body)

    assert get("/") == get("/index.html") == (200, "text/html; charset=utf-8", b"<p>")
    assert get("/lib/x.js?v=1")[1:] == ("text/javascript; charset=utf-8", b"1")
    assert get("/lib/y.wasm")[1] == "application/wasm"
    for path in ("/.hidden", "/../keys", "/lib/../../keys", "/lib", "/lib/", "/nothing"):
        assert get(path)[0] == http.HTTPStatus.NOT_FOUND


def a_claim() -> Claims:
    return issue(Ed25519PrivateKey.generate(), "client", "alice", "read", "*", 100).claims


def test_a_credential_is_listed_then_revoked_for_good() -> None:
    issued = CredentialRegistry(MemoryRegister())
    claims = a_claim()
    assert issued.find(claims.id) is None
    made = issued.add(claims, 5.0)
    assert issued.find(claims.id) == made and list(issued.all()) == [made]
    assert [made.invalid_because(now) for now in (99, 100)] == ["", "expired"]
    assert issued.revoke(claims.id, 7.0).invalid_because(0) == "revoked"
    assert issued.revoke(claims.id, 8.0).revoked == 7.0
    with pytest.raises(NotFound):
        issued.revoke("0" * 24, 9.0)


def test_names_are_kept_beside_credentials() -> None:
    issued = CredentialRegistry(MemoryRegister())
    issued.keep_name("5e" * 12, "work")
    issued.keep_name("5e" * 12, "work")
    assert issued.name_of("5e" * 12) == "work" and issued.name_of("5f" * 12) is None and list(issued.all()) == []


def test_concurrent_revocations_revoke_once() -> None:
    issued = CredentialRegistry(MemoryRegister())
    claims = a_claim()
    issued.add(claims, 1.0)
    threads = [threading.Thread(target=issued.revoke, args=(claims.id, float(at))) for at in range(2, 10)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = issued.find(claims.id)
    assert found is not None and found.revoked is not None


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"v":1,"claims":"e30","created":1,"revoked":null}'])
def test_a_damaged_credential_cell_admits_no_bearer(data: bytes) -> None:
    register = MemoryRegister()
    register.write(Swap("c." + "0" * 24, data, None))
    with pytest.raises(LeaseUnreadable):
        CredentialRegistry(register).find("0" * 24)


@pytest.mark.parametrize(
    ("url", "beside"),
    [
        ("sqlite:///var/l.db", "sqlite:///var/l.db.relay"),
        ("s3://b/p?endpoint=http://h:1", "s3://b/p/relay?endpoint=http://h:1"),
        ("s3://b?endpoint=http://h:1", "s3://b/relay?endpoint=http://h:1"),
        ("etcd://a:1,b:2/p", "etcd://a:1,b:2/p/relay"),
        ("etcd://a:1", "etcd://a:1/cmdop-migrate/relay"),
    ],
)
def test_the_register_beside_the_leases(url: str, beside: str) -> None:
    assert sibling(url, "relay") == beside


def test_lease_and_credential_registers_are_separate(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/lease.db"
    leases, beside = open_register(url), open_register(sibling(url, "relay"))
    CredentialRegistry(beside).keep_name("5e" * 12, "work")
    assert list(leases.sessions()) == [] and list(beside.sessions()) == ["n." + "5e" * 12]
    leases.close()
    beside.close()


def test_the_certificate_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(certificate.self_signed(tmp_path / "r"))) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(made)) == 1 and os.stat(made[0]).st_mode & 0o777 == 0o600
    pin = certificate.pin_of(made[0])
    assert len(pin) == 64 and certificate.pin_of(certificate.self_signed(tmp_path / "r")) == pin
    assert certificate.server_context(made[0], None).minimum_version >= ssl.TLSVersion.TLSv1_2
    (tmp_path / "empty").write_text("")
    with pytest.raises(BadConfig):
        certificate.server_context(tmp_path / "empty", None)
    with pytest.raises(BadConfig):
        certificate.pin_of(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0:7443", ("0.0.0.0", 7443)), ("[::1]:1", ("::1", 1)), ("name:65535", ("name", 65535))],
)
def test_addresses_to_listen_on(text: str, address: tuple[str, int]) -> None:
    assert flow.address(text) == address


@pytest.mark.parametrize("text", ["", "7443", ":7443", "a:b", "a:65536", "::1:7443", "a:-1"])
def test_invalid_listen_addresses_are_refused(text: str) -> None:
    with pytest.raises(Usage):
        flow.address(text)
