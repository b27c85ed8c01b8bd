"""relay serve, relay identity, relay token."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Usage
from cmdop_migrate.gateway import credentials
from cmdop_migrate.relay.credentials import CLIENT_ROLES, Role

FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(epilog="Example: cmdop-migrate relay serve --listen 0.0.0.0:7443")
def relay() -> None:
    """Where clients find sessions, wherever they run: the server, and who may use it."""


@relay.command()
@click.option("--listen", default="0.0.0.0:7443", show_default=True, metavar="HOST:PORT", help="Where.")
@click.option("--cert", type=FILE, help="PEM file with the certificate [a self-signed one, made once].")
@click.option("--key", type=FILE, help="PEM file with its key [in the same file].")
@click.option("--no-tls", is_flag=True, help="Plain, behind a proxy of yours. Only on loopback.")
@click.option("--identity", metavar="PUBKEY", help="Whose credentials to believe [this host's fleet].")
@click.option("--origin", "origins", multiple=True, metavar="URL", help="A page elsewhere that may connect.")
@click.option(
    "--assets", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Files to serve as a page."
)
@click.option("--max-connections", type=click.IntRange(1), default=10_000, show_default=True, help="In all.")
@command
def serve(app: App, no_tls: bool, max_connections: int, **wish: Any) -> None:
    """Run a relay. It keeps nothing that the next one needs; any number may run over one lease store.

    \b
    Examples:
      cmdop-migrate relay serve
      cmdop-migrate relay serve --listen 0.0.0.0:443 --cert fullchain.pem --key privkey.pem
      cmdop-migrate relay serve --identity "$(ssh host-a cmdop-migrate relay identity)"
    """
    from cmdop_migrate.gateway import serve_relay as flow

    if wish["key"] and not wish["cert"]:
        raise Usage("--key without --cert", "Give both.")

    def say(facts: dict[str, Any]) -> None:
        if app.json:
            render.answer(facts)
            return
        scheme = "wss" if facts["tls"] else "ws"
        render.line(f"relay on {scheme}://{facts['listen']}:{facts['port']} for the fleet {facts['identity']}")
        if facts["pin"]:
            render.line(f"certificate SHA-256 {facts['pin']}")

    flow.serve(app.config, flow.RelayOptions(tls=not no_tls, connections=max_connections, **wish), say)


@relay.command()
@command
def identity(app: App) -> None:
    """The fleet's public key: what a relay elsewhere is given with --identity.

    \b
    Examples:
      cmdop-migrate relay identity
    """
    shown = credentials.shown(credentials.identity(app.config))
    if app.json:
        render.answer({"identity": shown})
    else:
        render.line(shown)


@relay.group(epilog="Example: cmdop-migrate relay token ls --all")
def token() -> None:
    """Credentials for the relay: make, list, revoke."""


@token.command()
@click.option("--actor", metavar="NAME", help="For a person or a program of this name.")
@click.option("--host", "host", metavar="NAME", help="For a host of this name, instead.")
@click.option("--role", type=click.Choice(CLIENT_ROLES), help="What it may do.")
@click.option("--session", "sessions", metavar="GLOB", help="For which sessions, by name or id.")
@click.option("--expires", metavar="TIME", help="When it ends: 8h, 30d, never [8h; a host's: never].")
@click.option("--relay", "url", metavar="URL", help="Where to dial; written into it [the setting `relay`].")
@click.option("--pin", metavar="SHA256", help="The relay's certificate; written into it [a self-signed one here].")
@click.option("--out", type=FILE, help="Write it to this file, for its owner alone, and do not print it.")
@command
def create(
    app: App,
    actor: str | None,
    host: str | None,
    role: str | None,
    sessions: str | None,
    expires: str | None,
    url: str | None,
    pin: str | None,
    out: Path | None,
) -> None:
    """Make a credential. Who has it is admitted: carry it as you would a password.

    \b
    Examples:
      cmdop-migrate relay token create --actor alice --role execute --session 'web-*' --expires 8h
      cmdop-migrate relay token create --host host-a --out /var/lib/cmdop-migrate/relay.credential
    """
    where = credentials.RelayAddress(url, _pin(pin))
    if (actor is None) == (host is None):
        raise Usage("a credential is for an actor or for a host", "Give one of --actor and --host.")
    if out is None and render.is_void():
        raise Usage("standard output is closed or the null device: nobody would have it", "Give a file, with --out.")
    if host is not None:
        if role or sessions:
            raise Usage("a host's credential has no role and no sessions", "Leave --role and --session out.")
        made = credentials.create_host(app.config, host, _seconds(expires or "never"), where)
    else:
        if role is None or sessions is None:
            raise Usage("what may it do, and where?", "Give --role and --session; --session '*' is all of them.")
        seconds = _seconds(expires or "8h")
        made = credentials.create_client(app.config, str(actor), cast(Role, role), sessions, seconds, where)
    claims = made.claims
    facts = {"id": claims.id, "kind": claims.kind, "name": claims.name, "role": claims.role}
    facts |= {"sessions": claims.sessions, "expires": cast(Any, claims.expires), "relay": cast(Any, made.relay)}
    with credentials.revoked_unless_delivered(app.config, made):
        if out is not None:
            credentials.save(out, made)
        else:
            render.only(json.dumps(facts | {"credential": made.text()}) if app.json else made.text())
    if host == app.config.host:
        _say_if_outdated(app)
    if not app.json:
        render.note(f"{claims.id}: {claims.role} for {claims.name}, until {_until(claims.expires)}")
    if out is not None:
        render.answer(facts | {"file": str(out)}) if app.json else render.line(str(out))


def _say_if_outdated(app: App) -> None:
    """Whoever makes this host's credential is linking it: an agent that runs would not notice."""
    from cmdop_migrate.gateway import check

    old = check.outdated(app.config)
    if old is not None:
        render.note(f"{old[0]}. {old[1]}")


