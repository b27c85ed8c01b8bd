"""`cmdop-migrate link`: settings, keys and the host's credential, put together into a running link."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from cmdop_migrate import clock
from cmdop_migrate.config import Config
from cmdop_migrate.errors import BadConfig, NotAdmitted
from cmdop_migrate.gateway import client, credentials
from cmdop_migrate.gateway.host_link import Link
from cmdop_migrate.host import resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.relay.credentials import Claims, Credential

LINGER = 3.0
NAME = "cm-link"  # of the process, with how it stands: `cm-link 1/1`, in at most 15 characters
REMEMBERED = 2.0  # seconds for which the lease store's word on a credential is good


class Listing:
    """What the lease store says of credentials, asked for each once in a while."""

    def __init__(self, config: Config) -> None:
        self._issued = credentials.open_issued(config)
        self._known: dict[str, tuple[float, str]] = {}

    def why_not(self, claims: Claims) -> str:
        """From several threads at once: the worst that comes of it is that it is asked twice."""
        now, known = clock.boottime(), self._known
        at, why = known.get(claims.id, (float("-inf"), ""))
        if now - at >= REMEMBERED:
            issue = self._issued.find(claims.id)
            good = issue is not None and issue.claims == claims
            why = issue.why_not(clock.walltime()) if issue is not None and good else "not listed"
            fresh = {ident: one for ident, one in known.copy().items() if now - one[0] < REMEMBERED}
            self._known = {**fresh, claims.id: (now, why)}
        return why


def credential(config: Config) -> Credential:
    """This host's. NotAdmitted when there is none, or somebody else's."""
    found = client.load(config.relay_credential)
    if found.claims.kind != "host" or found.claims.name != config.host:
        raise NotAdmitted(f"{config.relay_credential} is not the credential of {config.host}", "See: relay token")
    return found


def serve(this_host: Host) -> None:
    """What `cmdop-migrate link` does, until its standard input ends: then its agent is gone."""
    config = this_host.config
    _show_standing(0, 0)
    signer = resources.open_keys(config).relay_signer
    fleet = signer.public_key().public_bytes_raw()

    def own() -> Credential:
        """Read each time: it may have been made anew."""
        found = credential(config)
        if found.fleet != fleet:
            raise NotAdmitted(f"{config.relay_credential} is of another fleet", "Make another: relay token create")
        return found

    url = config.relay or own().relay
    if url is None:
        raise BadConfig("no relay to link to", "Set relay.")
    link = Link(this_host, url, own, signer.sign, Listing(config).why_not, _show_standing)
    try:
        asyncio.run(_until_left(link))
    except asyncio.CancelledError:
        return


def _show_standing(up: int, of: int) -> None:
    """In the process's own name: `ps` shows it, no disk is needed for it, and it is gone with the process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"{NAME} {up}/{of}", encoding="ascii")


async def _until_left(link: Link) -> None:
    task = asyncio.ensure_future(link.run())
    left = asyncio.Event()
    os.set_blocking(0, False)
    asyncio.get_running_loop().add_reader(0, left.set)  # nobody writes there: it is the end
    leaving = asyncio.ensure_future(left.wait())
    await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
    if leaving.done():
        asyncio.get_running_loop().remove_reader(0)
        await link.linger(LINGER)
        task.cancel()
    leaving.cancel()
    await task
