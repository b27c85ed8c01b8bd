"""What a session has outside: connections are reset and said; branches; shares; the host's network."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import Host, until
from tests.support.outside_server import CLIENT, Server, is_reset
from tests.support.program_session import Program

PYTHON = sys.executable


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(f"cmdop-test-{os.getpid()}", 1 + os.getpid() % 200)
    try:
        yield made
    finally:
        made.close()


def test_a_connection_to_the_outside_is_reset_and_listed(host: Host, server: Server) -> None:
    with Program(host, PYTHON, "-c", CLIENT, server.address, "7200") as client:
        peer = server.accept()
        client.see(r"said b'welcome'")
        saved = client.park()
        assert is_reset(peer, 0.5)
        (closed,) = saved["closed_connections"]
        assert closed["remote"] == f"{server.address}:7200" and closed["command"].startswith("python")
        client.back()
        client.path("/root/go").touch()
        client.see(r"error (ConnectionResetError|BrokenPipeError)")
        client.see(r"udp \('0.0.0.0', 7300\)")


def test_a_copy_has_its_connections_reset_and_the_running_one_keeps_them(host: Host, server: Server) -> None:
    with Program(host, PYTHON, "-c", CLIENT, server.address, "7200") as client:
        peer = server.accept()
        client.see(r"said b'welcome'")
        saved = host.cm_json("checkpoint", "p", "--leave-running")
        assert len(saved["closed_connections"]) == 1
        copy = host.cm_json("restore", saved["checkpoint"], "--fork", "copy")
        assert copy["parent"] == client.session and copy["session"] != client.session
        until(lambda: host.pids(copy["session"]))
        for pid in (min(host.pids(copy["session"])), min(host.pids(client.session))):
            Path(f"/proc/{pid}/root/root/go").touch()
        assert peer.recv(9) == b"again"
        peer.sendall(b"yes")
        client.see(r"answer b'yes'")
        host.wait_for("copy", r"error (Connection(Reset|Aborted)Error|BrokenPipeError)")
        host.ok("kill", "--signal", "KILL", "copy")


def test_fork_makes_an_independent_branch(host: Host) -> None:
    with Program(host, "bash", "--norc", "--noediting") as bash:
        bash.type("x=1; echo base > /root/f; PS1='> '; head -c 8M /dev/urandom > /root/big; echo made=$x\n")
        bash.see("made=1")
        first = host.cm_json("checkpoint", "p", "--leave-running")
        made = host.cm_json("fork", "p", "branch")
        assert made["parent"] == bash.session
        shown = {name: host.cm_json("show", name) for name in ("p", "branch")}
        assert shown["p"]["address"] != shown["branch"]["address"] and shown["branch"]["parent"] == bash.session
        again = host.cm_json("checkpoint", "branch", "--leave-running")
        assert again["bytes"]["new"] < first["bytes"]["new"] / 4, "what the two share is stored once"
        host.ok("send", "branch", "x=2; echo branch > /root/f\n")
        bash.type("x=3\n")
        host.ok("send", "branch", "echo i-have=$x-$(cat /root/f)\n")
        host.wait_for("branch", "i-have=2-branch")
        bash.type("echo i-have=$x-$(cat /root/f)\n")
        bash.see("i-have=3-base")
        address = shown["branch"]["address"]
        host.ok("send", "branch", "ip -4 -o addr show eth0\n")
        host.wait_for("branch", address)
        host.ok("kill", "--signal", "KILL", "branch")


def test_shares_and_the_hosts_network(host: Host, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as outside:
        port = outside.getsockname()[1]
        script = f"exec 5<>/dev/tcp/127.0.0.1/{port}; exec 7>{shared}/open; echo before >&7; trap '' PIPE; PS1='> '"
        options = ("--net", "host", "--share", str(shared), "--cwd", str(shared))
        with Program(host, "bash", "--norc", "--noediting", options=options) as bash:
            bash.type(f"{script}; echo set\n")
            bash.see("\nset")
            peer, _ = outside.accept()
            saved = bash.through(allowed=[r"fd 5: socket"])
            assert [one["remote"] for one in saved["closed_connections"]] == [f"127.0.0.1:{port}"]
            assert is_reset(peer, 1)
            peer.close()
            bash.type("echo after >&7; echo x >&5 || echo gone; pwd; echo wrote > by-session\n")
            bash.see("gone")
            bash.see(str(shared))
            assert until(lambda: (shared / "by-session").exists())
            assert (shared / "open").read_text() == "before\nafter\n"


def test_a_connection_that_was_not_accepted_is_reset_and_its_listener_lives(host: Host) -> None:
    script = """
import os, socket, time
l = socket.socket(); l.bind(("127.0.0.1", 7400)); l.listen(8)
waiting = [socket.create_connection(("127.0.0.1", 7400)) for _ in range(3)]
print("ready", flush=True)
while not os.path.exists("/root/go"): time.sleep(.02)
failed = 0
for one in waiting:
    try:
        one.send(b"x"); time.sleep(.1); one.settimeout(2); one.recv(1)
    except ConnectionError: failed += 1
fresh = socket.create_connection(("127.0.0.1", 7400)); peer, _ = l.accept(); fresh.send(b"new")
print("reset", failed, peer.recv(9), flush=True); time.sleep(1000)
"""
    with Program(host, PYTHON, "-c", script) as listener:
        listener.see("ready")
        listener.through(still=False)
        listener.path("/root/go").touch()
        listener.see("reset 3 b'new'")
