"""--relay and --credential: for commands that reach a session on this host, or through a relay wherever it is."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cmdop_migrate.cli.app import App
from cmdop_migrate.errors import NotAdmitted, SessionNotFound, Usage

if TYPE_CHECKING:
    from cmdop_migrate.gateway.client import RelayAccess


def through_relay(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options, and hands them over as `relay`: (URL, FILE)."""

    @click.option("--relay", "url", metavar="URL", help="Through this relay, wherever it runs [the setting `relay`].")
    @click.option(
        "--credential",
        "file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Who you are at the relay [the setting `relay_credential`].",
    )
    @functools.wraps(function)
    def wrapped(*args: Any, url: str | None, file: Path | None, **arguments: Any) -> Any:
        return function(*args, relay=(url, file), **arguments)

    return wrapped


def elsewhere(app: App, relay: tuple[str | None, Path | None], session: str | None = None) -> RelayAccess | None:
    """The relay to go through; None: it is about this host. Without --relay that is so for root on a machine that is no
    client, or has a session of this name."""
    url, file = relay
    named = url is not None or file is not None
    if url is not None and not url.startswith(("wss://", "ws://")):
        raise Usage(f"not the address of a relay: {url!r}", "Write it like wss://relay.example:7443")
    if not named and os.geteuid() == 0 and (session is None or _is_here(app, session)):
        return None
    if not named and app.config.relay is None and not os.path.exists(app.config.relay_credential):
        return None
    from cmdop_migrate.gateway import client  # brings TLS and keys along, which nobody on a host needs

    try:
        return client.access(url or app.config.relay, client.load(file or app.config.relay_credential))
    except NotAdmitted:
        if named or os.geteuid() != 0:
            raise
        return None  # a host, with a host's credential: it knows its own sessions only


def _is_here(app: App, session: str) -> bool:
    try:
        app.this_host(keeping=False).find(session)
    except SessionNotFound:
        return False
    return True
