"""From the `lease` setting to a lease store."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cmdop_migrate.errors import BadConfig
from cmdop_migrate.lease.base import Register
from cmdop_migrate.lease.sqlite import SqliteRegister
from cmdop_migrate.lease.store import LeaseStore

FORMS = "sqlite:///file, s3://bucket/prefix?endpoint=http://host:port, etcd://host:port,host:port/prefix"
_HINT = f"Valid forms: {FORMS}."


def open_lease(url: str) -> LeaseStore:
    """The lease store at `url`."""
    return LeaseStore(open_register(url))


def open_register(url: str) -> Register:
    if url.startswith("sqlite://"):
        return SqliteRegister(_file(url))
    raise BadConfig(f"not a lease store: {_shown(url)!r}", _HINT)


def _file(url: str) -> Path:
    # Taken as it stands, nothing decoded: the setting's default is made of the state dir's plain path.
    path = url.removeprefix("sqlite://")
    clean = "/" + os.path.normpath(path).strip("/")
    if not os.path.isabs(path) or "\0" in path or clean == "/" or path.endswith("/"):
        raise BadConfig(f"not the address of a file: {url!r}", _HINT)
    return Path(clean)


def _shown(url: str) -> str:
    """The address without what may be a password."""
    return re.sub(r"//[^/@]*@", "//…@", url)
