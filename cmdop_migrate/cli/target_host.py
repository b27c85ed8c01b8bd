"""Connect to the host of --to, for commands that act on this host or on another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cmdop_migrate.cli.app import App
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration.target import RemoteHost


@contextlib.contextmanager
def connected(app: App, this_host: Host, name: str | None) -> Iterator[RemoteHost | None]:
    """Yield the host `name`, connected and checked; None if that is this host, or no host was named."""
    if name is None or name == app.config.host:
        yield None
        return
    from cmdop_migrate.migration import peers  # loads SSH, which a command on this host does not need

    with peers.pool(app.config) as pool:
        yield peers.checked_peer(this_host, pool, name)
