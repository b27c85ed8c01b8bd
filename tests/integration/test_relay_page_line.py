"""What the page sends again, and what it says was undone: a host in Python that answers as no honest one would have to."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cmdop_migrate.gateway import credentials as gateway_credentials
from cmdop_migrate.holder import protocol
from cmdop_migrate.host import resources
from cmdop_migrate.relay import credentials, e2e, http
from cmdop_migrate.relay.credentials import Credential
from cmdop_migrate.relay.frames import Frame, Kind
from tests.support.browser import Browser, Page, a_browser
from tests.support.patience import bound
from tests.support.relay_server import SESSION, ARelay, Dialer, a_relay

ROWS = "[...document.querySelectorAll('.xterm-rows > div')].map((row) => row.textContent.trimEnd()).join('\\n')"
STATUS = "document.getElementById('status').textContent"


class Host:
    """One incarnation after the other, each with one channel to the page at a time."""

    def __init__(self, relay: ARelay, forged: bool = False) -> None:
        self._relay = relay
        self._dialer: Dialer = relay.dial(relay.host_credential("host-a"))
        signer = resources.open_keys(relay.config).relay_signer
        self._signer = Ed25519PrivateKey.generate() if forged else signer
        self.token = 0
        self._heard: list[dict[str, Any]] = []

    def live(self, token: int) -> None:
        self._relay.hold(SESSION, "host-a", token)
        self.token = token
        self._dialer.say(Kind.REGISTER, {"name": "scripted", "state": "running"}, SESSION, token)

    def greet(self, who: Credential) -> None:
        """The next channel to this incarnation; one to that before it may have come first."""
        frame = self._expect(Kind.OPEN)
        while frame.token != self.token:
            frame = self._expect(Kind.OPEN)
        self._number, self._seq, self._decoder = frame.channel, 0, protocol.Decoder()
        handshake = credentials.unb64(frame.text("handshake"))
        key = credentials.unb64(who.claims.key)
        self._side = e2e.HostSide(SESSION, self.token, "host-a", self._signer.sign, key, handshake)
        self._data(self._side.first)

    def accept(self, who: Credential) -> None:
        self.greet(who)
        self._side.accept(self._expect(Kind.DATA).payload)

    def hear(self, op: str) -> dict[str, Any]:
        """The next request of this name; resizes come when they come."""
        while True:
            while self._heard:
                one = self._heard.pop(0)
                if one.get("op") == op:
                    return one
                assert one.get("op") == "resize", one
            for _, payload in self._decoder.feed(self._side.open(self._expect(Kind.DATA).payload)):
                self._heard.append(protocol.parse_control(payload))

    def typed(self, at: int, text: str) -> None:
        """Expect all of this, in any pieces, from number `at` on."""
        got, end = "", time.monotonic() + bound(10)
        while len(got) < len(text) and time.monotonic() < end:
            one = self.hear("type")
            assert one["at"] == at + len(got), one
            got += one["data"]
        assert got == text

    def say(self, **message: Any) -> None:
        self._data(self._side.seal(protocol.control(message)))

    def attached(self, start: int, end: int, **more: Any) -> dict[str, Any]:
        asked = self.hear("attach")
        self.say(re="attach", start=start, end=end, modes=[7, 25], **{"since": 0, "applied": 0, **more})
        return asked

    def print(self, seq: int, text: str) -> None:
        self._data(self._side.seal(protocol.output(seq, text.encode())))

    def close(self, code: str = "lost") -> None:
        self._dialer.say(Kind.CLOSE, {"code": code, "why": "a test"}, SESSION, self.token, self._number)

    def leave(self) -> None:
        self._dialer.say(Kind.LEAVE, {"state": "moving", "to": "host-b"}, SESSION, self.token)

    def is_left_alone(self) -> bool:
        """The page has closed the channel, and says no more."""
        self._expect(Kind.CLOSE)
        return self._dialer.is_quiet()

    def _data(self, payload: bytes) -> None:
        self._dialer.data(self._number, self._seq, payload, SESSION, self.token)
        self._seq += 1

    def _expect(self, kind: Kind) -> Frame:
        while True:
            frame = self._dialer.next()
            if frame.kind is kind:
                return frame
            # REFUSED: the relay has seen the new token before we have said it
            assert frame.kind in (Kind.OPEN, Kind.CLOSE, Kind.CREDIT, Kind.REGISTERED, Kind.REFUSED), frame


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ARelay]:
    place = tmp_path_factory.mktemp("scripted")
    with a_relay(place) as made:
        yield made


@pytest.fixture(scope="module")
def browser(relay: ARelay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    certificate = relay.at.state / "relay" / "self-signed.pem"
    with a_browser(tmp_path_factory.mktemp("browser"), relay.port, certificate) as made:
        yield made


@pytest.fixture
def page(relay: ARelay, browser: Browser) -> Iterator[Page]:
    made = browser.page(900, 500)
    yield made
    assert made.complaints == []
    made.go("about:blank")


def come(page: Page, browser: Browser, who: Credential) -> None:
    page.go(f"{browser.url}#/s/{SESSION}")
    page.wait("!document.getElementById('sign-in').hidden")
    page.fill("#credential", who.text())
    page.click("#sign-in-form button.main")


def shows(page: Page, text: str) -> None:
    page.wait(f"({ROWS}).includes({text!r})")


def test_page_input_and_output_exactly_once_over_broken_channels(relay: ARelay, browser: Browser, page: Page) -> None:
    who, host = relay.client_credential(), Host(relay)
    host.live(1)
    come(page, browser, who)
    host.accept(who)
    stream = host.attached(start=0, end=5)["stream"]
    host.print(0, "hello")
    shows(page, "hello")
    page.type("abc")
    host.typed(0, "abc")
    host.close()  # it is not known whether it arrived

    host.accept(who)
    asked = host.attached(start=0, end=9, applied=2)
    assert (asked["from"], asked["stream"]) == (5, stream)
    host.typed(2, "c")  # what did not, and nothing else
    host.print(3, "lo two")  # the first two it has
    shows(page, "hello two")
    host.say(event="applied", at=3)

    host.leave()
    page.wait(f"{STATUS}.startsWith('moving to host-b')")
    page.type("d")
    host.live(2)
    host.accept(who)
    assert host.attached(start=0, end=9, since=9, applied=3)["from"] == 9
    host.typed(3, "d")
    host.say(event="applied", at=4)
    host.say(event="lost", bytes=91, **{"from": 9})
    host.print(100, " late")
    shows(page, "91 bytes of output were too much to keep")
    shows(page, " late")
    page.wait(f"{STATUS} === 'on host-a, token 2'")


def test_page_reports_what_a_dead_host_has_undone(relay: ARelay, browser: Browser, page: Page) -> None:
    who, host = relay.client_credential(), Host(relay)
    host.live(3)
    come(page, browser, who)
    host.accept(who)
    host.attached(start=0, end=4)
    host.print(0, "past")
    shows(page, "past")
    page.type("xyz")
    host.typed(0, "xyz")
    host.say(event="applied", at=3)
    host.close()

    host.live(4)  # from a checkpoint of before: of "past" there is "pa", and of what was typed "x"
    host.accept(who)
    assert host.attached(start=0, end=2, error="range")["from"] == 4
    shows(page, "2 bytes of its output were undone")
    assert host.attached(start=0, end=2, since=2, applied=1)["from"] == 2
    shows(page, "2 bytes you typed were undone")
    page.type("q")
    host.typed(1, "q")  # it resumes from there
    host.say(event="refused", why="gap", bytes=1, at=0)
    host.typed(0, "q")
    host.say(event="applied", at=1)
    host.print(2, "new")
    shows(page, "new")


def test_page_rejects_a_host_of_another_fleet(relay: ARelay, browser: Browser, page: Page) -> None:
    who, host = relay.client_credential(), Host(relay, forged=True)
    host.live(5)
    come(page, browser, who)
    host.greet(who)
    page.wait(f"{STATUS}.includes('not from a host of this fleet')")
    page.type("secret")
    assert host.is_left_alone()


@pytest.fixture
def elsewhere(browser: Browser, tmp_path: Path) -> Iterator[str]:
    """The page on another server, as docs/operations/relay-page.md says."""
    copy = tmp_path / "web"
    shutil.copytree(http.OWN, copy)
    index = (copy / "index.html").read_text()
    assert 'name="relay" content="same-origin"' in index
    (copy / "index.html").write_text(index.replace('content="same-origin"', 'content="credential"'))
    with ThreadingHTTPServer((browser.net.gateway, 0), partial(Quiet, directory=copy)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{browser.net.gateway}:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        return


def test_page_of_a_configured_origin_may_connect(relay: ARelay, browser: Browser, elsewhere: str) -> None:
    host = Host(relay)
    host.live(6)
    where = gateway_credentials.RelayAddress(browser.url.replace("https:", "wss:"))
    who = gateway_credentials.create_client(relay.config, "alice", "execute", "*", 600, where)
    page = browser.page()
    page.go(elsewhere)
    page.wait("!document.getElementById('sign-in').hidden")
    page.fill("#credential", who.text())
    page.click("#sign-in-form button.main")
    relay.logged("origin")
    assert page.eval("document.getElementById('link').textContent") == "connecting …"
    relay.stop()
    relay.start("--origin", elsewhere)
    page.wait("document.getElementById('link').textContent === ''", 30)
    Host(relay).live(6)
    page.wait("document.querySelector('#sessions .name')?.textContent === 'scripted'", 20)
    page.go("about:blank")
