"""Test commands over real SSH: authentication, refusals, and broken connections."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate import errors
from cmdop_migrate.errors import (
    Blocked,
    Fenced,
    HostKeyRefused,
    NotRoot,
    PeerDiffers,
    PeerFailed,
    PeerLost,
    Unexpected,
    Usage,
)
from cmdop_migrate.model import PROTOCOL
from cmdop_migrate.remote.connect import SshLimits
from cmdop_migrate.remote.inventory import SshTarget
from cmdop_migrate.remote.knownhosts import KnownHosts
from cmdop_migrate.remote.peer import Lost, Peer
from cmdop_migrate.remote.ssh import SshPool
from tests.support.host import PROJECT, until
from tests.support.patience import bound
from tests.support.sshd import Login, Sshd, an_sshd, new_key, with_account

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an sshd that lets others in needs root")

ECHO = """#!/usr/bin/env python3
import json, sys
print(json.dumps({"argv": sys.argv[1:], "stdin": sys.stdin.read()}))
"""


@dataclass
class Place:
    """Hold one sshd and its client files."""

    dir: Path
    server: Sshd
    login: Login
    target: SshTarget
    pool: SshPool

    def peer(self, script: str, **changes: Any) -> Peer:
        """Return the host, with `script` in place of cmdop-migrate."""
        return Peer(replace(self.target, command=self.script(script), **changes), self.pool)

    def script(self, text: str) -> str:
        path = self.dir / f"script-{os.urandom(3).hex()}"
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def know(self, *servers: Sshd) -> None:
        lines = [f"[127.0.0.1]:{one.port} {one.public_key}\n" for one in (self.server, *servers)]
        self.pool.known.own.write_text("".join(lines))

    def again(self, limits: SshLimits) -> SshPool:
        """Return another client, with other timeouts."""
        return SshPool(self.pool.known, self.dir, limits)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    tmp_path.chmod(0o755)
    login = new_key(tmp_path / "login")
    with ExitStack() as stack:
        server = stack.enter_context(an_sshd(tmp_path / "far", login))
        target = SshTarget("far", "127.0.0.1", "test", server.port, "root", (str(login.private),))
        pool = SshPool(KnownHosts(tmp_path / "known_hosts", tmp_path, tmp_path / "none"), tmp_path)
        stack.callback(pool.close)
        made = Place(tmp_path, server, login, target, pool)
        made.know()
        yield made


def test_unusual_arguments_arrive_unchanged(place: Place) -> None:
    words = ("a b", "", "'", '"; rm -rf $HOME', "`id`", "$(id)", "*", "~", "\\", "é\n\tü", "-x", "--", "a\udcffb")
    answer = place.peer(ECHO).call(*words, stdin=b"in\0put")
    assert answer == {"argv": ["--json", *words], "stdin": "in\0put"}
    with pytest.raises(Usage):
        place.peer(ECHO).call("a\0b")


def test_one_connection_serves_many_calls_and_threads(place: Place) -> None:
    peer = place.peer(ECHO)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(peer.call(str(n))["argv"][1])) for n in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert sorted(answers) == list("012345")
    assert place.server.logins() == 1 and len(place.server.connections()) == 1
    peer.close()
    until(lambda: not place.server.connections(), 5, "it hangs up")
    assert peer.call("again")["argv"] == ["--json", "again"] and place.server.logins() == 2


def test_progress_arrives_immediately_and_the_last_object_is_the_answer(place: Place) -> None:
    gate = place.dir / "gate"
    peer = place.peer(f"""
        echo "Welcome to far!"; echo noise >&2
        echo '{{"progress": {{"phase": "fetch", "done": 1}}}}'
        while [ ! -e {gate} ]; do sleep 0.02; done
        echo '{{"progress": {{"phase": "fetch", "done": 2}}}}'
        printf '{{"session": "x"}}'""")
    heard = []

    def hear(line: dict[str, Any]) -> None:
        heard.append(line["progress"]["done"])
        gate.touch()  # the remote command continues only after the first line was received

    assert peer.call("restore", on_line=hear, timeout=20) == {"session": "x"}
    assert heard == [1, 2]


def test_large_answer_and_much_stderr(place: Place) -> None:
    peer = place.peer("""#!/usr/bin/env python3