@token.command("ls")
@click.option("--all", "everything", is_flag=True, help="Also those that are over or revoked.")
@command
def ls(app: App, everything: bool) -> None:
    """Credentials that were made. None of them can be printed again.

    \b
    Examples:
      cmdop-migrate relay token ls --all
    """
    found = [credentials.facts(one) for one in credentials.listing(app.config)]
    shown = [one for one in found if everything or one["state"] == "valid"]
    if app.json:
        render.answer({"tokens": shown})
        return
    rows = [
        (one["id"], one["name"], one["role"], one["sessions"], one["state"], _until(one["expires"])) for one in shown
    ]
    render.table(("ID", "NAME", "ROLE", "SESSIONS", "STATE", "UNTIL"), [[str(cell) for cell in row] for row in rows])


@token.command()
@click.argument("ident", metavar="ID")
@command
def revoke(app: App, ident: str) -> None:
    """End a credential: relays put out who came with it within seconds.

    \b
    Examples:
      cmdop-migrate relay token revoke 3f9c1a
    """
    facts = credentials.facts(credentials.revoke(app.config, ident))
    if app.json:
        render.answer(facts)
    else:
        render.line(f"revoked {facts['id']}, {facts['role']} for {facts['name']}")


def _seconds(text: str) -> float | None:
    return None if text == "never" else units.duration(text)


def _until(expires: object) -> str:
    if not isinstance(expires, int):
        return "never"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(expires))


def _pin(text: str | None) -> str | None:
    if text is None:
        return None
    plain = text.replace(":", "").lower()
    if len(plain) != 64 or any(one not in "0123456789abcdef" for one in plain):
        raise Usage(f"not a SHA-256: {text!r}", "Give the 64 hex digits that `relay serve` prints.")
    return plain


@click.command(hidden=True)
@command
def link(app: App) -> None:
    """This host's connection to the relay; its agent runs it.

    \b
    Examples:
      cmdop-migrate link
    """
    from cmdop_migrate.gateway import link_main

    link_main.serve(app.this_host(keeping=False))
