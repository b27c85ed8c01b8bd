"""Many processes, many sockets."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.programs.driver import drive
from tests.programs.scenario import Scenario, each
from tests.programs.terminal import Terminal
from tests.support.host import Host

# Reads lines "N" from the terminal; makes every child, or every connection, answer N, and prints how many did.
PROCESSES = """
import os, sys
children = []
for index in range(400):
    ours_in, theirs_out = os.pipe(); theirs_in, ours_out = os.pipe()
    if os.fork() == 0:
        for one in children: os.close(one[0]); os.close(one[1])
        os.close(ours_in); os.close(ours_out)
        total = 0
        while piece := os.read(theirs_in, 1):
            total += piece[0]
            os.write(theirs_out, bytes([total]))
        os._exit(0)
    os.close(theirs_in); os.close(theirs_out)
    children.append((ours_in, ours_out))
print("ready", len(children), flush=True)
total = 0
for line in sys.stdin:
    total += int(line)
    for _, out in children: os.write(out, bytes([int(line)]))
    print("answers", sum(os.read(come, 1)[0] == total for come, _ in children), flush=True)
"""
SOCKETS = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
pairs = []
for _ in range(500):
    client = socket.create_connection(listener.getsockname())
    pairs.append((client, listener.accept()[0]))
pairs += [socket.socketpair() for _ in range(250)]
for index in range(0, len(pairs), 2): pairs[index][0].sendall(b"waiting")  # in flight while it is parked
print("ready", 2 * len(pairs), flush=True)
first = True
for line in sys.stdin:
    right = 0
    for index, (one, other) in enumerate(pairs):
        text = b"%d-%d" % (int(line), index)
        one.sendall(text); other.sendall(text)
        wanted = b"waiting" + text if first and index % 2 == 0 else text
        right += other.recv(len(wanted), socket.MSG_WAITALL) == wanted
        right += one.recv(len(text), socket.MSG_WAITALL) == text
    first = False
    print("answers", right, flush=True)
"""


class ManyProcesses(Scenario):
    name = "400 processes"
    argv = (sys.executable, "many.py")
    files = {"many.py": PROCESSES}
    count = 400

    def state(self, terminal: Terminal) -> None:
        terminal.see(f"ready {self.count}")

    def work(self, terminal: Terminal, number: int) -> None:
        terminal.ask(str(number), f"answers {self.count}")


class ManySockets(ManyProcesses):
    name = "1,500 sockets"
    argv = ("bash", "-c", f"ulimit -n 4096; exec {sys.executable} many.py")
    version = f"{sys.executable} --version"
    files = {"many.py": SOCKETS}
    count = 1500


@each("Size", ManyProcesses, ManySockets)
def test_size(scenario: Scenario, host: Host, tmp_path: Path) -> None:
    drive(scenario, host, tmp_path)
