"""A real relay process on loopback, with TLS, and real WebSockets against it: who is let in, who is not, who notices."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import random
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.exceptions import ConnectionClosed, InvalidStatus

from cmdop_migrate.gateway import credentials as gateway_credentials
from cmdop_migrate.host import resources
from cmdop_migrate.relay import certificate, credentials
from cmdop_migrate.relay.credentials import Claims, Credential, b64
from cmdop_migrate.relay.frames import HEADER_SIZE, PAYLOAD_MAX, Frame, Kind, encode, with_credit
from tests.support.host import until
from tests.support.relay_server import PLACE, SESSION, ARelay, Dialer, a_relay, again, insecure

OTHER = "0f" * 12
STRANGER = "127.0.0.2"  # what fails from here is not held against the others


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ARelay]:
    """One for all tests that leave it alive; each takes addresses and sessions of its own."""
    with a_relay(tmp_path_factory.mktemp("relay")) as one:
        yield one


@pytest.fixture
def own_relay(tmp_path: Path) -> Iterator[ARelay]:
    with a_relay(tmp_path) as one:
        yield one


class Pair:
    """A host and a client that keep exchanging data, to prove that they are not disturbed."""

    def __init__(self, relay: ARelay, session: str) -> None:
        self.session = session
        relay.hold(session, "host-a", 3)
        self.host = relay.dial(relay.host_credential("host-a"))
        assert self.host.register(session, 3).kind is Kind.REGISTERED
        self.client = relay.dial(relay.client_credential())
        self.client.open(session)
        assert self.client.expect(Kind.STATUS).text("state") == "routed"
        self.channel = self.host.expect(Kind.OPEN).channel
        self.seq = 0

    def echo(self) -> float:
        """One word there and back; how long it took."""
        begin = time.monotonic()
        word = os.urandom(8)
        self.client.data(1, self.seq, word, self.session)
        assert self.host.expect(Kind.DATA).payload == word
        self.host.data(self.channel, self.seq, word[::-1], self.session, 3)
        assert self.client.expect(Kind.DATA).payload == word[::-1]
        self.seq += 1
        return time.monotonic() - begin

    def close(self) -> None:
        self.host.close()
        self.client.close()


@pytest.fixture
def pair(relay: ARelay) -> Iterator[Pair]:
    one = Pair(relay, os.urandom(12).hex())
    one.echo()
    yield one
    one.echo()  # the test has not disturbed them
    one.close()


def a_session(relay: ARelay, name: str = "work", token: int = 1) -> tuple[str, Dialer]:
    """One that is routed, and its host."""
    session = os.urandom(12).hex()
    relay.hold(session, "host-a", token)
    host = relay.dial(relay.host_credential("host-a"))
    assert host.register(session, token, name).kind is Kind.REGISTERED
    return session, host


# Who is let in


def tampered(made: Credential, **changed: object) -> dict[str, str]:
    """HELLO with claims that say more than was signed."""
    table = {**{name: getattr(made.claims, name) for name in Claims.__slots__}, **changed}
    return {"claims": b64(Claims(**table).to_bytes())}  # type: ignore[arg-type]


def test_invalid_credentials_are_refused_without_a_reason_and_recorded(relay: ARelay, pair: Pair) -> None:
    good = relay.client_credential()
    foreign = credentials.issue(Ed25519PrivateKey.generate(), "client", "alice", "admin", "*", None)
    lies = [
        (good, tampered(good, role="admin")),
        (good, tampered(good, sessions="**")),
        (good, {"signature": b64(bytes(64))}),
        (good, {"proof": b64(bytes(64))}),
        (good, {"proof": relay.client_credential().hello(bytes(32))["proof"]}),
        (good, {"claims": "!"}),
        (foreign, {}),
    ]
    whys = set()
    for number, (credential, changed) in enumerate(lies):
        answer = relay.hello(credential, f"127.0.1.{number + 1}", **changed).refused()
        assert answer["code"] == "not_admitted", (changed, answer)
        whys.add(answer["why"])
        assert relay.logged("not_admitted")["address"].startswith("127.0.1.")
    assert len(whys) == 1  # what exactly was wrong is for the log
    text = (relay.at.state / "events.jsonl").read_text()
    assert b64(good.signature) not in text and b64(good.seed.reveal()) not in text


def test_expired_revoked_and_unlisted_credentials_are_refused(relay: ARelay, pair: Pair) -> None:
    short = relay.client_credential(seconds=1.0)
    revoked = relay.client_credential()
    gateway_credentials.revoke(relay.config, revoked.claims.id[:10])
    signer = resources.open_keys(relay.config).relay_signer
    unlisted = credentials.issue(
        signer, "client", "alice", "admin", "*", None
    )  # signed with a stolen key, but not listed in the store
    time.sleep(max(0.0, (short.claims.expires or 0) - time.time()))
    for credential, word in ((short, "expired"), (revoked, "revoked"), (unlisted, "not listed")):
        answer = relay.hello(again(credential), "127.0.2.1").refused()
        assert answer["code"] == "not_admitted" and word in answer["why"]
        assert credential.claims.id in relay.logged("not_admitted")["who"]


def test_a_revoked_credentials_open_connections_end_within_seconds(relay: ARelay, pair: Pair) -> None:
    session, host = a_session(relay)
    credential = relay.client_credential("mallory")
    client = relay.dial(credential)
    client.open(session)
    client.expect(Kind.STATUS)
    host.expect(Kind.OPEN)
    relay.at.ok("relay", "token", "revoke", credential.claims.id)
    assert client.refused(within=8)["code"] == "not_admitted"
    assert host.expect(Kind.CLOSE).text("code") == "gone"


def test_an_open_connection_ends_when_its_credential_does(relay: ARelay, pair: Pair) -> None:
    client = relay.dial(relay.client_credential(seconds=2.0))
    assert "expired" in client.refused(within=10)["why"]


def test_forbidden_and_unknown_sessions_are_indistinguishable(relay: ARelay, pair: Pair) -> None:
    session, _ = a_session(relay, "secret")
    client = relay.dial(relay.client_credential(sessions="web-*"))
    answers = []
    for number, wanted in enumerate((session, OTHER)):
        client.open(wanted, number + 1)
        frame = client.expect(Kind.REFUSED)
        answers.append((frame.table(), frame.token, frame.seq))
    assert answers[0] == answers[1] and answers[0][0]["code"] == "no_session"
    client.say(Kind.LIST, {})
    assert client.expect(Kind.LISTING).table() == {"sessions": [], "more": False}
    assert relay.events("relay_open_refused", "no_session")[-1]["actor"] == "alice"


def test_a_stolen_name_without_its_credential_gets_nothing(relay: ARelay, pair: Pair) -> None:
    session = os.urandom(12).hex()
    relay.hold(session, "host-a", 1)
    other = relay.host_credential("host-b")
    thief = relay.hello(other, "127.0.3.1", **tampered(other, name="host-a"))
    assert thief.refused()["code"] == "not_admitted"
    honest = relay.dial(other)  # a host of the fleet, that claims what another holds
    answer = honest.register(session, 1)
    assert answer.kind is Kind.REFUSED and answer.text("code") == "not_confirmed"
    client = relay.dial(relay.client_credential())
    client.say(Kind.REGISTER, {"name": "work"}, session, 1)
    assert client.refused()["code"] == "protocol"


# The fence


def test_a_fenced_host_gets_no_client(relay: ARelay, pair: Pair) -> None:
    session, old = a_session(relay, token=1)
    client = relay.dial(relay.client_credential())
    client.open(session)
    client.expect(Kind.STATUS)
    old.expect(Kind.OPEN)
    relay.hold(session, "host-b", 2)
    new = relay.dial(relay.host_credential("host-b"))
    assert new.register(session, 2).kind is Kind.REGISTERED
    assert client.expect(Kind.CLOSE).text("code") == "moved"
    assert old.expect(Kind.CLOSE).text("code") == "moved" and old.expect(Kind.REFUSED).text("code") == "fenced"
    assert old.register(session, 1).text("code") == "fenced"
    client.open(session, 2)
    assert client.expect(Kind.STATUS).token == 2
    assert new.expect(Kind.OPEN).session == session and old.is_quiet()


def test_route_is_removed_when_its_host_loses_the_lease(relay: ARelay, pair: Pair) -> None:
    session = os.urandom(12).hex()
    relay.hold(session, "host-a", 1, ttl=1.5)
    host = relay.dial(relay.host_credential("host-a"))
    host.register(session, 1)
    client = relay.dial(relay.client_credential())
    client.open(session)
    client.expect(Kind.STATUS)
    host.expect(Kind.OPEN)
    relay.hold(session, "host-a", 1, state="parked")
    assert client.expect(Kind.CLOSE, within=5).text("code") == "lost"
    client.open(session, 2)
    assert client.expect(Kind.STATUS).text("state") == "waiting"


def test_a_stopped_relay_does_not_route_by_old_confirmations(own_relay: ARelay) -> None:
    """As after a laptop's suspend, or on a machine that swaps: the session has moved meanwhile."""
    relay = own_relay
    relay.hold(SESSION, "host-a", 1, ttl=1.0)
    old, client = relay.dial(relay.host_credential("host-a")), relay.dial(relay.client_credential())
    old.register()
    assert relay.process is not None
    relay.process.send_signal(signal.SIGSTOP)
    client.open()
    relay.hold(SESSION, "host-b", 2)
    time.sleep(1.6)
    relay.process.send_signal(signal.SIGCONT)
    assert client.expect(Kind.STATUS).table() == {"state": "waiting", "host": None, "to": None, "token": 2}
    assert old.expect(Kind.REFUSED).text("code") in ("fenced", "unavailable") and old.is_quiet()


