"""Drive a real headless Chromium over its debugging protocol (CDP) on a pair of pipes.

with a_browser(tmp_path, relay.port, certificate) as browser:
    page = browser.page(width=375, height=700)
    page.go(browser.url)
    page.wait("!!document.querySelector('#list li')")
    browser.proxy.block()       # its network is gone

It has a network of its own: sessions that come and go make interfaces, and a
Chromium that sees those come and go drops all that it has under way.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.faulty_proxy import Proxy
from tests.support.host import until
from tests.support.network_hosts import NetHost

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
KEYS = {
    "Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Tab": {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9},
    "Escape": {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27},
}
CTRL, SHIFT = 2, 8


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Gone(Exception):
    """Report that the browser process has ended."""


class Failed(Exception):
    """Report that a script in the page raised an error."""


class Browser:
    def __init__(self, place: Path, certificate: Path, net: NetHost, proxy: Proxy) -> None:
        """Start it; it trusts the self-signed `certificate`, and no other that is not signed by a known authority."""
        self.net, self.proxy = net, proxy
        self.url = f"https://{net.gateway}:{proxy.port}/"
        found = program()
        assert found is not None, "no Chromium: scripts/setup --test"
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        words = [
            found, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server",
            "--disable-extensions", "--hide-scrollbars", f"--user-data-dir={place}", "--remote-debugging-pipe",
            f"--ignore-certificate-errors-spki-list={_spki(certificate)}", "about:blank",
        ]  # fmt: skip
        # It reads from descriptor 3 and writes to 4; the shell puts them there, and is replaced.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            [*net.enter, "/bin/bash", "-c", script, "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb", buffering=0), os.fdopen(ours_out, "wb", buffering=0)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def page(self, width: int = 1200, height: int = 800, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)  # of several, each is the one that is used
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answers = self._answers[number] = queue.SimpleQueue()
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        try:
            self._out.write(json.dumps(message).encode() + b"\0")
            answer = answers.get(timeout=30)
        except (OSError, queue.Empty) as error:
            raise Gone(f"{method}: {error!r}") from error
        finally:
            del self._answers[number]
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError, ValueError):
            while data := self._in.read(1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for one in map(json.loads, messages):
                    if one.get("id") in self._answers:
                        self._answers[one["id"]].put(one)
                    elif one.get("sessionId") in self._pages:
                        self._pages[one["sessionId"]].heard(one["method"], one["params"])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._out.close()  # the browser ends when its pipe is closed
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
        self._reader.join(5)
        self._in.close()


class Page:
    """Drive one page. `complaints` collects errors, warnings and policy violations from its console."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}"[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(params["url"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        phone = width < 640
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)

    def go(self, url: str) -> None:
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer["errorText"]
        until(lambda: self.eval("document.readyState") == "complete", 15, f"{url} is loaded")

    def eval(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise. Raise Failed if the script raises."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise Failed(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, script: str, within: float = 15.0) -> Any:
        """Return the first true value of an expression; a page that is being loaded has none."""

        def read() -> Any:
            with contextlib.suppress(Failed):
                return self.eval(script)
            return None

        try:
            return until(read, within, script)
        except AssertionError as error:
            raise AssertionError(f"{error}; the page: {self.text()[-2000:]!r}; {self.complaints}") from None

    def text(self) -> str:
        return str(self.eval("document.body.innerText"))

    def click(self, selector: str) -> None:
        self.wait(f"!!document.querySelector({json.dumps(selector)})")
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        self.eval(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def type(self, text: str) -> None:
        """Type as a keyboard does; a newline is Enter."""
        for one in text:
            if one == "\n":
                self.press("Enter")
                continue
            self.call("Input.dispatchKeyEvent", type="keyDown", key=one, text=one)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=one)

    def press(self, key: str, modifiers: int = 0) -> None:
        facts = KEYS.get(key) or {"key": key, "code": f"Key{key}", "windowsVirtualKeyCode": ord(key)}
        self.call("Input.dispatchKeyEvent", type="keyDown" if "text" in facts else "rawKeyDown",
                  modifiers=modifiers, **facts)  # fmt: skip
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers,
                  **{name: value for name, value in facts.items() if name != "text"})  # fmt: skip

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def _spki(certificate: Path) -> str:
    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    return base64.b64encode(digest).decode()


@contextlib.contextmanager
def a_browser(place: Path, port: int, certificate: Path) -> Iterator[Browser]:
    """Start a browser that can reach `port` of this machine, at `url`, and nothing else."""
    with NetHost("10.213.19.", os.getpid() % 60) as net, Proxy(port, net.gateway) as proxy:
        # An address that comes a second later, as one of IPv6 does, is another such change.
        subprocess.run([*net.enter, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"], check=True, timeout=20)
        browser = Browser(place, certificate, net, proxy)
        try:
            yield browser
        finally:
            browser.close()
