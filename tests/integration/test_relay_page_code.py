"""The page's own code in a real browser, against the Python of both other ends: same frames, same seals, same words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cmdop_migrate.holder import protocol
from cmdop_migrate.relay import credentials, e2e, frames
from cmdop_migrate.relay.frames import Frame, Kind
from cmdop_migrate.session import screen
from tests.support.browser import Page, a_browser
from tests.support.relay_server import SESSION, a_relay

FLEET = Ed25519PrivateKey.generate()
PAST_2_32 = 2**40 + 7


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    place = tmp_path_factory.mktemp("page")
    (place / "relay").mkdir()
    with a_relay(place / "relay") as relay:
        certificate = relay.at.state / "relay" / "self-signed.pem"
        with a_browser(place / "browser", relay.port, certificate) as browser:
            made = browser.page()
            made.go(browser.url)
            for name in ("frames", "sealed", "credential", "wire", "replay", "chart"):
                made.eval(f"import('/{name}.js').then((found) => {{ globalThis.{name} = found; }})")
            made.eval("import('/vendor/libsodium-wrappers.mjs').then((found) => found.default.ready)")
            made.eval(
                "globalThis.bytes = (text) => Uint8Array.from(text.match(/../g) ?? [], (one) => parseInt(one, 16))"
            )
            yield made
            assert made.complaints == []


def js(value: Any) -> str:
    return json.dumps(value)


def as_bytes(data: bytes) -> str:
    return f"bytes({js(data.hex())})"


FRAMES = [
    Frame(Kind.BEAT),
    Frame(Kind.DATA, SESSION, 3, 9, 2**32 - 1, bytes(range(256))),
    Frame(Kind.OPEN, "00" * 11 + "01", PAST_2_32, PAST_2_32, 1, b"{}"),
    frames.with_table(Kind.STATUS, {"state": "moving", "to": "wirt-ü", "host": None}, SESSION, 7, 4),
    frames.with_credit(5, 2**31 + 3, SESSION, 7),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda one: one.kind.name)
def test_frames_are_the_same_bytes(page: Page, frame: Frame) -> None:
    data = frames.encode(frame)
    fields = {"kind": frame.kind, "session": frame.session, "token": frame.token, "seq": frame.seq}
    fields["channel"] = frame.channel
    page.eval(f"globalThis.read = frames.decode({as_bytes(data)})")
    assert page.eval("({...read, payload: frames.hex(read.payload)})") == {**fields, "payload": frame.payload.hex()}
    again = f"frames.hex(frames.encode({{...{js(fields)}, payload: {as_bytes(frame.payload)}}}))"
    assert page.eval(again) == data.hex()
    if frame.kind is Kind.STATUS:
        assert page.eval("frames.table(read)") == frame.table()
    if frame.kind is Kind.CREDIT:
        assert page.eval("frames.credit(read)") == frame.credit()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1" * (frames.HEADER_SIZE - 1),
        b"\2\x0f" + bytes(32),  # another version
        b"\1\x63" + bytes(32),  # an unknown kind
        b"\1\x00" + bytes(32),
        b"\1\x0f" + bytes(16) + b"\xff" * 8 + bytes(8),  # a token that no number holds
        b"\1\x0b" + bytes(32 + frames.PAYLOAD_MAX + 1),
    ],
    ids=["empty", "short", "version", "kind", "kind 0", "number", "long"],
)
def test_invalid_frames_are_refused(page: Page, data: bytes) -> None:
    tried = f"try {{ frames.decode({as_bytes(data)}) }} catch (error) {{ error instanceof frames.FrameError }}"
    assert page.eval(tried) is True


def test_a_credential_is_read_and_proved(page: Page) -> None:
    made = credentials.issue(FLEET, "client", "alice", "execute", "web-*", None, "wss://relay.example")
    page.eval(f"globalThis.known = new credential.Credential({js(made.text() + chr(10))})")
    assert page.eval("known.claims.name + known.relay") == "alicewss://relay.example"
    nonce = bytes(range(32))
    hello = page.eval(f"known.hello({js(credentials.b64(nonce))})")
    claims = credentials.verify_presented(made.fleet, hello["claims"], hello["signature"])
    credentials.verify_hello(claims, nonce, hello["proof"])
    assert made.text()[60:100] not in page.eval("JSON.stringify(known)")


def spoiled() -> list[tuple[str, str]]:
    good = credentials.issue(FLEET, "client", "alice", "read", "*", None)
    other = credentials.issue(Ed25519PrivateKey.generate(), "client", "alice", "admin", "*", None)
    host = credentials.issue(FLEET, "host", "host-a", "host", "*", None)
    late = credentials.issue(FLEET, "client", "alice", "read", "*", 1)
    table = json.loads(credentials.unb64(good.text().removeprefix("cmr1_")))
    mixed = {**table, "claims": credentials.b64(other.claims.to_bytes())}
    theirs = {**table, "seed": credentials.b64(bytes(32))}
    wrapped = [credentials.PREFIX + credentials.b64(json.dumps(one).encode()) for one in (mixed, theirs)]
    return [
        ("hello", "not a credential"), (good.text()[:-30], "damaged"), ("cmr1_", "damaged"), (wrapped[0], "damaged"),
        (wrapped[1], "damaged"), (host.text(), "host's"), (late.text(), "expired"),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "why"), spoiled(), ids=["none", "cut", "empty", "claims", "seed", "host", "expired"])
def test_page_explains_why_a_credential_is_invalid(page: Page, text: str, why: str) -> None:
    said = page.eval(f"try {{ new credential.Credential({js(text)}) }} catch (error) {{ error.message }}")
    assert why in said


class Joined:
    """A client in the page, a host in Python."""

    def __init__(self, page: Page, token: int = 4, lowest: int = 0, fleet: Ed25519PrivateKey = FLEET) -> None:
        self.page, self.token = page, token
        self.bearer = credentials.issue(FLEET, "client", "alice", "execute", "*", None)
        public = FLEET.public_key().public_bytes_raw()
        page.eval(
            f"globalThis.known = new credential.Credential({js(self.bearer.text())});"
            f"globalThis.side = new sealed.ClientSide({js(SESSION)}, {as_bytes(public)}, (words) => known.sign(words), {lowest})"
        )
        handshake = bytes.fromhex(page.eval("frames.hex(side.handshake)"))
        key = credentials.unb64(self.bearer.claims.key)
        self.host = e2e.HostSide(SESSION, token, "host-ä", fleet.sign, key, handshake)

    def answer(self, first: bytes | None = None, token: int | None = None) -> str:
        first = self.host.first if first is None else first
        token = self.token if token is None else token
        said = f"frames.hex(side.answer({as_bytes(first)}, {token}))"
        return str(self.page.eval(f"try {{ {said} }} catch (error) {{ error.constructor.name + error.message }}"))

    def open(self, data: bytes) -> str:
        said = f"frames.hex(side.open({as_bytes(data)}))"
        return str(self.page.eval(f"try {{ {said} }} catch (error) {{ error.constructor.name }}"))


def test_a_channel_is_sealed_between_page_and_host(page: Page) -> None:
    both = Joined(page)
    both.host.accept(bytes.fromhex(both.answer()))
    assert page.eval("side.host") == "host-ä"
    for number in range(3):
        words = bytes([number]) * (number * 9000)
        assert both.open(both.host.seal(words)) == words.hex()
        assert both.host.open(bytes.fromhex(page.eval(f"frames.hex(side.seal({as_bytes(words)}))"))) == words
    data = both.host.seal(b"once")
    altered = data[:-1] + bytes([data[-1] ^ 1])
    assert both.open(altered) == both.open(b"") == "SealError"
    assert both.open(data) == b"once".hex()
    assert both.open(data) == "SealError"  # repeated


def test_page_rejects_other_hosts_sessions_and_older_incarnations(page: Page) -> None:
    assert Joined(page, fleet=Ed25519PrivateKey.generate()).answer().startswith("SealError")
    assert "is superseded" in Joined(page, token=4, lowest=5).answer()
    both = Joined(page)
    assert both.answer(token=5).startswith("SealError")
    swapped = both.host.first.replace("host-ä".encode(), "host-ö".encode())
    assert both.answer(first=swapped).startswith("SealError")
    assert both.answer(first=both.host.first[:-1]).startswith("SealError")


def test_holder_frames_are_decoded_at_any_split(page: Page) -> None:
    stream = (
        protocol.control({"event": "exit", "code": 0})
        + protocol.output(PAST_2_32, b"\x00\xffab")
        + protocol.control({})
    )
    for step in (1, 4, 7, len(stream)):
        pieces = [stream[at : at + step].hex() for at in range(0, len(stream), step)]
        page.eval(
            f"globalThis.decoder = new wire.Decoder(); globalThis.got = {js(pieces)}.flatMap((one) => decoder.feed(bytes(one)))"
        )
        assert page.eval("got.length") == 3
        assert page.eval("wire.parseControl(got[0][1])") == {"event": "exit", "code": 0}
        assert page.eval("[wire.parseOutput(got[1][1])[0], frames.hex(wire.parseOutput(got[1][1])[1])]") == [
            PAST_2_32,
            "00ff6162",
        ]
    asked = {"op": "type", "at": 3, "data": "\x00\x1bé"}
    said = bytes.fromhex(page.eval(f"frames.hex(wire.control({js(asked)}))"))
    assert [protocol.parse_control(payload) for _, payload in protocol.Decoder().feed(said)] == [asked]
    assert page.eval("wire.latin1(bytes('00ff1bc3'))") == "\x00\xff\x1bÃ"


def test_modes_of_a_replay_are_those_of_the_command_line(page: Page) -> None:
    for on in ([7, 25], [], [1, 7, 1049, 2004], [25, 9999]):
        codes = page.eval(f"replay.modeCodes({js(on)})").encode()
        assert sorted(codes.split(b"\x1b")) == sorted(screen.set_modes(on).split(b"\x1b"))


QUESTIONS = [
    "\x1b[c", "\x1b[>c", "\x1b[=c", "\x1b[5n", "\x1b[6n", "\x1b[?6n", "\x1b[18t", "\x1b[?2026$p", "\x1b[4$p", "\x1b[>q",
    "\x1b]4;1;?\x07", "\x1b]10;?\x1b\\", "\x1b]11;?\x07", "\x1bP$qm\x1b\\", "\x1bP+q544e\x1b\\", "\x1bZ",
]  # fmt: skip


def test_terminal_queries_in_replayed_output_are_not_answered(page: Page) -> None:
    page.eval("import('/vendor/xterm.mjs').then((found) => { globalThis.xterm = found; })")
    page.eval(
        "globalThis.answers = []; globalThis.terminal = new xterm.Terminal({windowOptions: {getWinSizeChars: true}});"
        "terminal.open(document.createElement('div')); terminal.onData((text) => answers.push(text));"
        "globalThis.shown = new replay.Replay(terminal)"
    )
    old, new = "".join(QUESTIONS).encode() + b"old", b"\x1b[6n"
    page.eval(f"shown.begin({1000 + len(old)})")
    # Cut in the middle of a question, and of one piece with what is new.
    page.eval(f"shown.write(1000, {as_bytes(old[:20])}).then(() => shown.write(1020, {as_bytes(old[20:] + new)}))")
    assert page.eval("answers") == ["\x1b[1;4R"]
    assert page.eval("terminal.buffer.active.getLine(0).translateToString(true)") == "old"


def test_every_file_of_the_page_is_served_with_its_policy(page: Page) -> None:
    web = Path(frames.__file__).with_name("web")
    for file in sorted(web.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            path = "/" + file.relative_to(web).as_posix()
            got = page.eval(
                f"fetch({js(path)}).then(async (answer) => [answer.status, answer.headers.get('content-security-policy'),"
                " (await answer.arrayBuffer()).byteLength])"
            )
            assert got[0] == 200 and got[2] == file.stat().st_size, path
            assert "default-src 'none'" in got[1] and "script-src 'self' 'wasm-unsafe-eval'" in got[1], path
            assert "unsafe-eval'" not in got[1].replace("wasm-unsafe-eval'", "")


def test_a_session_without_a_known_name_is_listed(page: Page) -> None:
    """A client waits for it by its id, and no host has registered it yet."""
    rows = [
        {"session": f"{n}" * 24, "name": name, "host": None, "to": None, "state": "waiting", "routed": False}
        | {"token": 1, "clients": 1, "info": {}, "moved": None}
        for n, name in enumerate(("web", None, "db"), 1)
    ]
    page.eval("import('/list.js').then((found) => { globalThis.list = found; })")
    page.eval("(globalThis.fake = new EventTarget()).list = () => {}; new list.List(fake); 0")
    for shown, wanted in ((rows, ["2" * 12, "db", "web"]), ([], [])):
        page.eval(f"fake.dispatchEvent(new CustomEvent('listing', {{detail: {js(shown)}}}))")
        found = page.eval("[...document.querySelectorAll('#sessions .name')].map((one) => one.textContent)")
        assert found == wanted
