"""Headless Chromium, driven over its debugging port from inside the session, resumes with the same page loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import browser as support_browser
from tests.support.host import Host
from tests.support.program_session import Program

# Starts the browser, and evaluates each line typed to it in its page; the connection is kept.
DRIVER = r"""
import json, subprocess, sys, time, urllib.request
from pathlib import Path
from websockets.sync.client import connect

subprocess.run(["ip", "route", "delete", "default"], check=True)  # nothing of it leaves the session
profile = Path("/tmp/profile")
browser = subprocess.Popen([*sys.argv[1:], f"--user-data-dir={profile}"], stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

def port():
    try:
        return int((profile / "DevToolsActivePort").read_text().splitlines()[0])
    except (OSError, IndexError, ValueError):
        return None

while (number := port()) is None:
    assert browser.poll() is None, "the browser has ended"
    time.sleep(0.05)
with urllib.request.urlopen(f"http://127.0.0.1:{number}/json/list", timeout=60) as answer:
    address = next(one for one in json.load(answer) if one["type"] == "page")["webSocketDebuggerUrl"]
with connect(address, open_timeout=60) as page:
    print("ready", flush=True)
    for count, line in enumerate(sys.stdin, 1):
        wanted = {"expression": line.strip(), "awaitPromise": True, "returnByValue": True}
        page.send(json.dumps({"id": count, "method": "Runtime.evaluate", "params": wanted}))
        while (answer := json.loads(page.recv(timeout=60))).get("id") != count:
            pass
        print("value", json.dumps(answer["result"]["result"].get("value")), flush=True)
"""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


@pytest.mark.heavy
@pytest.mark.skipif(support_browser.program() is None, reason="no Chromium: scripts/setup --test")
def test_headless_chromium_keeps_its_page_through_two_rounds(host: Host, tmp_path: Path) -> None:
    found = support_browser.program()
    assert found is not None
    words = (found, *FLAGS, "--host-resolver-rules=MAP * ~NOTFOUND", "about:blank")
    with Program(host, sys.executable, "-c", DRIVER, *words) as browser:
        browser.see("ready", 90)
        browser.type("globalThis.kept = {n: 1}; document.body.append(document.createElement('main')); kept.n\n")
        browser.see("value 1", 60)
        for number in range(1, 3):
            browser.through(still=False)
            browser.type("++kept.n + document.querySelectorAll('main').length\n")
            browser.see(f"value {number + 2}", 60)
            # A timer fires, and a new page is drawn: its threads and processes work with each other.
            browser.type("new Promise((done) => setTimeout(() => requestAnimationFrame(() => done('drawn')), 1))\n")
            browser.see('value "drawn"', 60)
