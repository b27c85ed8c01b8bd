"""`plan --to`: the other host is asked over a real SSH connection about what one session depends on.

Both hosts are on this machine; the other one's command runs in a mount namespace and a network of its own, where
files are other, missing or shared no more. The session never stops for any of it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.host import Host, pair
from tests.support.plan_session import Counting, blocks, command_of, said
from tests.support.servers import free_ports
from tests.support.sshd import Login, Sshd, an_sshd, new_key


@dataclass(frozen=True)
class World:
    a: Host
    b: Host
    dir: Path
    session: Counting
    sshd: Sshd
    login: Login
    port: int

    def know(self, name: str, command: Path) -> str:
        """Register `name` as a host that is driven by this command."""
        self.a.ok(
            *("hosts", "add", name, self.sshd.address, "--key", str(self.login.private)),
            *("--command", str(command), "--fingerprint", self.sshd.fingerprint),
        )
        return name

    def other(self, name: str, before: str = "", own_network: bool = True) -> str:
        return self.know(name, command_of(self.b, self.dir / f"as-{name}", before, own_network))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A session on host-a that is on its network, listens, runs a program of the host's, has a file of it open, and
    shares a directory."""
    directory = tmp_path_factory.mktemp("to")
    opt = directory / "opt"
    (opt / "shared").mkdir(parents=True)
    shutil.copy(shutil.which("sleep") or "/bin/sleep", opt / "tool")
    (opt / "data").write_text("what it reads\n")
    (port,) = free_ports(1)
    listen = f'import socket, time; s = socket.create_server(("127.0.0.1", {port})); print("ready"); time.sleep(1000)'
    script = f"{{ {opt}/tool 1000 & exec 4< {opt}/data; exec {sys.executable} -uc '{listen}'; }}"
    login = new_key(directory / "login")
    with pair(directory, ttl="15s") as (a, b), an_sshd(directory / "sshd", login) as sshd:
        a.ok("key", "show")
        options = ("--net", "host", "--share", str(opt / "shared"))
        with Counting(a, script, options=options) as session:
            a.wait_for("t", "ready")
            yield World(a, b, directory, session, sshd, login, port)


def libc() -> str:
    found = re.search(r"(/\S*/libc\.so\.6|/\S*/libc-[\d.]+\.so)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert found, "this Python has no libc of its own"
    return os.path.realpath(found[1])


def test_host_with_everything_has_no_findings(world: World) -> None:
    answer = world.session.plan("--to", world.other("good"))
    assert answer["ok"], answer["findings"]
    assert (answer["from"], answer["to"]) == ("host-a", "host-b")
    assert said(answer, "files") == [] and said(answer, "ports") == []


def test_different_libc_is_carried_or_blocks(world: World) -> None:
    other = world.dir / "libc"
    shutil.copy(libc(), other)
    with other.open("ab") as file:
        file.write(b"of another build")
    name = world.other("libc", f"mount --bind {other} {libc()}")
    answer = world.session.plan("--to", name)
    ((level, message),) = said(answer, "files")
    assert answer["ok"] and level == "warn" and f"{libc()} (different)" in message and "carried" in message
    blocks(world.session.plan("--to", name, "--carry", "none"), "files", f"{libc()} (different)")


def test_missing_files_and_shares_block(world: World) -> None:
    opt = world.dir / "opt"
    name = world.other("bare", f"mount -t tmpfs none {opt}; mkdir {opt}/shared")
    answer = world.session.plan("--to", name)
    blocks(answer, "files", f"{opt}/data (missing)")
    assert [level for level, message in said(answer, "files") if f"{opt}/tool (missing)" in message] == ["warn"]
    answer = world.session.plan("--to", name, "--carry", "opened")
    assert answer["ok"] and f"{opt}/data (missing)" in said(answer, "files")[0][1]
    name = world.other("unshared", f"mount -t tmpfs none {opt}")
    blocks(world.session.plan("--to", name, "--carry", "opened"), "directories", f"{opt}/shared")


def test_port_in_use_on_the_target_blocks(world: World) -> None:
    name = world.other("busy", own_network=False)  # on the one network of this machine the session itself has it
    blocks(world.session.plan("--to", name), "ports", f"tcp port {world.port}")


def test_full_disk_on_the_target_blocks(world: World) -> None:
    """Fill the disk to the last byte: the host still answers."""
    world.b.ok("ls")
    state, kept = world.b.state, world.dir / "kept"
    fill = f"cp -a {state} {kept}; mount -t tmpfs -o size=20m none {state}; cp -a {kept}/. {state}; rm -r {kept}"
    name = world.other("full", f"{fill}; rm -rf {state}/cache; cat /dev/zero > {state}/fill 2>/dev/null || true")
    blocks(world.session.plan("--to", name), "disk", "0 B free")


@pytest.mark.parametrize(
    ("check", "setting", "value"),
    [
        ("key", "KEY_FILE", lambda place: str(place / "keys")),
        ("store_there", "STORE", lambda place: f"file://{place}/store"),
        ("lease_there", "LEASE", lambda place: f"sqlite://{place}/lease.db"),
        ("lease_there", "LEASE", lambda _: "etcd://127.0.0.1:1/nobody"),
    ],
    ids=["another key", "another store", "another lease store", "no lease store"],
)
def test_hosts_without_common_store_lease_or_key_are_blocked(
    world: World, tmp_path: Path, check: str, setting: str, value: Callable[[Path], str]
) -> None:
    name = world.other(f"u{os.urandom(3).hex()}", f"export CMDOP_MIGRATE_{setting}={value(tmp_path)}")
    blocks(world.session.plan("--to", name), check, "host-b")


def test_unreachable_hosts_are_errors(world: World, tmp_path: Path) -> None:
    world.know("gone", tmp_path / "nothing-here")
    world.a.fails("plan", "t", "--to", "gone", status=9, code="peer_failed")
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\necho \'{"error": {"code": "usage", "message": "No such command: facts"}}\'; exit 2\n')
    old.chmod(0o755)
    world.know("old", old)
    world.a.fails("plan", "t", "--to", "old", status=9, code="peer_differs")
    odd = tmp_path / "odd"
    odd.write_text("#!/bin/sh\necho '{\"format\": 99}'\n")
    odd.chmod(0o755)
    world.know("odd", odd)
    world.a.fails("plan", "t", "--to", "odd", status=9, code="peer_differs")
    world.know("self", command_of(world.a, tmp_path / "as-self"))
    world.a.fails("plan", "t", "--to", "self", status=2, code="usage")