import json, sys
sys.stderr.write("x" * 5_000_000)
print(json.dumps({"data": "y" * 6_000_000}))""")
    assert len(peer.call("output", timeout=60)["data"]) == 6_000_000


@pytest.mark.parametrize(
    ("code", "kind"), [("fenced", Fenced), ("blocked", Blocked), ("peer_lost", PeerLost), ("from_tomorrow", Unexpected)]
)
def test_remote_error_is_raised_as_the_same_error(place: Place, code: str, kind: type[errors.CmdopError]) -> None:
    told = json.dumps({"error": {"code": code, "exit": 5, "message": "it is so", "hint": "do\x1b that"}})
    with pytest.raises(kind) as caught:
        place.peer(f"echo '{told}'; exit 5").call("restore")
    assert (caught.value.message, caught.value.hint) == ("far: it is so", "do  that")


def test_answer_with_a_nonzero_status_is_an_answer(place: Place) -> None:
    assert place.peer("""echo '{"ok": false}'; exit 4""").call("doctor") == {"ok": False}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 127", "not found there"),
        ("echo not json", "no valid reply"),
        ("echo 'far: Traceback' >&2; exit 1", "Traceback"),
        ("true", "no valid reply"),
    ],
)
def test_another_program_in_place_of_cmdop_migrate(place: Place, script: str, words: str) -> None:
    with pytest.raises(PeerFailed) as caught:
        place.peer(script).call("version")
    assert words in caught.value.message and caught.value.hint and not isinstance(caught.value, PeerLost)


def test_missing_command_on_the_host(place: Place) -> None:
    for command in ("/no/such/file", "no-such-command", str(place.login.private)):
        with pytest.raises(PeerFailed, match=f"{command} not found there") as caught:
            Peer(replace(place.target, command=command), place.pool).hello()
        assert "--command" in caught.value.hint


def hello(**changes: object) -> str:
    facts = {
        "version": "9.9",
        "protocol": PROTOCOL,
        "host": "far",
        "host_id": "abc",
        "store": {},
        "lease": {},
        "keys": [],
        **changes,
    }
    return f"[ \"$2\" = version ] && echo '{json.dumps(facts)}'"


def test_other_protocol_is_refused_with_both_versions_named(place: Place) -> None:
    assert place.peer(hello()).hello()["version"] == "9.9"
    with pytest.raises(PeerDiffers, match=r"far runs cmdop-migrate 9.9 \(protocol 77\), this host .* \(protocol 1\)"):
        place.peer(hello(protocol=77)).hello()
    told = '{"error": {"code": "usage", "exit": 2, "message": "No such command", "hint": "See"}}'
    with pytest.raises(PeerDiffers, match="too old"):
        place.peer(f"echo '{told}'; exit 2").hello()
    with pytest.raises(NotRoot, match="not run as root"):
        place.peer(hello(host_id=None)).hello()


def test_hello_is_asked_once(place: Place) -> None:
    count = place.dir / "count"
    peer = place.peer(f"echo x >> {count}; " + hello())
    assert peer.hello() == peer.hello() and count.read_text() == "x\n"


def test_unknown_host_key_is_refused_before_login(place: Place) -> None:
    place.pool.known.own.unlink()
    with pytest.raises(HostKeyRefused) as caught:
        place.peer(ECHO).call("x")
    assert place.server.fingerprint in caught.value.message and "hosts add far" in caught.value.hint
    assert place.server.logins() == 0 and not place.pool.known.own.exists()


def test_changed_host_key_is_refused(place: Place) -> None:
    other = new_key(place.dir / "other")
    known = place.pool.known.own
    known.write_text(f"[127.0.0.1]:{place.server.port} {' '.join(other.public.split()[:2])}\n")
    said = subprocess.run(["ssh-keygen", "-lf", str(other.private)], capture_output=True, text=True, check=True).stdout
    with pytest.raises(HostKeyRefused, match="HAS CHANGED") as caught:
        place.peer(ECHO).call("x")
    assert said.split()[1] in caught.value.message and place.server.fingerprint in caught.value.message
    assert "hosts rm far" in caught.value.hint and place.server.logins() == 0
    # What ~/.ssh/known_hosts says counts too, hashed as OpenSSH writes it; the hint then names that program.
    (place.dir / ".ssh").mkdir()
    known.rename(place.dir / ".ssh/known_hosts")
    subprocess.run(["ssh-keygen", "-Hf", str(place.dir / ".ssh/known_hosts")], capture_output=True, check=True)
    with pytest.raises(HostKeyRefused, match="HAS CHANGED") as caught:
        place.peer(ECHO).call("x")
    assert "ssh-keygen -R" in caught.value.hint


def test_revoked_host_key_is_refused_though_known(place: Place) -> None:
    with place.pool.known.own.open("a") as file:
        file.write(f"@revoked * {place.server.public_key}\n")
    with pytest.raises(HostKeyRefused, match="REVOKED"):
        place.peer(ECHO).call("x")
    assert place.server.logins() == 0


def test_failed_login_names_the_keys_tried(place: Place) -> None:
    stranger = new_key(place.dir / "stranger")
    with pytest.raises(PeerFailed, match="cannot log in as root") as caught:
        place.peer(ECHO, keys=(str(stranger.private),)).call("x")
    assert str(stranger.private) in caught.value.message and "authorized_keys" in caught.value.hint
    with pytest.raises(PeerFailed, match="no key to try"):
        place.peer(ECHO, keys=()).call("x")
    with pytest.raises(PeerFailed, match="cannot read the key"):
        place.peer(ECHO, keys=("/no/such/key",)).call("x")
    locked = new_key(place.dir / "locked", passphrase="secret")
    with pytest.raises(PeerFailed, match="cannot use the key") as caught:
        place.peer(ECHO, keys=(str(locked.private),)).call("x")
    assert "ssh-add" in caught.value.hint


def test_keys_of_agent_and_home_are_tried(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sock = str(place.dir / "agent.sock")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL)
    try:
        until(lambda: os.path.exists(sock), 5, "the agent listens")
        monkeypatch.setenv("SSH_AUTH_SOCK", sock)
        subprocess.run(["ssh-add", "-q", str(place.login.private)], check=True, timeout=10)
        assert place.peer(ECHO, keys=()).call("x")["argv"] == ["--json", "x"]
        subprocess.run(
            ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(place.login.private)], check=True, timeout=10
        )
        assert place.peer(ECHO, name="locked").call("x")["argv"] == ["--json", "x"]  # named, locked, open in the agent
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f", str(place.login.private)], check=True)
    finally:
        agent.kill()
        agent.wait()
    monkeypatch.delenv("SSH_AUTH_SOCK")
    (place.dir / ".ssh").mkdir()
    place.login.private.rename(place.dir / ".ssh/id_ed25519")
    assert place.peer(ECHO, keys=(), name="far2").call("x")["argv"] == ["--json", "x"]


def test_jump_host_is_used_and_verified(place: Place) -> None:
    with an_sshd(place.dir / "gate", place.login) as gate:
        via = replace(place.target, name="gate", port=gate.port)
        peer = place.peer(ECHO, via=via)
        with pytest.raises(HostKeyRefused, match="the key of gate"):
            peer.call("x")
        place.know(gate)
        assert peer.call("x")["argv"] == ["--json", "x"]
        assert (gate.logins(), place.server.logins()) == (1, 1)
        with pytest.raises(PeerFailed, match="through gate"):
            place.peer(ECHO, via=via, name="shut", port=1).call("x")
        gate.hang_up()
        assert peer.call("y")["argv"] == ["--json", "y"]  # both connected anew


def test_jump_host_that_forbids_forwarding(place: Place) -> None:
    with an_sshd(place.dir / "gate", place.login, options="AllowTcpForwarding no") as gate:
        place.know(gate)
        with pytest.raises(PeerFailed, match="through gate") as caught:
            place.peer(ECHO, via=replace(place.target, name="gate", port=gate.port)).call("x")
        assert "forwarding" in caught.value.hint and place.server.logins() == 0


def test_silent_server_times_out(place: Place) -> None:
    pool = place.again(SshLimits(connect=0.5))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(PeerFailed, match="no SSH greeting") as caught:
            Peer(replace(place.target, port=silent.getsockname()[1]), pool).call("x")
        assert time.monotonic() - began < bound(5) and caught.value.hint
    with pytest.raises(PeerFailed, match="connection refused"):
        Peer(replace(place.target, port=1), pool).call("x")
    with pytest.raises(PeerFailed, match="cannot resolve the address"):
        Peer(replace(place.target, address="no-such-host.invalid"), pool).call("x")


def test_silent_host_does_not_block_other_hosts(place: Place) -> None:
    pool = place.again(SshLimits(connect=4))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        failed: list[PeerFailed] = []

        def call() -> None:
            try:
                Peer(replace(place.target, name="silent", port=silent.getsockname()[1]), pool).call("x")
            except PeerFailed as error:
                failed.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        connection, _ = silent.accept()
        peer = Peer(replace(place.target, command=place.script(ECHO)), pool)
        assert peer.call("x")["argv"] == ["--json", "x"] and not failed
        connection.close()
        caller.join(10)
        assert failed
    pool.close()


def test_full_backlog_is_a_timeout(place: Place) -> None:
    """Drop packets as a firewall does: the kernel does not answer while the backlog is full."""
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        pool = place.again(SshLimits(connect=0.5))
        with pytest.raises(PeerFailed, match=r"no answer within 0\.5 s"):
            Peer(replace(place.target, port=full.getsockname()[1]), pool).call("x")


def test_broken_connection_raises_peer_lost_and_the_command_keeps_running(place: Place) -> None:
    begun, go, done = place.dir / "begun", place.dir / "go", place.dir / "done"
    peer = place.peer(f"""#!{sys.executable}
