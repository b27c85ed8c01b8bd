"""`relay identity`, `relay token`, and how `relay serve` fails: the words a person types."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from cmdop_migrate.relay.credentials import parse
from tests.support.host import Host


@pytest.fixture
def at(tmp_path: Path) -> Host:
    return Host(tmp_path, name="host-t", subnet="100.64.0.0/24")


def test_a_credential_is_made_listed_and_revoked(at: Host) -> None:
    who = ("--actor", "alice", "--role", "execute", "--session", "web-*", "--expires", "8h")
    made = at.cm_json("relay", "token", "create", *who, env={"CMDOP_MIGRATE_RELAY": "wss://relay:7443"})
    credential = parse(made["credential"])
    assert (credential.claims.name, credential.claims.role, credential.claims.sessions) == ("alice", "execute", "web-*")
    assert credential.relay == "wss://relay:7443" and made["relay"] == "wss://relay:7443"
    assert at.cm_json("relay", "identity")["identity"] == at.ok("relay", "identity").strip()
    (listed,) = at.cm_json("relay", "token", "ls")["tokens"]
    assert listed["id"] == made["id"] and listed["state"] == "valid" and listed["expires"] == made["expires"]
    shown = at.ok("relay", "token", "ls")
    assert "alice" in shown and made["credential"] not in shown
    assert at.cm_json("relay", "token", "revoke", made["id"][:6])["state"] == "revoked"
    assert at.cm_json("relay", "token", "ls")["tokens"] == []
    assert at.cm_json("relay", "token", "ls", "--all")["tokens"][0]["revoked"] is not None


def test_a_hosts_credential_goes_to_a_file_of_its_own(at: Host, tmp_path: Path) -> None:
    file = tmp_path / "relay.credential"
    done = at.cm("relay", "token", "create", "--host", "host-b", "--out", str(file))
    assert done.returncode == 0 and b"cmr1_" not in done.stdout + done.stderr
    assert os.stat(file).st_mode & 0o777 == 0o600
    claims = parse(file.read_text()).claims
    assert (claims.kind, claims.name, claims.role, claims.expires) == ("host", "host-b", "host", None)


def test_a_credential_that_cannot_be_written_is_not_left_valid(at: Host) -> None:
    for out in (at.dir / "no" / "such", Path(__file__) / "no", Path("/proc/no")):
        error = at.fails("relay", "token", "create", "--host", "host-b", "--out", str(out), status=2, code="usage")
        assert "cannot write" in error["message"]
    assert at.cm_json("relay", "token", "ls")["tokens"] == []
    assert {one["state"] for one in at.cm_json("relay", "token", "ls", "--all")["tokens"]} == {"revoked"}


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize("to", ["broken", "full", "null", "closed"])
def test_a_credential_that_is_not_read_is_not_left_valid(at: Host, to: str, flags: tuple[str, ...]) -> None:
    words = at.argv(*flags, "relay", "token", "create", "--actor", "a", "--role", "read", "--session", "*")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as broken, open("/dev/full", "wb") as full, open(os.devnull, "wb") as null:
        where = {"broken": broken, "full": full, "null": null, "closed": None}[to]
        closing = ["sh", "-c", 'exec "$@" >&-', "sh"] if where is None else []
        done = subprocess.run(
            [*closing, *words], env=at.env(), stdout=where, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 2, done.stderr
    if not (flags and to in ("null", "closed")):  # else what is wrong went the same way, as asked
        assert b"standard output" in done.stderr and b"--out" in done.stderr and b"cmr1_" not in done.stderr
    assert at.cm_json("relay", "token", "ls")["tokens"] == []
    kept = at.cm_json("relay", "token", "ls", "--all")["tokens"]
    assert [one["state"] for one in kept] == ([] if to in ("null", "closed") else ["revoked"])


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        (("token", "create"), 2, "usage"),
        (("token", "create", "--actor", "a", "--host", "b"), 2, "usage"),
        (("token", "create", "--actor", "a b", "--role", "read", "--session", "*"), 2, "usage"),
        (("token", "create", "--actor", "a", "--role", "read", "--session", "*", "--expires", "0s"), 2, "usage"),
        (("token", "revoke", "abc"), 3, "not_found"),
        (("serve", "--listen", "0.0.0.0:0", "--no-tls"), 2, "usage"),
        (("serve", "--listen", "127.0.0.1:0", "--identity", "x"), 2, "usage"),
        (("serve", "--listen", "127.0.0.1:0"), 2, "bad_config"),  # whose credentials?
        (("serve", "--listen", "127.0.0.1:0", "--identity", "A" * 43, "--cert", "/dev/null"), 2, "bad_config"),
    ],
)
def test_invalid_options_are_refused_with_a_hint(at: Host, words: tuple[str, ...], status: int, code: str) -> None:
    at.fails("relay", *words, status=status, code=code)


def test_a_port_in_use_is_reported(at: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        at.fails("relay", "serve", "--listen", where, "--identity", "A" * 43, status=2, code="usage")


def test_an_unreachable_lease_store_is_reported_at_start(at: Host) -> None:
    away = {"CMDOP_MIGRATE_LEASE": "etcd://127.0.0.1:1"}
    words = ("relay", "serve", "--listen", "127.0.0.1:0", "--identity", "A" * 43)
    at.fails(*words, status=6, code="lease_unreachable", env=away)
