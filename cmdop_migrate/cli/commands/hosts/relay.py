"""Run a relay, and manage the credentials for it."""

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
    """Run a relay, where clients find sessions on any host, and manage credentials for it."""


@relay.command()
@click.option("--listen", default="0.0.0.0:7443", show_default=True, metavar="HOST:PORT", help="Address to listen on.")
@click.option("--cert", type=FILE, help="PEM file with the certificate [self-signed, made once].")
@click.option("--key", type=FILE, help="PEM file with its key [in the same file].")
@click.option("--no-tls", is_flag=True, help="Without TLS, behind your own proxy. Only on loopback.")
@click.option("--identity", metavar="PUBKEY", help="Accept credentials of this fleet [this host's fleet].")
@click.option(
    "--origin", "origins", multiple=True, metavar="URL", help="Allow web pages of this origin to connect. Repeatable."
)
@click.option(
    "--assets",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory with the web page to serve.",
)
@click.option(
    "--max-connections", type=click.IntRange(1), default=10_000, show_default=True, help="Limit for all connections."
)
@command
def serve(app: App, no_tls: bool, max_connections: int, **options: Any) -> None:
    """Run a relay. Relays keep no state: any number may run over one lease store.

    \b
    Examples:
      cmdop-migrate relay serve
      cmdop-migrate relay serve --listen 0.0.0.0:443 --cert fullchain.pem --key privkey.pem
      cmdop-migrate relay serve --identity "$(ssh host-a cmdop-migrate relay identity)"
    """
    from cmdop_migrate.gateway import serve_relay

    if options["key"] and not options["cert"]:
        raise Usage("--key without --cert", "Give both.")

    def report(facts: dict[str, Any]) -> None:
        if app.json:
            render.answer(facts)
            return
        scheme = "wss" if facts["tls"] else "ws"
        render.line(f"relay on {scheme}://{facts['listen']}:{facts['port']} for the fleet {facts['identity']}")
        if facts["pin"]:
            render.line(f"certificate SHA-256 {facts['pin']}")

    serve_relay.serve(
        app.config, serve_relay.RelayOptions(tls=not no_tls, connections=max_connections, **options), report
    )


@relay.command()
@command
def identity(app: App) -> None:
    """Show the fleet's public key, for `relay serve --identity` on another machine.

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
    """Make, list or revoke credentials for the relay."""


@token.command()
@click.option("--actor", metavar="NAME", help="Make it for a person or a program of this name.")
@click.option("--host", "host", metavar="NAME", help="Make it for a host of this name instead.")
@click.option("--role", type=click.Choice(CLIENT_ROLES), help="What its owner may do.")
@click.option("--session", "sessions", metavar="GLOB", help="Sessions it is valid for, by name or id.")
@click.option("--expires", metavar="TIME", help="When it expires: 8h, 30d, never [8h; a host's: never].")
@click.option("--relay", "url", metavar="URL", help="Relay to connect to; written into it [the setting `relay`].")
@click.option(
    "--pin", metavar="SHA256", help="Digest of the relay's certificate; written into it [of a self-signed one here]."
)
@click.option("--out", type=FILE, help="Write it to this file, readable by its owner only, instead of printing it.")
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
    """Make a credential. Protect it like a password: the relay admits every client that has it.

    \b
    Examples:
      cmdop-migrate relay token create --actor alice --role execute --session 'web-*' --expires 8h
      cmdop-migrate relay token create --host host-a --out /var/lib/cmdop-migrate/relay.credential
    """
    where = credentials.RelayAddress(url, _pin(pin))
    if (actor is None) == (host is None):
        raise Usage("a credential is for an actor or for a host", "Give one of --actor and --host.")
    if out is None and render.is_void():
        raise Usage(
            "standard output is closed or the null device: the credential would be lost", "Give a file, with --out."
        )
    if host is not None:
        if role or sessions:
            raise Usage("a host's credential has no role and no sessions", "Leave --role and --session out.")
        credential = credentials.create_host(app.config, host, _seconds(expires or "never"), where)
    else:
        if role is None or sessions is None:
            raise Usage("--role and --session are missing", "Give --role and --session; --session '*' is all of them.")
        seconds = _seconds(expires or "8h")
        credential = credentials.create_client(app.config, str(actor), cast(Role, role), sessions, seconds, where)
    claims = credential.claims
    facts = {"id": claims.id, "kind": claims.kind, "name": claims.name, "role": claims.role}
    facts |= {"sessions": claims.sessions, "expires": cast(Any, claims.expires), "relay": cast(Any, credential.relay)}
    with credentials.revoked_unless_delivered(app.config, credential):
        if out is not None:
            credentials.save(out, credential)
        else:
            render.only(json.dumps(facts | {"credential": credential.text()}) if app.json else credential.text())
    if host == app.config.host:
        _warn_if_outdated(app)
    if not app.json:
        render.note(f"{claims.id}: {claims.role} for {claims.name}, until {_until(claims.expires)}")
    if out is not None:
        render.answer(facts | {"file": str(out)}) if app.json else render.line(str(out))


def _warn_if_outdated(app: App) -> None:
    """Print a note if the running agent does not use the relay that this host's new credential is for."""
    from cmdop_migrate.gateway import check

    old = check.outdated(app.config)
    if old is not None:
        render.note(f"{old[0]}. {old[1]}")


@token.command("ls")
@click.option("--all", "everything", is_flag=True, help="Also list expired and revoked ones.")
@command
def ls(app: App, everything: bool) -> None:
    """List the credentials that were made. The credentials themselves cannot be printed again.

    \b
    Examples:
      cmdop-migrate relay token ls --all
    """
    tokens = [credentials.facts(token) for token in credentials.listing(app.config)]
    shown = [token for token in tokens if everything or token["state"] == "valid"]
    if app.json:
        render.answer({"tokens": shown})
        return
    columns = ("id", "name", "role", "sessions", "state")
    rows = [[*(str(token[key]) for key in columns), _until(token["expires"])] for token in shown]
    render.table(("ID", "NAME", "ROLE", "SESSIONS", "STATE", "UNTIL"), rows)


@token.command()
@click.argument("ident", metavar="ID")
@command
def revoke(app: App, ident: str) -> None:
    """Revoke a credential: relays close its connections within seconds.

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
    if len(plain) != 64 or any(digit not in "0123456789abcdef" for digit in plain):
        raise Usage(f"not a SHA-256: {text!r}", "Give the 64 hex digits that `relay serve` prints.")
    return plain
