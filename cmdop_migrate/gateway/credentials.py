"""Create, list and revoke credentials for the relay. A host of the fleet signs them; the lease store lists them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate import clock
from cmdop_migrate.config import Config, host_name
from cmdop_migrate.errors import CmdopError, NotFound, Usage
from cmdop_migrate.host import leases, resources
from cmdop_migrate.lease.registry import RELAY
from cmdop_migrate.relay import certificate
from cmdop_migrate.relay.credential_registry import CredentialRegistry, IssuedCredential
from cmdop_migrate.relay.credentials import Credential, Role, b64, issue


def directory(config: Config) -> Path:
    """Return the directory in which a relay on this machine keeps its files."""
    return config.state_dir / "relay"


def identity(config: Config) -> bytes:
    """Return the fleet's public key, all that a relay must know of the fleet."""
    return resources.open_keys(config).relay_signer.public_key().public_bytes_raw()


def open_registry(config: Config) -> CredentialRegistry:
    """Open the registry of credentials, which is kept beside the leases."""
    return CredentialRegistry(leases.open_beside(config, RELAY))


@dataclass(frozen=True)
class RelayAddress:
    """Represent the relay's URL and certificate pin to put into a credential; both are optional."""

    relay: str | None = None
    pin: str | None = None


def create_client(
    config: Config, actor: str, role: Role, sessions: str, seconds: float | None, where: RelayAddress | None = None
) -> Credential:
    """Create a credential for a person or a program. It is listed when this returns."""
    return _create(config, "client", actor, role, sessions, seconds, where)


def create_host(config: Config, host: str, seconds: float | None, where: RelayAddress | None = None) -> Credential:
    """Create a credential for a host, bound to its name: it can register sessions whose lease that host holds."""
    return _create(config, "host", host_name(host), "host", "*", seconds, where)


def _create(
    config: Config, kind: str, name: str, role: Role, sessions: str, seconds: float | None, where: RelayAddress | None
) -> Credential:
    if seconds is not None and seconds <= 0:
        raise Usage("--expires is in the past", "Write it like --expires 8h, or --expires never.")
    where = where or RelayAddress()
    own_certificate = certificate.made_here(directory(config))
    now = clock.walltime()
    credential = issue(
        resources.open_keys(config).relay_signer,
        "host" if kind == "host" else "client",
        name,
        role,
        sessions,
        None if seconds is None else int(now + seconds),
        where.relay or config.relay,
        where.pin or (certificate.pin_of(own_certificate) if own_certificate else None),
    )
    open_registry(config).add(credential.claims, round(now, 3))
    return credential


def listing(config: Config) -> list[IssuedCredential]:
    """Return all credentials that were ever made, the newest first."""
    return sorted(open_registry(config).all(), key=lambda issued: issued.created, reverse=True)


def revoke(config: Config, reference: str) -> IssuedCredential:
    """Revoke a credential by id or unique prefix of it. Relays check again within seconds. Raise NotFound."""
    registry = open_registry(config)
    if len(reference) == 24:
        return registry.revoke(reference, round(clock.walltime(), 3))
    matching = [issued.claims.id for issued in registry.all() if issued.claims.id.startswith(reference)]
    if not reference or len(matching) != 1:
        what = "several credentials begin" if matching else "no credential begins"
        raise NotFound(f"{what} with {reference!r}", "See: cmdop-migrate relay token ls")
    return registry.revoke(matching[0], round(clock.walltime(), 3))


def facts(issued: IssuedCredential) -> dict[str, object]:
    """Return the JSON fields of a credential. They contain nothing that admits a bearer."""
    claims = issued.claims
    return {
        "id": claims.id,
        "kind": claims.kind,
        "name": claims.name,
        "role": claims.role,
        "sessions": claims.sessions,
        "created": issued.created,
        "expires": claims.expires,
        "revoked": issued.revoked,
        "state": issued.invalid_because(clock.walltime()) or "valid",
    }


def save(path: Path, credential: Credential) -> None:
    """Write a credential to a file that only its owner can read, atomically. Raise Usage if that fails."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(credential.text() + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise Usage(f"cannot write {path}: {error.strerror}", "Give another file with --out.") from error


@contextlib.contextmanager
def revoked_unless_delivered(config: Config, credential: Credential) -> Iterator[None]:
    """Revoke the credential if the body, which delivers it, fails: no credential stays valid that no bearer has."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CmdopError):  # the error to report is why it was not delivered
            revoke(config, credential.claims.id)
        raise


def shown(fleet: bytes) -> str:
    """Return the fleet's public key as text."""
    return b64(fleet)