def test_a_move_as_a_client_sees_it(relay: ARelay, pair: Pair) -> None:
    session, old = a_session(relay, "web-7", token=1)
    client = relay.dial(relay.client_credential(sessions="web-*"))
    client.open(session)
    assert client.expect(Kind.STATUS).text("host") == "host-a"
    old.say(Kind.LEAVE, {"state": "moving", "to": "host-b"}, session, 1)
    assert client.expect(Kind.CLOSE).text("code") == "moved"
    client.open(session, 2)
    status = client.expect(Kind.STATUS).table()
    assert (status["state"], status["to"]) == ("moving", "host-b")
    relay.hold(session, "host-b", 2)
    new = relay.dial(relay.host_credential("host-b"))
    new.register(session, 2, "web-7")
    status = client.expect(Kind.STATUS).table()
    assert (status["state"], status["host"], status["token"]) == ("routed", "host-b", 2)
    assert new.expect(Kind.OPEN).session == session


# Floods and nonsense


def test_a_flood_of_connections_does_not_disturb_others(relay: ARelay, pair: Pair) -> None:
    opened = []
    try:
        for _ in range(150):
            with contextlib.suppress(OSError):  # the relay aborts connections over the limit
                plain = socket.create_connection((PLACE, relay.port), 5, (STRANGER, 0))
                opened.append(insecure().wrap_socket(plain))
        pair.echo()
        assert relay.logged("full")["address"] == STRANGER
        assert metric(relay, "connections") < 120
        relay.dial(relay.client_credential()).close()  # others are let in
    finally:
        for one in opened:
            one.close()


