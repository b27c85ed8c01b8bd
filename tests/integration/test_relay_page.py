"""The page that the relay serves, in a real browser: sign in, type, and keep typing while the session moves."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.browser import CTRL, SHIFT, Browser, Page, a_browser
from tests.support.host import Host, until
from tests.support.relayed_hosts import Linked, linked

# Says what it got: each line that went in, once.
ECHO = "stty -echo; echo ready; while read -r line; do echo got-$line; done"
ROWS = "[...document.querySelectorAll('.xterm-rows > div')].map((row) => row.textContent).join('\\n')"
STATE = "document.getElementById('status').dataset.state"
STATUS = "document.getElementById('status').textContent"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as made:
        yield made
        for host in (made.a, made.b):
            for row in host.sessions():
                host.cm("kill", row["session"], "--signal", "KILL")


@pytest.fixture(scope="module")
def browser(world: Linked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    certificate = world.relay.at.state / "relay" / "self-signed.pem"
    with a_browser(tmp_path_factory.mktemp("browser"), world.relay.port, certificate) as made:
        yield made


def started(world: Linked, name: str) -> str:
    """One that says what it got, known to the relay."""
    session = str(world.a.start("bash", "-c", ECHO, name=name)["session"])
    world.a.wait_for(name, "ready")
    world.routed(session, world.credential())
    return session


@pytest.fixture(scope="module")
def session(world: Linked) -> str:
    """For tests that leave it alone but for typing."""
    return started(world, "web")


def sign_in(page: Page, browser: Browser, text: str) -> None:
    page.go(browser.url)
    page.wait("!document.getElementById('sign-in').hidden")
    page.fill("#credential", text)
    page.click("#sign-in-form button.main")


def opened(browser: Browser, credential: Path, session: str, width: int = 1000, height: int = 700) -> Page:
    """Signed in, and at the terminal of the session."""
    page = browser.page(width, height)
    sign_in(page, browser, credential.read_text())
    page.click(f"#sessions a[href='#/s/{session}']")
    page.wait(f"{STATE} === 'live'")
    return page


def got(host: Host, session: str) -> list[str]:
    return re.findall(r"got-(\S+)", host.output(session))


def shows(page: Page, text: str, within: float = 15.0) -> None:
    page.wait(f"({ROWS}).includes({text!r})", within)


def fits(page: Page) -> bool:
    return bool(
        page.eval("document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth")
    )


def test_page_types_and_shows_output_through_a_move(world: Linked, browser: Browser) -> None:
    session = started(world, "mover")
    file = world.credential(sessions="mover")
    page = opened(browser, file, session)
    shows(page, "ready")  # what it printed before we came
    page.type("first\n")
    shows(page, "got-first")
    page.eval(
        "globalThis.states = []; new MutationObserver(() => states.push(document.getElementById('status').textContent))"
        ".observe(document.getElementById('status'), {childList: true})"
    )
    mover = threading.Thread(target=world.move, args=("mover", True))
    mover.start()
    count = 0
    while mover.is_alive():
        page.type(f"n{count}\n")
        count += 1
    mover.join()
    page.wait(f"{STATUS}.startsWith('on host-b')")
    page.type("last\n")
    shows(page, "got-last")
    assert got(world.b, session) == ["first", *(f"n{number}" for number in range(count)), "last"]
    assert count > 3 and page.eval("states.some((words) => words.startsWith('moving to host-b'))"), page.eval("states")

    page.press("L", CTRL | SHIFT)  # back to the list, by the keyboard
    page.wait("document.activeElement.textContent === 'mover'")
    row = "document.querySelector('#sessions li')"
    page.wait(f"{row}?.querySelector('.host').textContent === 'host-b'")
    page.wait(f"{row}.querySelectorAll('.phases i').length > 8")
    words = page.eval(f"{row}.innerText")
    assert "moved from host-a to host-b just now, frozen for" in words and "running" in words, words
    assert page.eval(f"{row}.querySelector('.token').textContent") == "2"

    assert page.complaints == []
    assert {urlsplit(one).netloc for one in page.requests} == {urlsplit(browser.url).netloc}
    secret = file.read_text().strip()[5:60]
    assert not [one for one in page.requests if secret in one]
    assert page.eval("localStorage.length + document.cookie.length") == 0


def test_a_cut_wire_and_a_relay_that_is_replaced(world: Linked, browser: Browser, session: str) -> None:
    page = opened(browser, world.credential(), session)
    page.type("before\n")
    shows(page, "got-before")
    browser.proxy.block()
    page.wait(f"{STATE} === 'reconnecting'")
    page.type("while-cut\n")
    browser.proxy.unblock()
    shows(page, "got-while-cut")
    world.restart_relay()
    page.type("while-away\n")
    shows(page, "got-while-away", 30)
    page.wait(f"{STATE} === 'live'")
    assert got(world.a, session)[-3:] == ["before", "while-cut", "while-away"]


def test_page_with_a_read_credential(world: Linked, browser: Browser, session: str) -> None:
    page = opened(browser, world.credential(role="read", actor="rita"), session)
    shows(page, "ready")
    before = got(world.a, session)
    page.type("nothing\n")
    world.a.ok("send", "web", "something", "--enter")
    shows(page, "got-something")
    assert got(world.a, session) == [*before, "something"]
    assert "read-only" in page.eval(STATUS)
    assert page.eval("document.getElementById('keys').hidden")
    assert page.complaints == []


def test_page_refuses_an_invalid_credential(world: Linked, browser: Browser, session: str) -> None:
    page = browser.page()
    error = "document.getElementById('sign-in-error').textContent"
    sign_in(page, browser, "cmr1_nonsense")
    page.wait(f"{error}.includes('damaged')")
    file = world.credential(actor="mallory")
    mallory = [one for one in world.a.cm_json("relay", "token", "ls")["tokens"] if one["name"] == "mallory"]
    other = opened(browser, file, session)  # it is good so far
    world.a.ok("relay", "token", "revoke", mallory[0]["id"])
    other.wait(f"{error}.includes('revoked')")
    sign_in(page, browser, file.read_text())
    page.wait(f"{error}.includes('does not admit')")
    for one in (page, other):
        assert not one.eval("document.getElementById('sign-in').hidden")
        assert one.eval("sessionStorage.length") == 0
        assert one.complaints == []


def test_page_shows_ended_and_forbidden_sessions(world: Linked, browser: Browser, session: str) -> None:
    own = started(world, "short")
    page = opened(browser, world.credential(sessions="short"), own)
    world.a.ok("kill", "short", "--signal", "KILL")
    page.wait(f"{STATE} === 'ended'")
    assert "ended" in page.eval(STATUS)
    for other in (session, "ab" * 12):
        page.eval(f"location.hash = '#/s/{other}'")
        page.wait(f"{STATUS}.includes('No such session')")
        page.eval("location.hash = '#/'")
        page.wait("!document.getElementById('list').hidden")


def test_page_on_a_phone(world: Linked, browser: Browser, session: str) -> None:
    page = opened(browser, world.credential(sessions="web"), session, 320, 640)
    before = got(world.a, session)
    assert page.eval("getComputedStyle(document.getElementById('keys')).display") == "flex"
    assert fits(page)
    outside = (
        "[...document.querySelectorAll('button, a')].filter((one) => one.offsetParent && one.getBoundingClientRect()"
    )
    assert page.eval(f"{outside}.right > innerWidth).length") == 0
    small = "[...document.querySelectorAll('#keys button')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
    assert page.eval(f"{small}.map((one) => one.textContent)") == []
    page.type("lin")
    page.click("[data-key='ctrl']")
    page.type("v")
    page.click("[data-key='esc']")
    page.type("\n")  # Ctrl-V takes the next as it is: the line is "lin", escape
    until(lambda: got(world.a, session) == [*before, "lin\x1b"], 10, "the keys arrive")
    page.click("#back")
    page.wait("document.querySelectorAll('#sessions li:not([hidden])').length === 1")
    assert fits(page)
    page.resize(375, 700)
    assert fits(page)
    assert page.complaints == []
    page.click("#sign-out")
    page.wait("!document.getElementById('sign-in').hidden")
    assert fits(page)


def test_signing_out_forgets_everything(world: Linked, browser: Browser, session: str) -> None:
    page = opened(browser, world.credential(), session)
    page.eval("globalThis.before = true; location.reload()")
    page.wait(f"!globalThis.before && {STATE} === 'live'")  # this tab is still signed in, and where it was
    page.wait("document.getElementById('name').textContent === 'web' && document.title.startsWith('web')")
    page.click("#sign-out")
    page.wait("!document.getElementById('sign-in').hidden && document.getElementById('who').hidden")
    assert page.eval("sessionStorage.length") == 0
    assert page.eval("document.getElementById('credential').value") == ""


def test_page_without_vendored_packages_names_the_command(browser: Browser) -> None:
    page = browser.page()
    page.call("Network.setBlockedURLs", urls=["*/vendor/*"])
    page.go(browser.url)
    page.wait("!document.getElementById('trouble').hidden")
    assert "scripts/vendor-page" in page.text()


def test_a_large_paste_goes_in_whole_and_once(world: Linked, browser: Browser, session: str) -> None:
    page = opened(browser, world.credential(), session)
    before = len(got(world.a, session))
    lines = [f"p{number:05}" for number in range(12_000)]  # more than may be in flight
    page.eval(
        "globalThis.pasted = new DataTransfer();"
        f"pasted.setData('text/plain', Array.from({{length: {len(lines)}}}, (_, n) => 'p' + String(n).padStart(5, '0') + '\\n').join(''));"
        "document.querySelector('.xterm-helper-textarea').dispatchEvent("
        "new ClipboardEvent('paste', {clipboardData: pasted, bubbles: true, cancelable: true})); undefined"
    )
    shows(page, f"got-{lines[-1]}", 60)
    assert got(world.a, session)[before:] == lines


def test_page_shows_requests_and_releases_the_turn(world: Linked, browser: Browser, session: str) -> None:
    page = opened(browser, world.credential(), session)
    turn = "document.getElementById('turn').textContent"
    before = got(world.a, session)
    world.a.ok("turn", "web", "request", "--actor", "bob")
    page.wait(f"{turn} === 'bob has the turn'")
    page.type("refused\n")
    shows(page, "bob has the write turn")
    world.a.ok("turn", "web", "release", "--actor", "bob")
    page.wait(f"{turn} === ''")
    page.click("[data-turn='request']")
    page.wait(f"{turn} === 'You have the turn'")
    page.eval("document.querySelector('.xterm-helper-textarea').focus()")
    page.type("mine\n")
    shows(page, "got-mine")
    page.click("[data-turn='release']")
    page.wait(f"{turn} === ''")
    assert got(world.a, session) == [*before, "mine"]


def test_page_repaints_a_full_screen_program(world: Linked, browser: Browser) -> None:
    file = world.dir / "poem"
    file.write_text("first line\nsecond line\n")
    session = str(world.a.start("vim", "-u", "NONE", str(file), name="editor")["session"])
    world.routed(session, world.credential())
    page = opened(browser, world.credential(), session)
    shows(page, "second line")
    page.type("Ogreetings")
    page.press("Escape")
    page.type(":w\n")
    shows(page, "greetings")
    shows(page, "3 lines")  # written
    again = opened(browser, world.credential(), session)
    shows(again, "greetings")
    shows(again, "second line")
    assert again.complaints == []
