"""Run `cmdop-migrate link`: build the link from the settings, the keys and the host's credential."""

from __future__ import annotations

import asyncio
import contextlib
import os

from cmdop_migrate import clock
from cmdop_migrate.config import Config
from cmdop_migrate.errors import BadConfig, NotAdmitted
from cmdop_migrate.gateway import client, credentials
from cmdop_migrate.gateway.host_link import Link
from cmdop_migrate.gateway.link_status import StatusFile
from cmdop_migrate.host import resources
from cmdop_migrate.host.host import Host
from cmdop_migrate.relay.credentials import Claims, Credential

LINGER = 3.0
CACHED = 2.0  # seconds for which the lease store's reply about a credential is used


class CredentialCheck:
    """Look up in the lease store whether credentials are valid, with a short cache."""

    def __init__(self, config: Config) -> None:
        self._registry = credentials.open_registry(config)
        self._known: dict[str, tuple[float, str]] = {}

    def invalid_because(self, claims: Claims) -> str:
        """Return why a credential is invalid; empty if it is valid. Raise LeaseUnreachable.

        Several threads may call this simultaneously; at worst the store is asked twice.
        """
        now, known = clock.boottime(), self._known
        at, why = known.get(claims.id, (float("-inf"), ""))
        if now - at >= CACHED:
            issued = self._registry.find(claims.id)
            is_same = issued is not None and issued.claims == claims
            why = issued.invalid_because(clock.walltime()) if issued is not None and is_same else "not listed"
            fresh = {ident: reply for ident, reply in known.copy().items() if now - reply[0] < CACHED}
            self._known = {**fresh, claims.id: (now, why)}
        return why


def credential(config: Config) -> Credential:
    """Return this host's credential. Raise NotAdmitted if it is missing, or belongs to another bearer."""
    loaded = client.load(config.relay_credential)
    if loaded.claims.kind != "host" or loaded.claims.name != config.host:
        raise NotAdmitted(f"{config.relay_credential} is not the credential of {config.host}", "See: relay token")
    return loaded


def serve(this_host: Host) -> None:
    """Run the link until its standard input ends, which means that the agent has ended."""
    config = this_host.config
    status = StatusFile(config)
    status.write(0, 0)
    signer = resources.open_keys(config).relay_signer
    fleet = signer.public_key().public_bytes_raw()

    def own() -> Credential:
        """Read the credential each time: it may have been replaced."""
        loaded = credential(config)
        if loaded.fleet != fleet:
            raise NotAdmitted(f"{config.relay_credential} is of another fleet", "Make another: relay token create")
        return loaded

    url = config.relay or own().relay
    if url is None:
        raise BadConfig("no relay to link to", "Set relay.")
    link = Link(this_host, url, own, signer.sign, CredentialCheck(config).invalid_because, status.write)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_until_agent_ends(link, status))


async def _until_agent_ends(link: Link, status: StatusFile) -> None:
    task = asyncio.ensure_future(link.run())
    ended = asyncio.Event()
    os.set_blocking(0, False)
    asyncio.get_running_loop().add_reader(0, ended.set)  # the agent writes nothing: readable means end of file
    leaving = asyncio.ensure_future(ended.wait())
    await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
    if leaving.done():
        asyncio.get_running_loop().remove_reader(0)
        status.close()
        await link.linger(LINGER)
        task.cancel()
    leaving.cancel()
    await task