def test_an_address_with_many_failures_is_throttled(relay: ARelay, pair: Pair) -> None:
    good = relay.client_credential()
    answers = []
    for _ in range(12):
        try:
            answers.append(relay.hello(good, "127.0.4.1", proof=b64(bytes(64))).refused()["code"])
        except InvalidStatus as error:
            answers.append(str(error.response.status_code))
    assert answers[:10] == ["not_admitted"] * 10 and answers[-1] == "429"
    assert relay.logged("throttled")["address"] == "127.0.4.1"
    relay.dial(good, "127.0.4.2").close()  # from another address the same credential is still valid


def test_a_frame_that_is_too_big_ends_its_connection_only(relay: ARelay, pair: Pair) -> None:
    client = relay.dial(relay.client_credential(), STRANGER)
    client.send_raw(bytes(1 << 20))
    with pytest.raises(ConnectionClosed) as closed:
        client.next()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
    assert relay.logged("too_big")["who"] == "alice"
    stranger = relay.knock("127.0.5.1")
    stranger.expect(Kind.CHALLENGE)
    with contextlib.suppress(ConnectionClosed):
        stranger.send_raw(bytes(1 << 20))
    assert stranger.refused() == {}


def test_malformed_frames_end_their_connection_only(relay: ARelay, pair: Pair) -> None:
    random.seed(6)
    session, host = a_session(relay)
    as_client, as_host = relay.client_credential("fuzz"), relay.host_credential("host-f")
    good = encode(Frame(Kind.DATA, session, 1, 0, 1, b"x" * 40))
    ended = 0
    for number in range(30):
        dialer = relay.dial(as_client if number % 2 else as_host, f"127.0.6.{number + 1}")
        for _ in range(20):
            data = bytearray(random.choice([good, random.randbytes(random.randrange(100)), good[:HEADER_SIZE]]))
            for _ in range(random.randrange(4)):
                if data:
                    data[random.randrange(min(len(data), HEADER_SIZE))] = random.choice([0, 1, 2, 5, 10, 255])
            with contextlib.suppress(ConnectionClosed):
                dialer.send_raw(bytes(data) if random.random() > 0.02 else "text")
        ended += dialer.refused(within=3).get("code") == "protocol"
        if number % 10 == 0:
            assert pair.echo() < 5
    assert ended > 24 and relay.logged("protocol")
    assert host.is_quiet()
    assert relay.process is not None and relay.process.poll() is None