import pathlib, sys, time
sys.path.insert(0, {str(PROJECT)!r})
from cmdop_migrate.cli import render
pathlib.Path({str(begun)!r}).touch()
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.05)
for number in range(3):
    render.progress_line({{"number": number}})  # as the commands do
pathlib.Path({str(done)!r}).touch()
""")

    def cut() -> None:
        until(begun.exists, 10, "the command runs")
        place.server.hang_up()

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(Lost, match="far: the connection broke") as caught:
        peer.call("restore", timeout=20)
    cutter.join()
    assert caught.value.code == "peer_lost" and "all, some or nothing" in caught.value.hint
    go.touch()
    until(done.exists, 10, "the command there runs to its end: nobody kills it")
    assert place.peer(ECHO).call("x")["argv"] == ["--json", "x"]


def test_host_that_stops_answering_raises_peer_lost(place: Place) -> None:
    pool = place.again(SshLimits(connect=5, silence=0.5, answer=0.5))
    peer = Peer(replace(place.target, command=place.script("sleep 2; echo '{\"slow\": 1}'")), pool)
    assert peer.call("x") == {"slow": 1}  # its sshd answers all the while
    result: list[BaseException] = []

    def call() -> None:
        try:
            Peer(replace(peer.target, command=place.script("sleep 20")), pool).call("x")
        except errors.CmdopError as error:
            result.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    until(lambda: place.server.log().count("Starting session") == 2, 10, "the command runs")
    with place.server.frozen():
        caller.join(15)
        assert not caller.is_alive() and isinstance(result[0], Lost), result
    pool.close()


def test_host_gone_before_the_command_raises_peer_failed(place: Place) -> None:
    peer = place.peer(ECHO)
    peer.call("x")
    place.server.stop()
    with pytest.raises(PeerFailed) as caught:
        peer.call("y")
    assert not isinstance(caught.value, Lost)
    place.server.start()
    assert peer.call("z")["argv"] == ["--json", "z"]


def test_timeout_and_killed_command_raise_peer_lost(place: Place) -> None:
    with pytest.raises(Lost, match=r"within 0\.5 s"):
        place.peer("sleep 5").call("x", timeout=0.5)
    with pytest.raises(Lost, match="killed there"):
        place.peer("kill -9 $$").call("x")


def test_unread_input_is_no_failure_but_a_broken_connection_is(place: Place) -> None:
    assert place.peer("exec <&-; echo '{\"ok\": 1}'").call("x", stdin=b"x" * 5_000_000) == {"ok": 1}
    pool = place.again(SshLimits(answer=0.5))
    peer = Peer(replace(place.target, command=place.script("sleep 3")), pool)
    with pytest.raises(Lost, match="does not read its input"):
        peer.call("x", stdin=b"x" * 5_000_000)
    pool.close()


def test_orphaned_child_does_not_delay_the_answer(place: Place) -> None:
    began = time.monotonic()
    assert place.peer("sleep 9 & echo '{\"pid\": 1}'").call("run") == {"pid": 1}
    assert time.monotonic() - began < bound(8)


def test_sudo(place: Place) -> None:
    """Log in as a user who may become root for one command only."""
    with tempfile.TemporaryDirectory(prefix="cm-sudo-") as made:
        where = Path(made)  # pytest's own directories are root's alone
        where.chmod(0o755)
        for name in ("allowed", "other"):
            (where / name).write_text("""#!/bin/sh\necho "{\\"uid\\": $(id -u)}"\n""")
            (where / name).chmod(0o755)
        prefix = with_account(where, "tester", f"ALL=(root) NOPASSWD: {where}/allowed")
        with an_sshd(where / "sshd", place.login, prefix=prefix) as server:
            place.know(server)
            target = replace(place.target, user="tester", port=server.port, command=f"{where}/allowed")
            assert Peer(target, place.pool).call() == {"uid": 4711}
            assert Peer(replace(target, sudo=True), place.pool).call() == {"uid": 0}
            with pytest.raises(PeerFailed, match="sudo refused") as caught:
                Peer(replace(target, sudo=True, command=f"{where}/other"), place.pool).call()
            assert "NOPASSWD" in caught.value.hint
