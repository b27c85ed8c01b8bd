"""Headless Chromium, driven over its debugging port by a client inside the session, as Playwright and Puppeteer do."""

from __future__ import annotations

from pathlib import Path

from tests.programs.driver import drive
from tests.programs.scenario import Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host

# Keeps one connection to the page's debugging socket; each line from the terminal is evaluated in the page.
CLIENT = r"""
import base64, json, os, socket, struct, sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def targets():
    while True:
        try: return [one for one in json.load(opener.open("http://127.0.0.1:9222/json", timeout=30)) if one["type"] == "page"]
        except OSError: time.sleep(.2)
while not targets(): time.sleep(.2)
path = targets()[0]["webSocketDebuggerUrl"].split("9222", 1)[1]
link = socket.create_connection(("127.0.0.1", 9222))
key = base64.b64encode(os.urandom(16)).decode()
link.sendall((f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:9222\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
              f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode())
stream = link.makefile("rb")
while stream.readline().strip(): pass
def send(text):
    data, mask = text.encode(), os.urandom(4)
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    link.sendall(b"\x81" + length + mask + bytes(c ^ mask[i % 4] for i, c in enumerate(data)))
def receive():
    size = stream.read(2)[1] & 127
    if size == 126: size = struct.unpack("!H", stream.read(2))[0]
    elif size == 127: size = struct.unpack("!Q", stream.read(8))[0]
    return json.loads(stream.read(size))
print("ready", 1, flush=True)
for number, line in enumerate(sys.stdin):
    send(json.dumps({"id": number, "method": "Runtime.evaluate",
                     "params": {"expression": line, "awaitPromise": True, "returnByValue": True}}))
    while (answer := receive()).get("id") != number: pass
    print("value", json.dumps(answer["result"].get("result", answer).get("value", answer)), flush=True)
"""
CHROMIUM = (
    "chromium --headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-port=9222"
    " --disable-background-networking --disable-component-update --disable-sync --no-proxy-server"
    " --user-data-dir=/root/home/profile about:blank"
)


class Chromium(Scenario):
    """A page with a counter, a timer, and a worker of its own."""

    name = "Chromium, headless"
    version = "chromium --version"
    needs = ("chromium",)
    argv = ("bash", "-c", f"{CHROMIUM} > log 2>&1 < /dev/null & exec /usr/bin/python3 client.py")
    files = {"client.py": CLIENT}

    def state(self, terminal: Terminal) -> None:
        terminal.see("ready 1", 120)
        terminal.ask("window.ticks = 0; setInterval(() => ticks++, 10); window.base = 40; base + 2", "value 42")
        worker = "new Worker(URL.createObjectURL(new Blob(['let n = 0; onmessage = () => postMessage(++n)'])))"
        terminal.ask(f"window.w = {worker}; document.title = 'kept'; 7", "value 7")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(f"base + {number} + document.title", f'value "{40 + number}kept"')
        terminal.ask("new Promise(done => { const t = ticks; setTimeout(() => done(ticks > t), 300) })", "value true")
        terminal.ask(
            "new Promise(done => { w.onmessage = e => done(1000 + e.data); w.postMessage(0) })",
            f"value {1000 + number}",
        )


@each("Browsers", Chromium)
def test_browser(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
