"""A host with twenty sessions of all kinds is emptied onto two others, while each of them counts aloud."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path

from tests.support import fenced_sessions
from tests.support.host import until
from tests.support.lab_hosts import LabHost, a_lab

COUNT = 20
COUNTING = "while :; do echo n $((++i)); sleep 0.2; done"
_PYTHON = "import itertools, time\n{before}\nfor n in itertools.count(1):\n    {each}\n    print('n', n, flush=True)\n    time.sleep(0.2)\n"
# Each checks with every number that what it holds is what it was.
_MEMORY = _PYTHON.format(
    before="import os, zlib\nheld = os.urandom({mib} << 20)\nknown = zlib.crc32(held)",
    each="assert n % 10 or zlib.crc32(held) == known",
)
_FILE = _PYTHON.format(
    before="file = open('/var/tmp/counted', 'w+')",
    each="file.write(f'{n}\\n'); file.flush(); file.seek(0); assert len(file.readlines()) == n",
)
_SOCKET = _PYTHON.format(
    before="import socket, threading\nserver = socket.create_server(('127.0.0.1', 7007))\n"
    "ours = socket.create_connection(('127.0.0.1', 7007)); theirs = server.accept()[0]",
    each="ours.sendall(b'%08d' % n); assert int(theirs.recv(8)) == n",
)
_THREADS = _PYTHON.format(
    before="import queue, threading\ntold, heard = queue.Queue(), queue.Queue()\n"
    "threading.Thread(target=lambda: [heard.put(told.get()) for _ in iter(int, 1)], daemon=True).start()",
    each="told.put(n); assert heard.get() == n",
)


def _commands() -> list[tuple[str, tuple[str, ...]]]:
    python = (sys.executable, "-c")
    kinds: list[tuple[str, tuple[str, ...]]] = [
        ("shell", ("bash", "-c", COUNTING)),
        ("pipe", ("bash", "-c", f'({COUNTING}) | while read -r line; do echo "$line"; done')),
        ("child", ("bash", "-c", f"sleep 100000 & {COUNTING}")),
        ("file", (*python, _FILE)),
        ("socket", (*python, _SOCKET)),
        ("threads", (*python, _THREADS)),
        ("small", (*python, _MEMORY.replace("{mib}", "4"))),
        ("large", (*python, _MEMORY.replace("{mib}", "48"))),
    ]
    return [(f"{kinds[number % len(kinds)][0]}-{number}", kinds[number % len(kinds)][1]) for number in range(COUNT)]


def test_twenty_sessions_and_not_a_number_lost() -> None:
    with a_lab(hosts=3) as lab:
        a = lab.hosts[0]
        sessions = {a.start(*command, name=name)["session"]: name for name, command in _commands()}
        until(lambda: all(fenced_sessions.numbers(a, one) for one in sessions), 30, "all count")
        planned = a.cm_json("drain", "--to", "host-b,host-c", "--dry-run", "--deadline", "8m")
        assert Counter(one["how"] for one in planned["schedule"]) == {"move": COUNT}
        began = time.monotonic()
        facts = a.cm_json("drain", "--to", "host-b,host-c", "--deadline", "8m", "--parallel", "3", timeout=540)
        frozen = sorted(one["frozen_s"] for one in facts["moved"])
        print(f"{COUNT} sessions in {time.monotonic() - began:.0f} s, frozen {frozen[0]:.2f} to {frozen[-1]:.2f} s")
        counts = {word: len(facts[word]) for word in ("moved", "parked", "failed", "left", "ended")}
        assert counts == {"moved": COUNT, "parked": 0, "failed": 0, "left": 0, "ended": 0}, facts
        assert facts["deadline_kept"]
        where = {one["session"]: lab.host(one["to"]) for one in facts["moved"]}
        went = Counter(host.name for host in where.values())
        assert min(went["host-b"], went["host-c"]) >= COUNT // 4, went
        before = {
            one: len(fenced_sessions.numbers(host, one)) for one, host in where.items()
        }  # none missing, none doubled
        until(
            lambda: all(len(fenced_sessions.numbers(where[one], one)) > before[one] + 3 for one in where),
            60,
            "all count on",
        )
        assert {one["state"] for one in a.sessions()} == {"exited"}
        a.assert_clean(ended=True)
        assert not _strays(a), "processes are left on host-a"
        assert a.cm_json("undrain")["was_draining"]


def _strays(host: LabHost) -> list[int]:
    """What is in a cgroup of sessions or holders."""
    groups = [os.path.join(host.group(), name) for name in os.listdir(host.group()) if name != "agent"]
    found = []
    for group in groups:
        for where, _, names in os.walk(group):
            if "cgroup.procs" in names:
                found += [int(pid) for pid in (Path(where) / "cgroup.procs").read_text().split()]
    return found
