"""Run `relay serve`: build a relay from the lease store, the fleet's identity and a certificate."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from asyncio import sslproto
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate import log
from cmdop_migrate.config import Config
from cmdop_migrate.errors import BadConfig, Usage
from cmdop_migrate.events import Events
from cmdop_migrate.gateway import credentials
from cmdop_migrate.host import leases
from cmdop_migrate.images.format import keys
from cmdop_migrate.relay import certificate, http
from cmdop_migrate.relay.credentials import KEY_SIZE, unb64
from cmdop_migrate.relay.lease_lookup import LeaseLookup
from cmdop_migrate.relay.metrics import relay_metrics
from cmdop_migrate.relay.server import Relay, ServerOptions
from cmdop_migrate.util import limits

TLS_BUFFER = 32 << 10
OWN_FILES = 256  # descriptors that are not for connections


@dataclass(frozen=True)
class RelayOptions:
    """Represent the options of `relay serve`."""

    listen: str
    cert: Path | None = None
    key: Path | None = None
    tls: bool = True
    identity: str | None = None
    origins: tuple[str, ...] = ()
    assets: Path | None = None
    connections: int = 10_000


def serve(config: Config, options: RelayOptions, on_ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve until SIGTERM or SIGINT. Call `on_ready` with the address once the relay listens. Raise Usage or BadConfig
    if it cannot, LeaseUnreachable if the lease store does not answer."""
    host, port = address(options.listen)
    if not options.tls and not _is_loopback(host):
        raise Usage("without TLS only on loopback", "Give --listen 127.0.0.1:7443, or leave --no-tls out.")
    fleet = _fleet(config, options.identity)
    cert = options.cert or (certificate.self_signed(credentials.directory(config)) if options.tls else None)
    tls = certificate.server_context(cert, options.key) if cert is not None and options.tls else None
    pin = certificate.pin_of(cert) if cert is not None and tls is not None else None
    _make_state_dir(config)
    metrics = relay_metrics()
    lease_store, registry = leases.open_store(config), credentials.open_registry(config)
    registry.register.check()
    registry.find("0" * 24)  # fail now if the store does not answer, not with the first client
    lookup = LeaseLookup(lease_store, registry, metrics)
    events = Events(config.state_dir, config.host)
    most = min(options.connections, limits.more_files(options.connections + OWN_FILES) - OWN_FILES)
    server_options = ServerOptions(host, port, fleet, tls, options.origins, options.assets or http.OWN, most)
    relay = Relay(
        server_options, lookup, metrics, lambda event, session, facts: events.emit(event, session or None, **facts)
    )
    _small_buffers()

    def ready(bound: int) -> None:
        _emit(events, "relay_started", listen=f"{host}:{bound}")
        facts = {"listen": host, "port": bound, "tls": tls is not None, "pin": pin}
        on_ready({**facts, "identity": credentials.shown(fleet), "pid": os.getpid()})

    try:
        asyncio.run(_until_stopped(relay, ready))
    except OSError as error:
        raise Usage(
            f"cannot listen on {options.listen}: {error.strerror}", "Give another address with --listen."
        ) from error
    finally:
        lookup.close()
        registry.register.close()
        lease_store.close()
    _emit(events, "relay_stopped")


async def _until_stopped(relay: Relay, ready: Callable[[int], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await relay.run(stop, ready)


def address(text: str) -> tuple[str, int]:
    """Parse an address like `127.0.0.1:7443` or `[::1]:7443`. Raise Usage."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise Usage(f"not an address to listen on: {text!r}", "Write it like 0.0.0.0:7443 or [::]:7443.")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _fleet(config: Config, identity: str | None) -> bytes:
    if identity is not None:
        try:
            return unb64(identity.strip(), KEY_SIZE)
        except ValueError:
            raise Usage(
                "not a fleet's identity", "Give what `cmdop-migrate relay identity` prints on one of its hosts."
            ) from None
    if not config.key_file.exists():
        raise BadConfig(
            "the relay does not know whose credentials to trust: there are no keys here",
            "Give --identity, with what `cmdop-migrate relay identity` prints on a host of the fleet.",
        )
    return keys.load(config.key_file).relay_signer.public_key().public_bytes_raw()


def _make_state_dir(config: Config) -> None:
    try:
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfig(f"cannot make {config.state_dir}: {error.strerror}", "Set state_dir elsewhere.") from error


def _small_buffers() -> None:
    """Shrink asyncio's read buffer of each TLS connection, 256 KiB by default and most of the memory of an idle one.
    The attribute is internal: if a Python version lacks it, the relay only needs more memory."""
    if isinstance(getattr(sslproto.SSLProtocol, "max_size", None), int):
        setattr(sslproto.SSLProtocol, "max_size", TLS_BUFFER)  # noqa: B010 - it is not in the type stubs


def _emit(events: Events, event: str, **facts: object) -> None:
    """Record an event. A full disk does not stop the relay."""
    try:
        events.emit(event, None, **facts)
    except OSError as error:
        log.get("relay").warning("cannot record %s: %s", event, error.strerror)