def test_silent_and_non_http_connections_are_ended(relay: ARelay, pair: Pair) -> None:
    plain = socket.create_connection((PLACE, relay.port), 10, ("127.0.7.1", 0))
    with insecure().wrap_socket(plain) as odd:
        odd.sendall(b"\x16\x03 this is not HTTP\r\n\r\n")
        odd.settimeout(10)
        assert b"400" in odd.recv(100) or not odd.recv(100)
    silent = relay.knock("127.0.7.2")
    silent.expect(Kind.CHALLENGE)
    assert silent.refused(within=9) == {}  # after the time a dialer has to say who it is
    assert relay.logged("silent")["address"] == "127.0.7.2"


def test_a_slow_client_costs_one_window_and_delays_no_other(relay: ARelay, pair: Pair) -> None:
    session, host = a_session(relay)
    slow = relay.dial(relay.client_credential())
    slow.open(session)
    slow.expect(Kind.STATUS)
    channel = host.expect(Kind.OPEN).channel
    piece, window = bytes(PAYLOAD_MAX), 256 << 10
    for seq in range(window // len(piece)):
        host.data(channel, seq, piece, session, 1)
    pair.echo()
    host.data(channel, 4, b"one more", session, 1)  # without credit
    assert host.expect(Kind.CLOSE).text("code") == "protocol"
    received = 0
    while (frame := slow.next()).kind is Kind.DATA:
        received += len(frame.payload)
    assert received == window and frame.text("code") == "protocol"


def test_credit_lets_it_flow(relay: ARelay, pair: Pair) -> None:
    session, host = a_session(relay)
    client = relay.dial(relay.client_credential())
    client.open(session)
    client.expect(Kind.STATUS)
    channel = host.expect(Kind.OPEN).channel
    for seq in range(40):  # ten windows
        host.data(channel, seq, bytes(PAYLOAD_MAX), session, 1)
        assert client.expect(Kind.DATA).seq == seq
        client.send(with_credit(1, PAYLOAD_MAX))
        assert host.expect(Kind.CREDIT).credit() == PAYLOAD_MAX


# Pages


def get(relay: ARelay, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPSConnection(PLACE, relay.port, timeout=10, context=insecure())
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def metric(relay: ARelay, name: str) -> float:
    lines = get(relay, "/metrics")[1].splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"cmdop_migrate_relay_{name} ")))


def test_http_serves_health_metrics_and_page_only(relay: ARelay, pair: Pair) -> None:
    status, body, headers = get(relay, "/healthz")
    assert (status, body) == (200, "ok\n") and "default-src 'none'" in headers["Content-Security-Policy"]
    assert metric(relay, "routes") >= 1 and metric(relay, "hosts") >= 1
    assert get(relay, "/")[0] == 200  # the page, or how to get it
    for path in ("/../keys", "/%2e%2e/keys", "/healthz/x", "//etc/passwd"):
        assert get(relay, path)[0] == 404, path


