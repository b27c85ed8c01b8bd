"""Add --relay and --credential to commands that reach a session on this host, or on any host through a relay."""

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

RelayOptions = tuple[str | None, Path | None]  # --relay, --credential


def through_relay(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --relay and --credential to a command, and pass them to it as `relay`."""

    @click.option("--relay", "url", metavar="URL", help="Reach the session through this relay [the setting `relay`].")
    @click.option(
        "--credential",
        "file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with your credential for the relay [the setting `relay_credential`].",
    )
    @functools.wraps(function)
    def wrapped(*args: Any, url: str | None, file: Path | None, **arguments: Any) -> Any:
        return function(*args, relay=(url, file), **arguments)

    return wrapped


def elsewhere(app: App, relay: RelayOptions, session: str | None = None) -> RelayAccess | None:
    """Return the relay to use, or None to act on this host.

    Without --relay and --credential, root acts on this host if it has a session of this name or no session is named;
    and everyone does where neither a relay nor a credential is configured. Raise Usage if the URL is not one of a
    relay, NotAdmitted if the named credential is not a client's."""
    url, file = relay
    named = url is not None or file is not None
    if url is not None and not url.startswith(("wss://", "ws://")):
        raise Usage(f"not the URL of a relay: {url!r}", "Write it like wss://relay.example:7443")
    if not named and os.geteuid() == 0 and (session is None or _is_here(app, session)):
        return None
    if not named and app.config.relay is None and not os.path.exists(app.config.relay_credential):
        return None
    from cmdop_migrate.gateway import client  # loads TLS and keys, which commands on a host do not need

    try:
        return client.access(url or app.config.relay, client.load(file or app.config.relay_credential))
    except NotAdmitted:
        if named or os.geteuid() != 0:
            raise
        return None  # a host's credential: such a host serves its own sessions only


def _is_here(app: App, session: str) -> bool:
    try:
        app.this_host(keeping=False).find(session)
    except SessionNotFound:
        return False
    return True
