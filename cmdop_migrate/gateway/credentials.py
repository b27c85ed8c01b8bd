"""Credentials for the relay: made by a host of the fleet, listed beside the leases, revoked there."""

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
from cmdop_migrate.relay.credential_registry import Issue, Issued
from cmdop_migrate.relay.credentials import Credential, Role, b64, issue


def directory(config: Config) -> Path:
    """Where a relay on this machine keeps what is its own."""
    return config.state_dir / "relay"


def identity(config: Config) -> bytes:
    """The fleet's public key: all that a relay must be told."""
    return resources.open_keys(config).relay_signer.public_key().public_bytes_raw()


def open_issued(config: Config) -> Issued:
    return Issued(leases.open_beside(config, RELAY))


@dataclass(frozen=True)
class Where:
    """What a credential says of the relay itself; both may be left out."""

    relay: str | None = None
    pin: str | None = None


def create_client(
    config: Config, actor: str, role: Role, sessions: str, seconds: float | None, where: Where | None = None
) -> Credential:
    """One for a person or a program. Listed when this returns."""
    return _create(config, "client", actor, role, sessions, seconds, where)


def create_host(config: Config, host: str, seconds: float | None, where: Where | None = None) -> Credential:
    """One for a host, bound to its name: it can register what the lease store says that host holds."""
    return _create(config, "host", host_name(host), "host", "*", seconds, where)


def _create(
    config: Config, kind: str, name: str, role: Role, sessions: str, seconds: float | None, where: Where | None
) -> Credential:
    if seconds is not None and seconds <= 0:
        raise Usage("a credential that is over already", "Write it like --expires 8h, or --expires never.")
    where = where or Where()
    own = certificate.made_here(directory(config))
    now = clock.walltime()
    credential = issue(
        resources.open_keys(config).relay_signer,
        "host" if kind == "host" else "client",
        name,
        role,
        sessions,
        None if seconds is None else int(now + seconds),
        where.relay or config.relay,
        where.pin or (certificate.pin_of(own) if own else None),
    )
    open_issued(config).add(credential.claims, round(now, 3))
    return credential


def listing(config: Config) -> list[Issue]:
    """All that were ever made, the newest first."""
    return sorted(open_issued(config).all(), key=lambda one: one.created, reverse=True)


def revoke(config: Config, reference: str) -> Issue:
    """By id, or the beginning of one. Relays look again within seconds."""
    issued = open_issued(config)
    if len(reference) == 24:
        return issued.revoke(reference, round(clock.walltime(), 3))
    found = [one.claims.id for one in issued.all() if one.claims.id.startswith(reference)]
    if not reference or len(found) != 1:
        what = "several credentials begin" if found else "no credential begins"
        raise NotFound(f"{what} with {reference!r}", "See: cmdop-migrate relay token ls")
    return issued.revoke(found[0], round(clock.walltime(), 3))


def facts(one: Issue) -> dict[str, object]:
    """For programs; nothing in it lets anybody in."""
    claims = one.claims
    return {
        "id": claims.id,
        "kind": claims.kind,
        "name": claims.name,
        "role": claims.role,
        "sessions": claims.sessions,
        "created": one.created,
        "expires": claims.expires,
        "revoked": one.revoked,
        "state": one.why_not(clock.walltime()) or "valid",
    }


def save(path: Path, credential: Credential) -> None:
    """To a file of the owner's alone, whole or not at all."""
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
def revoked_unless_had(config: Config, credential: Credential) -> Iterator[None]:
    """Whoever is to have it gets it meanwhile; one that nobody has got is not left valid."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CmdopError):  # what is said is why nobody has it
            revoke(config, credential.claims.id)
        raise


def shown(fleet: bytes) -> str:
    return b64(fleet)