@pytest.mark.parametrize(("origin", "status"), [("https://evil.example", 403), (None, 101), ("own", 101)])
def test_pages_of_other_hosts_may_not_connect(relay: ARelay, pair: Pair, origin: str | None, status: int) -> None:
    named = f"https://{PLACE}:{relay.port}" if origin == "own" else origin
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": "13"}
    more = {"Origin": named} if named else {}
    key = {"Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    connection = http.client.HTTPSConnection(PLACE, relay.port, timeout=10, context=insecure())
    try:
        every = {name.replace("_", "-"): value for name, value in {**headers, **more, **key}.items()}
        connection.request("GET", "/", headers=every)
        assert connection.getresponse().status == status
    finally:
        connection.close()


# Its own life


def test_killed_and_restarted_hosts_and_clients_come_back(own_relay: ARelay) -> None:
    relay = own_relay
    as_host, as_client = relay.host_credential("host-a"), relay.client_credential(sessions="wor*")
    relay.hold(SESSION, "host-a", 5)
    host, client = relay.dial(as_host), relay.dial(as_client)
    host.register(token=5)
    client.open()
    client.expect(Kind.STATUS)
    until(lambda: gateway_credentials.open_registry(relay.config).name_of(SESSION) == "work", 5, "its name is kept")
    before = relay.facts
    relay.stop(signal.SIGKILL)
    with pytest.raises(ConnectionClosed):
        client.next()
    relay.start()
    assert relay.facts["pin"] == before["pin"] and relay.facts["identity"] == before["identity"]
    client = relay.redial(as_client)
    client.open()  # before its host is back: the name it is allowed by is known from the store
    assert client.expect(Kind.STATUS).text("state") == "waiting"
    stale = relay.redial(relay.host_credential("host-z"))
    assert stale.register(token=4).text("code") == "fenced"  # the new relay never saw token 5, the store did
    host = relay.redial(as_host)
    assert host.register(token=5).kind is Kind.REGISTERED
    assert client.expect(Kind.STATUS).text("state") == "routed"
    assert host.expect(Kind.OPEN).session == SESSION


def test_own_certificate_and_own_page(own_relay: ARelay, tmp_path: Path) -> None:
    relay = own_relay
    relay.stop()
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("<title>sessions</title>")
    other = certificate.self_signed(tmp_path / "other")
    before = relay.facts["pin"]
    relay.start("--cert", str(other), "--assets", str(tmp_path / "page"))
    shown = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((PLACE, relay.port)))
    assert relay.facts["pin"] == hashlib.sha256(shown).hexdigest() == certificate.pin_of(other) != before
    status, body, headers = get(relay, "/")
    assert (status, body) == (200, "<title>sessions</title>") and headers["Content-Type"].startswith("text/html")
    relay.dial(relay.client_credential()).close()


def test_relay_stops_on_sigterm_with_a_closing_handshake(own_relay: ARelay) -> None:
    client = own_relay.dial(own_relay.client_credential())
    assert own_relay.stop(signal.SIGTERM) == 0
    with pytest.raises(ConnectionClosed) as closed:
        client.next()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
    assert own_relay.events("relay_stopped")


def test_routes_stay_and_none_is_added_while_the_store_is_unreachable(own_relay: ARelay) -> None:
    relay = own_relay
    relay.hold(SESSION, "host-a", 1, ttl=30.0)
    relay.hold(OTHER, "host-a", 1)
    host, client = relay.dial(relay.host_credential("host-a")), relay.dial(relay.client_credential())
    host.register()
    unknown = relay.client_credential()
    for name in ("lease.db", "lease.db.relay"):
        (relay.at.state / name).rename(relay.at.state / f"{name}.away")
        (relay.at.state / name).mkdir()  # no database can be opened there
    client.open()
    assert client.expect(Kind.STATUS).text("state") == "routed"
    host.expect(Kind.OPEN)
    assert host.register(OTHER).text("code") == "unavailable"
    assert relay.hello(unknown).refused()["code"] == "unavailable"
    assert get(relay, "/healthz")[0] == 503
    client.data(1, 0, b"still there")
    assert host.expect(Kind.DATA).payload == b"still there"
    for name in ("lease.db", "lease.db.relay"):
        (relay.at.state / name).rmdir()
        (relay.at.state / f"{name}.away").rename(relay.at.state / name)
    assert host.register(OTHER).kind is Kind.REGISTERED
    until(lambda: get(relay, "/healthz")[0] == 200, 10, "it is healthy again")
    relay.dial(unknown).close()
