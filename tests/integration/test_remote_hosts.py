"""`hosts add|ls|check|rm`, typed by a person and by a program, against a real sshd and a second host behind it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.host import CM, Host, pair
from tests.support.pty_client import Pty
from tests.support.sshd import Login, Sshd, an_sshd, new_key

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sessions need root")


@dataclass
class Two:
    """host-a, and host-b behind an sshd: `command` there is host-b's own cmdop-migrate."""

    a: Host
    b: Host
    server: Sshd
    login: Login
    dir: Path

    def command(self, **changed: str) -> str:
        path = self.dir / f"cm-{os.urandom(3).hex()}"
        settings = {k: v for k, v in self.b.env(**changed).items() if k.startswith(("CMDOP_", "PYTHONPATH"))}
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in settings.items())
        path.write_text(f'#!/bin/sh\n{exports}exec {shlex.join(CM)} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def adding(self, name: str = "b", **changed: str) -> list[str]:
        how = ["--key", str(self.login.private), "--command", self.command(**changed)]
        return ["hosts", "add", name, self.server.address, *how]

    @property
    def inventory(self) -> dict[str, dict[str, object]]:
        file = self.a.state / "hosts.json"
        hosts: dict[str, dict[str, object]] = json.loads(file.read_text())["hosts"] if file.exists() else {}
        return hosts


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        a, b = stack.enter_context(pair(tmp_path))
        (tmp_path / "home/.ssh").mkdir(parents=True)
        a.extra |= {"HOME": str(tmp_path / "home"), "SSH_AUTH_SOCK": ""}
        login = new_key(tmp_path / "login")
        yield Two(a, b, stack.enter_context(an_sshd(tmp_path / "sshd", login)), login, tmp_path)


def test_the_fingerprint_is_shown_and_asked_for(two: Two) -> None:
    for typed, status in (("n\n", 9), ("y\n", 0)):
        with Pty([*CM, *two.adding()], two.a.env()) as person:
            at = person.expect(two.server.fingerprint.encode())
            assert not two.inventory and two.server.logins() == 0
            person.expect(b"Is this its key? [y/N]", after=at)
            person.type(typed)
            assert person.wait() == status, bytes(person.seen)
    assert list(two.inventory) == ["b"] and two.server.logins() == 1
    with Pty([*CM, *two.adding("b2")], two.a.env()) as person:  # known now: the user is not asked
        assert person.wait() == 0 and b"Is this" not in person.seen


def test_without_a_person_the_fingerprint_must_be_given(two: Two) -> None:
    error = two.a.fails(*two.adding(), status=9, code="host_key_refused")
    assert f"--fingerprint {two.server.fingerprint}" in error["hint"]
    wrong = "SHA256:" + "x" * 43
    said = two.a.cm(*two.adding(), "--fingerprint", wrong).stderr.decode()
    assert wrong in said and two.server.fingerprint in said
    assert not two.inventory and two.server.logins() == 0
    added = two.a.cm_json(*two.adding(), "--fingerprint", two.server.fingerprint)
    assert (added["name"], added["fingerprint"]) == ("b", two.server.fingerprint)
    assert two.a.cm(*two.adding("c"), "--fingerprint", wrong).returncode == 9
    assert list(two.inventory) == ["b"], "a key that is known, and not the one that was given"


def test_a_host_that_is_fit_and_its_key_that_changes(two: Two) -> None:
    two.a.ok(*two.adding(), "--yes")
    checked = json.loads(two.a.cm("--json", "hosts", "check", "b").stdout)
    assert (checked["host"], checked["protocol"]) == ("host-b", 1) and checked["connect_s"] > 0
    assert checked["host_id"] == (two.b.state / "host-id").read_text()
    done = two.a.cm("hosts", "check", "b")
    assert done.returncode == (0 if checked["ok"] else 9)
    assert b"same store, lease store and key" in done.stdout and b"b is " in done.stdout
    two.server.stop()
    (two.server.dir / "host_key").unlink()
    (two.server.dir / "host_key.pub").unlink()
    before = two.a.events()[-1]["key"]
    new_key(two.server.dir / "host_key")
    two.server.start()
    refused = two.a.cm("hosts", "check", "b")
    said = refused.stderr.decode()
    assert refused.returncode == 9 and "HAS CHANGED" in said and "hosts rm b" in said
    assert before in said and two.server.fingerprint in said
    two.a.ok("hosts", "rm", "b")
    two.a.ok(*two.adding(), "--fingerprint", two.server.fingerprint)
    two.server.stop()
    assert "refused" in two.a.fails("hosts", "check", "b", status=9, code="peer_failed")["message"]


def test_what_a_host_must_have_in_common(two: Two) -> None:
    """The rules are in tests/unit/test_remote_rules.py; here that they are asked, of the places themselves."""
    link = two.dir / "lease-link.db"
    link.symlink_to(two.dir / "lease/lease.db")
    for setting, value, code in (
        ("LEASE", f"sqlite://{link}", None),  # another address of the same place
        ("LEASE", f"sqlite://{two.dir}/other.db", "peer_differs"),
        ("STORE", f"file://{two.dir}/other-store", "peer_differs"),
        ("STATE_DIR", str(two.a.state), "usage"),
    ):
        two.a.ok(*two.adding("b", **{f"CMDOP_MIGRATE_{setting}": value}), "--yes")
        answer = json.loads(two.a.cm("--json", "hosts", "check", "b").stdout)
        assert answer.get("error", {}).get("code") == code, answer


def test_where_hosts_come_from(two: Two) -> None:
    two.a.ok(*two.adding("kept"), "--yes")
    (two.dir / "home/.ssh/config").write_text(
        f"Host from-ssh\n HostName 127.0.0.1\n Port {two.server.port}\n User root\n"
    )
    config = two.dir / "config.toml"
    config.write_text('[hosts.written]\naddress = "10.1.2.3"\njump = "kept"\nsudo = true\n')
    two.a.extra["CMDOP_MIGRATE_CONFIG"] = str(config)
    listed = {one["name"]: one for one in two.a.cm_json("hosts", "ls")["hosts"]}
    assert {name: one["source"] for name, one in listed.items()} == {
        "kept": "inventory", "written": "config file", "from-ssh": "~/.ssh/config",
    }  # fmt: skip
    assert (listed["written"]["jump"], listed["written"]["sudo"]) == ("kept", True)
    assert listed["from-ssh"]["port"] == two.server.port
    rows = two.a.ok("hosts", "ls").splitlines()
    assert rows[0].split() == ["NAME", "ADDRESS", "JUMP", "SUDO", "FROM"] and len(rows) == 4
    error = two.a.fails("hosts", "check", "nowhere", status=3, code="host_not_found")
    assert "from-ssh, kept, written" in error["hint"]
    assert two.a.cm("hosts", "add", "written", "10.9.9.9").returncode == 2
    refused = two.a.cm("hosts", "rm", "written")
    assert refused.returncode == 2 and b"config file" in refused.stderr
    assert two.a.cm_json("hosts", "rm", "kept") == {"removed": "kept"} and not two.inventory
    assert (two.a.state / "known_hosts").read_text() != "", "the host of ~/.ssh/config is at the same address"


def test_a_host_behind_another(two: Two) -> None:
    """The fingerprint given is the far host's: the one in between must be known by itself."""
    with an_sshd(two.dir / "gate", two.login) as gate:
        through = ["--fingerprint", two.server.fingerprint, "--jump"]
        key = ["--key", str(two.login.private)]
        said = two.a.cm(*two.adding(), *through, gate.address).stderr.decode()
        assert gate.fingerprint in said and "Add it first" in said and gate.logins() == 0
        two.a.ok("hosts", "add", "gate", gate.address, *key, "--fingerprint", gate.fingerprint)
        two.a.ok(*two.adding(), *through, "gate")
        assert (gate.logins(), two.server.logins()) == (2, 1)
        assert two.a.cm_json("hosts", "ls")["hosts"][0]["jump"] == "gate"
