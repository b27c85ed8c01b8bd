"""What is around a session: other file systems of its host, and a network that ends in a namespace of the test's."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.host import Host, until

DNS_SERVER = """
import socket, struct
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("{address}", 53))
tcp = socket.create_server(("{address}", 8080))
import threading
def web():
    while True:
        peer, where = tcp.accept()
        peer.sendall(("hello " + where[0] + "\\n").encode())
        peer.close()
threading.Thread(target=web, daemon=True).start()
print("ready", flush=True)
while True:
    query, peer = udp.recvfrom(512)
    end = query.index(b"\\0", 12) + 5
    kind = struct.unpack_from(">H", query, end - 4)[0]
    answers = b"\\xc0\\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton("{address}") if kind == 1 else b""
    count = b"\\0\\1" if answers else b"\\0\\0"
    udp.sendto(query[:2] + b"\\x81\\x80" + query[4:6] + count + b"\\0" * 4 + query[12:end] + answers, peer)
"""


@dataclass(frozen=True)
class Outside:
    """An address in a network namespace behind a cable of the test's own: all the outside there is."""

    address: str
    gateway: str


@pytest.fixture
def outside() -> Iterator[Outside]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    tag = f"{random.randrange(1 << 20):05x}"
    block = f"10.{random.randrange(64, 250)}.{random.randrange(1, 250)}"
    outside = Outside(f"{block}.2", f"{block}.1")
    space = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
    server = None
    try:
        until(lambda: os.readlink(f"/proc/{space.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        inside = ["nsenter", f"--net=/proc/{space.pid}/ns/net"]
        for command in (
            ["ip", "link", "add", f"out{tag}", "type", "veth", "peer", "name", "up0", "netns", str(space.pid)],
            ["ip", "addr", "add", f"{outside.gateway}/30", "dev", f"out{tag}"],
            ["ip", "link", "set", f"out{tag}", "up"],
            [*inside, "ip", "addr", "add", f"{outside.address}/30", "dev", "up0"],
            [*inside, "ip", "link", "set", "up0", "up"],
            [*inside, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True, timeout=10)
        script = DNS_SERVER.format(address=outside.address)
        server = subprocess.Popen([*inside, sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield outside
    finally:
        for process in (server, space):
            if process is not None:
                process.kill()
                process.wait()
        subprocess.run(["ip", "link", "del", f"out{tag}"], check=False, capture_output=True)


FETCH = (
    "import socket,sys; s=socket.create_connection((sys.argv[1],8080),5); print(s.recv(99).decode()); "
    "print(s.getsockname()[0])"
)


def run_in(host: Host, *command: str, options: tuple[str, ...] = ()) -> str:
    session = host.start(*command, options=options)["session"]
    host.cm_json("wait", session)
    return host.output(session)


def test_names_that_are_no_text(host: Host, tmp_path: Path) -> None:
    """Of a mount of the host's, and of a directory shared with the session: bytes are names, too."""
    disk, shared = tmp_path / os.fsdecode(b"disk \xff\xfe"), tmp_path / os.fsdecode(b"shared \xff\xfe")
    for one in (disk, shared):
        one.mkdir()
    host.prefix = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=1m host-t "{disk}" && exec "$@"', "sh")
    script = "exec 5> x; while read x; do echo $x >&5; echo did $x; done"
    try:
        host.start("sh", "-c", script, name="t", options=("--share", str(shared), "--cwd", str(shared)))
        assert not [one for one in host.cm_json("plan", "t")["findings"] if one["level"] != "info"]
        host.ok("checkpoint", "t")
        host.ok("restore", "t")
        host.ok("send", "t", "on", "--enter")
        host.wait_for("t", "did on")
        assert (shared / "x").read_text() == "on\n"
        host.ok("kill", "t")
    finally:
        host.prefix = ()


def test_reaches_the_outside_under_the_hosts_address(host: Host, outside: Outside) -> None:
    said = run_in(host, sys.executable, "-c", FETCH, outside.address).split()
    assert said[:2] == ["hello", outside.gateway]  # masqueraded: the outside has no way back to a session's own
    assert said[2].rsplit(".", 1)[0] == host.subnet.rsplit(".", 1)[0]


def test_names_resolve(host: Host, outside: Outside, tmp_path: Path) -> None:
    """A host whose resolver is out there, and one whose resolver hides behind a file mounted over resolv.conf."""
    resolv = tmp_path / "resolv.conf"
    resolv.write_text(f"nameserver {outside.address}\n")
    host.prefix = ("unshare", "-m", "sh", "-c", f'mount --bind {resolv} /etc/resolv.conf && exec "$@"', "sh")
    for options in ((), ("--net", "host")):
        lookup = "import socket; print(socket.gethostbyname('some.name.test'))"
        assert run_in(host, sys.executable, "-c", lookup, options=options).strip() == outside.address
    host.prefix = ()


def test_host_network(host: Host, outside: Outside) -> None:
    said = run_in(host, sys.executable, "-c", FETCH, outside.address, options=("--net", "host")).split()
    assert said == ["hello", outside.gateway, outside.gateway]
    spaces = run_in(host, "readlink", "/proc/self/ns/net", options=("--net", "host")).strip()
    assert spaces == os.readlink("/proc/self/ns/net")


def test_sessions_do_not_reach_each_other(host: Host) -> None:
    serve = (
        "import socket; s=socket.create_server(('0.0.0.0',8080)); print('up',flush=True)\n"
        "while 1: s.accept()[0].close()"
    )
    server = host.start(sys.executable, "-c", serve, name="server")["session"]
    host.wait_for(server, "up")
    address = host.cm_json("show", server)["address"]
    probe = (
        "import socket,sys\n"
        "for a in sys.argv[1:]:\n"
        "  try: socket.create_connection((a,8080),1.5); print('reached')\n"
        "  except OSError as e: print(type(e).__name__)"
    )
    assert run_in(host, sys.executable, "-c", probe, address, "127.0.0.1").split() == [
        "TimeoutError",
        "ConnectionRefusedError",
    ]
    with contextlib.closing(socket.create_connection((address, 8080), 5)):
        pass  # its host does reach it
    shown = host.cm_json("show", server)
    assert [(one["kind"], one["local"], one["state"]) for one in shown["sockets"]] == [
        ("tcp", "0.0.0.0:8080", "LISTEN")
    ]


def test_two_subnets_do_not_undo_each_other(make_host: Callable[[str], Host], outside: Outside) -> None:
    a, b = make_host("host-a"), make_host("host-b")
    first = a.start("sh", "-c", f'read x; {sys.executable} -c "{FETCH}" {outside.address}')["session"]
    assert b.subnet != a.subnet
    assert run_in(b, sys.executable, "-c", FETCH, outside.address).split()[0] == "hello"
    a.ok("send", first, "", "--enter")
    a.cm_json("wait", first)
    assert a.output(first).split()[0] == "hello"


def test_loopback_inside(host: Host) -> None:
    script = (
        "import socket; s=socket.create_server(('127.0.0.1',0)); c=socket.create_connection(s.getsockname());"
        "s.accept()[0].sendall(b'hi'); print(c.recv(9))"
    )
    assert "b'hi'" in run_in(host, sys.executable, "-c", script)


def test_other_file_systems_are_seen_and_copied(host: Host, tmp_path: Path) -> None:
    """A tmpfs, an ext4 image and a tree inside another: all visible, writable, and untouched on the host."""
    point, image = tmp_path / "mnt", tmp_path / "image"
    point.mkdir()
    subprocess.run(["truncate", "-s", "8M", str(image)], check=True)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False)
    loop = subprocess.run(["losetup", "-f"], capture_output=True, check=False).returncode == 0 and made.returncode == 0
    second = f"mount -o loop {image} '{point}/b c'"
    script = (
        f"mount -t tmpfs t {point} && echo tmpfs > {point}/a && mkdir '{point}/b c' && "
        + (f"{second} && " if loop else f"mount -t tmpfs u '{point}/b c' && ")
        + f"echo inner > '{point}/b c/d' && \"$@\"; s=$?; cat {point}/a '{point}/b c/d' >&2; exit $s"
    )
    host.prefix = ("unshare", "-m", "sh", "-c", script, "sh")
    inside = f"cat {point}/a '{point}/b c/d'; echo changed > {point}/a; rm '{point}/b c/d'; ls {point}/*; cat {point}/a"
    try:
        done = host.cm("--json", "run", "-d", "--name", "t", "--", "sh", "-c", inside)
    finally:
        host.prefix = ()
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == [b"tmpfs", b"inner"]
    host.cm_json("wait", "t")
    words = host.output("t").replace("\r\n", "\n")
    assert words.startswith("tmpfs\ninner\n") and words.endswith("changed\n"), words
    changed = {one["path"]: one["change"] for one in host.cm_json("show", "t")["files"]}
    assert changed[f"{point}/b c/d"] == "deleted" and f"{point}/a" in changed


def test_hidden_state_on_a_file_system_of_its_own(host: Host, tmp_path: Path) -> None:
    above = host.state.parent
    host.ok("ls")
    host_id = (host.state / "host-id").read_text()  # the same host: so its cgroups are found and removed
    script = f"mount -t tmpfs t {above} && mkdir {host.state} {host.run} {above}/other && "
    script += f'echo -n {host_id} > {host.state}/host-id && "$@"'
    host.prefix = ("unshare", "-m", "sh", "-c", script, "sh")
    command = f"ls {host.state} {host.run}; ls -d {above}/other"
    try:
        whole = subprocess.run(
            [*host.prefix, "sh", "-c", f'{sys.executable} -m cmdop_migrate run -d --name t -- sh -c "{command}" && '
             f"{sys.executable} -m cmdop_migrate wait t >&2; {sys.executable} -m cmdop_migrate output t"],
            env=host.env(), capture_output=True, timeout=30, check=False,
        )  # fmt: skip
    finally:
        host.prefix = ()
    assert whole.stdout.count(b"No such file") == 2 and f"{above}/other".encode() in whole.stdout, whole
