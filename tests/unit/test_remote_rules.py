"""Test host entries, their precedence, and what two hosts must have in common. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate import config, host_entry
from cmdop_migrate.errors import BadConfig, HostNotFound, PeerDiffers, Usage
from cmdop_migrate.host_entry import HostEntry
from cmdop_migrate.lease.memory import MemoryRegister
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.lease.store_id import identity
from cmdop_migrate.migration import compatibility
from cmdop_migrate.remote.inventory import Inventory, SshTarget
from cmdop_migrate.remote.peer import command_line
from cmdop_migrate.storage.memory import MemoryStore


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("host-b", (None, "host-b", None)),
        ("10.0.0.2:2222", (None, "10.0.0.2", 2222)),
        ("root@h.example:22", ("root", "h.example", 22)),
        ("fd00::2", (None, "fd00::2", None)),
        ("u@[fd00::2]:2222", ("u", "fd00::2", 2222)),
        ("fe80::1%eth0", (None, "fe80::1%eth0", None)),
    ],
)
def test_host_addresses(text: str, found: tuple[str | None, str, int | None]) -> None:
    assert host_entry.split_login(text) == found


@pytest.mark.parametrize(
    "text", ["", ":22", "h:", "h:0", "h:65536", "h:x", "a b", "-oX", "[::1", "h/x", "@", "ü", "a\nb"]
)
def test_invalid_host_address_is_refused(text: str) -> None:
    with pytest.raises(Usage) as caught:
        host_entry.split_login(text)
    assert caught.value.hint and "\n" not in caught.value.message


@given(st.text(max_size=30))
def test_any_host_address_is_parsed_or_refused(text: str) -> None:
    try:
        _, address, port = host_entry.split_login(text)
    except Usage:
        return
    assert address and not address.startswith("-") and address.isascii() and (port is None or 0 < port < 65536)


def load(tmp_path: Path, text: str) -> config.Config:
    (tmp_path / "config.toml").write_text(text)
    return config.load(str(tmp_path / "config.toml"), {"state_dir": str(tmp_path)}, {})


def test_hosts_in_the_config_file(tmp_path: Path) -> None:
    got = load(
        tmp_path, 'host = "a"\n[hosts.b]\naddress = "h"\nport = 2222\nsudo = true\n[hosts."c.d"]\naddress = "::1"\n'
    )
    assert got.hosts == (HostEntry("b", "h", 2222, sudo=True), HostEntry("c.d", "::1"))
    assert (got.host, load(tmp_path, "").hosts) == ("a", ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('\n[hosts.b]\naddress = "h"\nprot = 1', ":4: unknown key 'prot' of a host"),
        ('[hosts.a]\naddress = "h"\nport = 22\n[hosts.b]\naddress = "h"\nport = 0', ":6: not a port"),
        ('[hosts.b]\naddress = "h"\nport = "22"', ":3: port must be a number"),
        ('[hosts.b]\naddress = "h"\nport = true', ":3: port must be a number"),
        ('[hosts.b]\naddress = "h"\nsudo = "yes"', ":3: sudo must be true or false"),
        ('[hosts.b]\naddress = "h"\nkey = "id"', ":3: key: not an absolute path"),
        ('[hosts.b]\naddress = "h:22"', ":2: not an address"),
        ('\n[hosts.b]\nuser = "x"', ":2: host 'b' has no address"),
        ('\n[hosts."a b"]\naddress = "x"', ":2: not a host name"),
        ('\nhosts = "b"', ":2: hosts must have one table per host"),
        ('[hosts]\nb = "h"', "hosts must have one table per host"),
    ],
)
def test_bad_hosts_in_the_config_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        load(tmp_path, text)
    assert words in caught.value.message and caught.value.hint


SSH = """
Host gate
  HostName gate.example
  User jumper
Host b-alias 10.0.0.9
  HostName 10.0.0.9
  Port 2200
  User from-ssh
  IdentityFile {home}/there
  IdentityFile ~/missing
  ProxyJump gate
Host *.example !not.example
  User everyone
Host strange
  ProxyCommand nc %h %p
