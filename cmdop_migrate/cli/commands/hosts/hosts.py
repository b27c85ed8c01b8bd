"""Add, list, check and remove the hosts that sessions can move to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from cmdop_migrate import host_entry
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import HostKeyRefused, PeerFailed, Usage
from cmdop_migrate.migration import peers
from cmdop_migrate.remote.inventory import SshTarget
from cmdop_migrate.remote.knownhosts import ShownKey


@click.group(epilog="Example: cmdop-migrate hosts ls")
def hosts() -> None:
    """Add, list, check or remove the hosts that sessions can move to.

    Also known: [hosts.NAME] in the config file, and the hosts of ~/.ssh/config.
    """


@hosts.command("add")
@click.argument("name")
@click.argument("address", metavar="ADDRESS[:PORT]")
@click.option("--user", metavar="USER", help="Log in as this user.")
@click.option("--key", metavar="FILE", help="Private key to log in with; keys of ssh-agent are tried too.")
@click.option("--jump", metavar="HOST", help="Connect through this host: a known one, or [user@]address[:port].")
@click.option("--sudo", is_flag=True, help="Run cmdop-migrate there with sudo -n.")
@click.option("--command", metavar="PATH", help="Path of cmdop-migrate there, if not in its PATH.")
@click.option("--yes", is_flag=True, help="Accept the host's key without asking: for networks you trust.")
@click.option("--fingerprint", "expected", metavar="SHA256:…", help="Accept the host's key if it is this one.")
@command
def add_host(app: App, name: str, address: str, yes: bool, expected: str | None, **given: Any) -> None:
    """Connect to a host, show its key, and add it once you confirm.

    Compare the fingerprint with the one on the host itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub

    \b
    Examples:
      cmdop-migrate hosts add host-b 10.0.0.2
      cmdop-migrate hosts add host-b 10.0.0.2:2222 --user admin --sudo --jump gate
    """
    this_host = app.this_host(keeping=False)
    inventory = peers.inventory(app.config)
    if inventory.is_written(name):
        raise Usage(f"host {name!r} is in the config file", "Change it there, or add it under another name.")
    if given["key"]:
        given["key"] = str(Path(given["key"]).expanduser().absolute())
    where, port = host_entry.split_address(address)
    table = {"address": where, "port": port, **given}
    entry = host_entry.make(name, {key: value for key, value in table.items() if value is not None})
    target = inventory.resolve(entry)

    def accept(hop: SshTarget, key: ShownKey) -> bool:
        if hop == target:
            return _accepts(app, hop, key, yes, expected)
        return _accepts(app, hop, key, yes, None, f"Add it first: cmdop-migrate hosts add {hop.name} {hop.shown}")

    with peers.pool(app.config) as pool:
        pool.transport(target, accept)
        key = pool.host_key(target)
    if expected is not None and key.fingerprint != expected:
        raise _other_key(target, key, expected)
    inventory.add(entry)
    this_host.events.emit("host_added", name=name, address=target.shown, key=key.fingerprint)
    facts = {**target.to_json(), "fingerprint": key.fingerprint}
    if app.json:
        render.answer(facts)
    else:
        render.line(f"{name}: {target.shown}, key {key}. Next: cmdop-migrate hosts check {name}")


def _accepts(app: App, target: SshTarget, key: ShownKey, yes: bool, expected: str | None, hint: str = "") -> bool:
    if expected is not None:
        if key.fingerprint != expected:
            raise _other_key(target, key, expected)
        return True
    if yes:
        return True
    if app.json or not sys.stdin.isatty():
        raise HostKeyRefused(
            f"the key of {target.name} ({target.known_as}) is not known: {key}",
            hint or f"Compare it with the host's own, then add: --fingerprint {key.fingerprint}",
        )
    render.note(f"{target.name} ({target.known_as}) is not known yet. Its key is:\n  {key}")
    return click.confirm("Is this its key?", err=True)


def _other_key(target: SshTarget, key: ShownKey, expected: str) -> HostKeyRefused:
    return HostKeyRefused(
        f"{target.name} ({target.known_as}) shows another key: expected {expected}, got {key}",
        "The connection may be intercepted. Compare on the host: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
    )


@hosts.command("ls")
@command
def list_hosts(app: App) -> None:
    """List the known hosts, and where each is configured.

    \b
    Examples:
      cmdop-migrate hosts ls
    """
    targets = peers.inventory(app.config).all()
    if app.json:
        render.answer({"hosts": [target.to_json() for target in targets]})
        return
    render.table(
        ("NAME", "ADDRESS", "JUMP", "SUDO", "FROM"),
        (
            (
                target.name,
                target.shown,
                target.via.name if target.via else "-",
                "yes" if target.sudo else "-",
                target.source,
            )
            for target in targets
        ),
    )


@hosts.command("check")
@click.argument("name")
@command
def check_host(app: App, name: str) -> int:
    """Connect to a host, and check whether sessions can move there.

    \b
    Examples:
      cmdop-migrate hosts check host-b
    """
    this_host = app.this_host()
    with peers.pool(app.config) as pool:
        result = peers.check_host(this_host, pool, name)
    if app.json:
        render.answer(result.to_json())
    else:
        rows = [
            ("reached", f"{result.address} in {result.connect_s * 1000:.0f} ms"),
            ("answers", f"in {result.answer_s * 1000:.0f} ms, as {result.host} ({result.host_id})"),
            ("version", f"{result.version}, protocol {result.protocol}; same store, lease store and key"),
            *((check["name"], f"{check['level']}: {check['message']}") for check in result.checks),
        ]
        render.table(("CHECK", "WHAT"), rows)
        render.line(f"\n{name} is ready." if result.ok else f"\n{name} is not ready. There: cmdop-migrate doctor")
    return 0 if result.ok else PeerFailed.exit


@hosts.command("rm")
@click.argument("name")
@command
def remove_host(app: App, name: str) -> None:
    """Remove a host and its key.

    \b
    Examples:
      cmdop-migrate hosts rm host-b
    """
    this_host = app.this_host(keeping=False)
    inventory = peers.inventory(app.config)
    target = inventory.find(name)
    inventory.remove(name)
    peers.forget_key(app.config, target)
    this_host.events.emit("host_removed", name=name)
    if app.json:
        render.answer({"removed": name})
    else:
        render.line(f"{name}: removed")
