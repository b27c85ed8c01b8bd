"""Open the store that the `store` setting names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from cmdop_migrate.errors import BadConfig
from cmdop_migrate.storage.base import Store
from cmdop_migrate.storage.local import LocalStore
from cmdop_migrate.storage.retry import RetryStore

if TYPE_CHECKING:
    from cmdop_migrate.storage.s3client import S3Place

FORMS = "file:///dir, s3://bucket/prefix?endpoint=http://host:port&region=name&ca=/file"
_HINT = f"Valid forms: {FORMS}."
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_OPTIONS = ("endpoint", "region", "ca")


def open_store(url: str) -> Store:
    """Return the store at `url` without retries: every failure is raised immediately. No request is sent yet."""
    if url.startswith("file://"):
        return LocalStore(_directory(url))
    if url.startswith("s3://"):
        place = s3_place(url)
        from cmdop_migrate.storage.s3 import S3Store

        return S3Store(place)
    raise BadConfig(f"not a store: {shown(url)!r}", _HINT)


def open_reliable(url: str) -> Store:
    """Return the store at `url` with retries for about a minute while it does not answer."""
    return RetryStore(open_store(url))


def _directory(url: str) -> Path:
    # Taken literally, nothing decoded: the default of the setting is made of the plain path of the state directory.
    path = url.removeprefix("file://")
    clean = "/" + os.path.normpath(path).strip("/")  # normpath keeps a double slash at the start
    if not os.path.isabs(path) or "\0" in path or clean == "/":
        raise BadConfig(f"not the URL of a directory: {url!r}", _HINT)
    return Path(clean)


def s3_place(url: str) -> S3Place:
    """Parse an `s3://` URL. The `lease` setting has the same form."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise BadConfig(f"not the URL of a bucket: {shown(url)!r} ({error})", _HINT) from error
    if "@" in parts.netloc:
        hint = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, instead: URLs end up in logs."
        raise BadConfig(f"credentials in the URL of a store: {shown(url)!r}", hint)
    prefix = parts.path.strip("/")
    if not _BUCKET.fullmatch(parts.netloc):
        raise BadConfig(f"no bucket name in {shown(url)!r}", _HINT)
    if parts.fragment or (prefix and not _PREFIX.fullmatch(prefix)):
        hint = "Use letters, digits, '.', '_', '-' and '/'."
        raise BadConfig(f"not a valid prefix: {prefix!r} in {shown(url)!r}", hint)
    options = dict(pairs)
    for key, value in pairs:
        if key not in _OPTIONS:
            where = shown(url.partition("?")[0])  # the option may be a mistyped secret
            raise BadConfig(f"unknown option {key!r} in {where!r}", f"Valid options: {', '.join(_OPTIONS)}.")
        if not value or [other for other, _ in pairs].count(key) > 1:
            raise BadConfig(f"option {key!r} must be given once, with a value, in {shown(url)!r}", _HINT)
    if "endpoint" in options:
        _check_endpoint(options["endpoint"])
    if "ca" in options and not os.path.isfile(options["ca"]):
        hint = "Name the PEM file of the server's authority."
        raise BadConfig(f"no such file: ca={options['ca']} in {shown(url)!r}", hint)
    from cmdop_migrate.storage.s3client import S3Place

    return S3Place(url, parts.netloc, prefix, **options)


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or "@" in parts.netloc:
        raise BadConfig(f"not an endpoint: {shown(endpoint)!r}", "Write it like endpoint=http://host:port.")


def shown(url: str) -> str:
    """Return the URL without anything that may be a password, in any position: an endpoint may be spelt with %40 and
    %2F."""
    return re.sub(r"(?i)(//|%2f%2f).*(?=@|%40)", r"\1…", url)
