"""Check that connections to the outside are found with one listing of each network namespace."""

from __future__ import annotations

import socket
import subprocess
import sys

from cmdop_migrate.session import tcp_connections

HOLDER = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
sys.stdin.read()
"""


def test_connections_of_a_network_namespace_are_listed_once(monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    held = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    idle = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    gone = subprocess.Popen(["true"])
    gone.wait()
    looked: list[int] = []
    rows = tcp_connections._rows

    def counted(pid: int):
        looked.append(pid)
        return rows(pid)

    try:
        for one in held:
            assert one.stdout is not None and one.stdout.readline() == b"ready\n"
        pids = [idle.pid, gone.pid, *(one.pid for one in held)]
        monkeypatch.setattr(tcp_connections.cgroup, "pids", lambda group: pids)
        monkeypatch.setattr(tcp_connections, "_rows", counted)
        found = tcp_connections.external("any", private=False)
        assert sorted(one.pid for one in found) == sorted(one.pid for one in held)
        assert {one.remote_port for one in found} == {port}
        assert looked == [held[0].pid]
        looked.clear()
        monkeypatch.setattr(tcp_connections.cgroup, "pids", lambda group: [idle.pid])
        assert tcp_connections.external("any") == [] and looked == [], "no sockets, no look"
    finally:
        for one in (*held, idle):
            one.kill()
            one.communicate()
        listener.close()
