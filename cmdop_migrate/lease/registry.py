"""Open the lease store that the `lease` setting names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from cmdop_migrate.errors import BadConfig
from cmdop_migrate.lease.register import Register
from cmdop_migrate.lease.sqlite import SqliteRegister
from cmdop_migrate.lease.store import LeaseStore
from cmdop_migrate.storage.registry import s3_place, shown

if TYPE_CHECKING:
    from cmdop_migrate.lease.etcdhttp import EtcdPlace

FORMS = "sqlite:///file, s3://bucket/prefix?endpoint=http://host:port, etcd://host:port,host:port/prefix?ca=/file"
RELAY = "relay"
"""Register in which relays keep credentials and names, beside the leases."""
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_MEMBER = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_ETCD_OPTIONS = ("ca", "cert", "key")
_HINT = f"Valid forms: {FORMS}."


def open_lease(url: str, proven: bool = False, on_proof: Callable[[], None] = lambda: None) -> LeaseStore:
    """Return the lease store at `url`; no request is sent yet. `proven`: its `check` succeeded on this host
    before, so it need not be repeated before the first write. `on_proof` is called when a server that must be
    checked passes now."""
    return LeaseStore(open_register(url, proven, on_proof))


def open_register(url: str, proven: bool = False, on_proof: Callable[[], None] = lambda: None) -> Register:
    if url.startswith("sqlite://"):
        return SqliteRegister(_file(url))
    if url.startswith("s3://"):
        place = s3_place(url)
        from cmdop_migrate.lease.s3 import S3Register

        return S3Register(place, proven=proven, on_proof=on_proof)
    if url.startswith("etcd://"):
        place_of_etcd = etcd_place(url)
        from cmdop_migrate.lease.etcd import EtcdRegister

        return EtcdRegister(place_of_etcd)
    raise BadConfig(f"not a lease store: {shown(url)!r}", _HINT)


def sibling(url: str, name: str) -> str:
    """Return the URL of a register beside the leases, for other data that must live as long and be as safe: a file
    beside theirs, or a prefix below theirs. Neither is ever mistaken for the other."""
    if url.startswith("sqlite://"):
        return f"{url}.{name}"
    parts = urlsplit(url)
    default = "/cmdop-migrate" if parts.scheme == "etcd" else ""
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/') or default}/{name}"))


def _file(url: str) -> Path:
    # Taken literally, nothing decoded: the default of the setting is made of the plain path of the state directory.
    path = url.removeprefix("sqlite://")
    clean = "/" + os.path.normpath(path).strip("/")
    if not os.path.isabs(path) or "\0" in path or clean == "/" or path.endswith("/"):
        raise BadConfig(f"not the URL of a file: {url!r}", _HINT)
    return Path(clean)


def etcd_place(url: str) -> EtcdPlace:
    """Parse an `etcd://` URL."""
    from cmdop_migrate.lease.etcdhttp import EtcdPlace  # loads HTTP and TLS modules, so only when needed

    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise BadConfig(f"not the URL of an etcd cluster: {shown(url)!r} ({error})", _HINT) from error
    endpoints = tuple(_member(text, url) for text in parts.netloc.split(","))
    prefix = parts.path.strip("/") or "cmdop-migrate"
    if parts.fragment or not _PREFIX.fullmatch(prefix):
        raise BadConfig(
            f"not a valid prefix: {prefix!r} in {shown(url)!r}", "Use letters, digits, '.', '_', '-' and '/'."
        )
    options = dict(pairs)
    if len(options) != len(pairs) or set(options) - set(_ETCD_OPTIONS):
        raise BadConfig(f"unknown or duplicate option in {shown(url)!r}", f"Valid options: {', '.join(_ETCD_OPTIONS)}.")
    for name, file in options.items():
        if not os.path.isfile(file):
            raise BadConfig(f"no such file: {name}={file} in {shown(url)!r}", "Name a PEM file.")
    if ("cert" in options) != ("key" in options):
        raise BadConfig(f"cert= and key= must be given together, in {shown(url)!r}", _HINT)
    return EtcdPlace(url, endpoints, prefix, **options)


def _member(text: str, url: str) -> tuple[str, int]:
    from cmdop_migrate.lease.etcdhttp import PORT

    member = _MEMBER.fullmatch(text)
    port = int(member["port"] or PORT) if member else 0
    if member is None or not 0 < port < 65536:
        raise BadConfig(f"expected host:port[,host:port...] in {shown(url)!r}", _HINT)
    return member["host"].strip("[]"), port
