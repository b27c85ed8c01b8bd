"""Run a server outside of any session, in its own network, and a program that is connected to it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys

PYTHON = sys.executable
CLIENT = """
import os, socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("0.0.0.0", 7300))
s.sendall(b"hello")
print("said", s.recv(9), flush=True)
while not os.path.exists("/root/go"): time.sleep(.02)
try:
    s.sendall(b"again"); time.sleep(.2); print("answer", s.recv(9), flush=True)
except OSError as error:
    print("error", type(error).__name__, flush=True)
print("udp", u.getsockname(), flush=True)
time.sleep(1000)
"""


class Server:
    """Serve at one address in a network namespace, which looks like another machine to a session."""

    def __init__(self, name: str, subnet: int) -> None:
        self.name, self.link = name, f"t{subnet}{os.getpid() % 100000}"
        self.address = f"10.213.{subnet}.2"
        commands = f"""ip netns add {name}
            ip link add {self.link} type veth peer name eth0 netns {name}
            ip addr add 10.213.{subnet}.1/24 dev {self.link}
            ip link set {self.link} up
            ip -n {name} addr add {self.address}/24 dev eth0
            ip -n {name} link set lo up
            ip -n {name} link set eth0 up
            ip -n {name} route add default via 10.213.{subnet}.1"""
        for command in commands.splitlines():
            subprocess.run(command.split(), check=True)
        self.listener = self._listen()
        self.peers: list[socket.socket] = []

    def _listen(self) -> socket.socket:
        """Open a listening socket in the namespace: a socket belongs to the namespace in which it was made."""
        ours, theirs = socket.socketpair()
        script = (
            "import socket, sys; l = socket.socket(); l.bind(('0.0.0.0', 7200)); l.listen();"
            "socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b'x'], [l.fileno()])"
        )
        with ours, theirs:
            command = ["ip", "netns", "exec", self.name, PYTHON, "-c", script, str(theirs.fileno())]
            subprocess.run(command, check=True, pass_fds=(theirs.fileno(),))
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=fds[0])

    def accept(self) -> socket.socket:
        self.listener.settimeout(15)
        peer, _ = self.listener.accept()
        peer.settimeout(10)
        self.peers.append(peer)
        assert peer.recv(9) == b"hello"
        peer.sendall(b"welcome")
        return peer

    def close(self) -> None:
        for one in (*self.peers, self.listener):
            one.close()
        subprocess.run(["ip", "link", "del", self.link], check=False)
        subprocess.run(["ip", "netns", "del", self.name], check=False)


def is_reset(peer: socket.socket, within: float) -> bool:
    if not select.select([peer], [], [], within)[0]:
        return False
    try:
        peer.recv(9)
    except ConnectionResetError:
        return True
    return False