"""


def an_inventory(tmp_path: Path, *written: HostEntry) -> Inventory:
    (tmp_path / ".ssh").mkdir(exist_ok=True)
    (tmp_path / "there").touch()
    (tmp_path / ".ssh/config").write_text(
        SSH.format(home=tmp_path).replace("Host strange\n  ProxyCommand nc %h %p\n", "")
    )
    return Inventory(tmp_path, written, tmp_path)


def test_config_file_precedes_inventory_and_ssh_config(tmp_path: Path) -> None:
    inventory = an_inventory(tmp_path, HostEntry("one", "written.example"))
    inventory.add(HostEntry("one", "kept.example"))
    inventory.add(HostEntry("gate", "10.0.0.1", user="mine"))
    assert (
        inventory.find("one").address == "written.example"
        and inventory.find("one").source == "config file, ~/.ssh/config"
    )
    gate = inventory.find("gate")
    assert (gate.address, gate.user, gate.source) == ("10.0.0.1", "mine", "inventory")
    alias = inventory.find("b-alias")
    assert (alias.address, alias.port, alias.user, alias.source) == ("10.0.0.9", 2200, "from-ssh", "~/.ssh/config")
    assert alias.keys == (str(tmp_path / "there"),) and alias.via == gate
    assert [one.name for one in inventory.all()] == ["10.0.0.9", "b-alias", "gate", "one"]


def test_missing_host_settings_come_from_ssh_config(tmp_path: Path) -> None:
    inventory = an_inventory(tmp_path)
    found = inventory.resolve(HostEntry("b", "10.0.0.9", user="mine"))
    assert (found.port, found.user, found.keys) == (2200, "mine", (str(tmp_path / "there"),))
    assert found.via is not None and (found.via.address, found.via.user) == ("gate.example", "jumper")
    own = inventory.resolve(HostEntry("b", "10.0.0.9", 22, "mine", "/k", "u@x:1,gate"))
    assert (own.port, own.keys, own.source) == (22, ("/k",), "inventory")
    assert own.via is not None and own.via.via is not None
    assert (own.via.address, own.via.via.user, own.via.via.port) == ("gate.example", "u", 1)


def test_cyclic_jump_hosts_and_proxy_commands_are_refused(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path, (HostEntry("a", "h1", jump="b"), HostEntry("b", "h2", jump="a")), tmp_path)
    with pytest.raises(BadConfig, match="cycle"):
        inventory.find("a")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text(SSH)
    with pytest.raises(BadConfig, match="ProxyCommand"):
        Inventory(tmp_path, (), tmp_path).find("strange")


def test_unknown_hosts_and_a_damaged_inventory(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path, (HostEntry("a", "h"),), tmp_path)
    inventory.add(HostEntry("b", "h", 22, "u", "/k", "a", True, "/c"))
    assert inventory.find("b") == SshTarget("b", "h", "inventory", 22, "u", ("/k",), inventory.find("a"), True, "/c")
    with pytest.raises(HostNotFound) as caught:
        inventory.find("c")
    assert "a, b" in caught.value.hint
    with pytest.raises(Usage, match="config file"):
        inventory.remove("a")
    for text in ("", "[]", '{"format": 2, "hosts": {}}', '{"format": 1}', '{"format": 1, "hosts": {"b": {"x": 1}}}',
                 '{"format": 1, "hosts": []}', "\xff"):  # fmt: skip
        (tmp_path / "hosts.json").write_text(text, encoding="latin-1")
        with pytest.raises(BadConfig, match=r"hosts\.json") as damaged:
            inventory.all()
        assert damaged.value.hint


def test_command_lines() -> None:
    target = SshTarget("b", "h", "test", command="/opt/c m")
    assert command_line(target, ("a b", "$x")) == b"'/opt/c m' --json 'a b' '$x'"
    assert command_line(SshTarget("b", "h", "t", sudo=True), ()) == b"sudo -n -- cmdop-migrate --json"


OURS: dict[str, Any] = {
    "host_id": "a",
    "store": {"url": "s3://x/", "id": "1"},
    "lease": {"url": "sqlite:///f", "id": "2"},
    "keys": ["k2", "k1"],
}


def test_alike_enough() -> None:
    theirs = {
        **OURS,
        "host_id": "b",
        "store": {"url": "s3://x/?endpoint=http://other", "id": "1"},
        "keys": ["k3", "k2"],
    }
    compatibility.check("b", OURS, theirs)


@pytest.mark.parametrize(
    ("change", "kind", "words", "hint"),
    [
        ({"host_id": "a"}, Usage, "b is this host itself", "another"),
        (
            {"store": {"url": "s3://y/", "id": "9"}},
            PeerDiffers,
            "another store: s3://y/, this host s3://x/",
            "same value on both hosts",
        ),
        ({"lease": {"url": "sqlite:///f", "id": "9"}}, PeerDiffers, "another lease store: sqlite:///f", "each machine"),
        ({"keys": ["k1"]}, PeerDiffers, "does not have the key k2", "key export"),
        ({"keys": []}, PeerDiffers, "does not have the key k2", "key export"),
    ],
)
def test_not_alike(change: dict[str, Any], kind: type[Usage], words: str, hint: str) -> None:
    with pytest.raises(kind) as caught:
        compatibility.check("b", OURS, {**OURS, "host_id": "b", **change})
    assert words in caught.value.message and hint in caught.value.hint


def test_store_and_lease_store_have_one_permanent_id_each() -> None:
    register, store = MemoryRegister(), MemoryStore()
    first = identity(LeaseStore(register)), compatibility.store_identity(store)
    assert (identity(LeaseStore(register)), compatibility.store_identity(store)) == first
    assert (
        identity(LeaseStore(MemoryRegister())) != first[0] and compatibility.store_identity(MemoryStore()) != first[1]
    )


def test_progress_lines_without_a_listener_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    from cmdop_migrate.cli import render

    render.progress_line({"phase": "fetch"})
    assert json.loads(capsys.readouterr().out) == {"progress": {"phase": "fetch"}}
