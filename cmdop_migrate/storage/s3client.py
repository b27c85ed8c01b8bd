"""Make a boto3 client that works with any S3-compatible server: for checkpoints (storage/s3.py) and leases
(lease/s3.py).

botocore's own retries are off: a second try that it makes by itself would falsify the answer to a conditional write.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import boto3.session
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from cmdop_migrate.errors import BadConfig

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@dataclass(frozen=True)
class S3Place:
    """Locate the objects. Credentials are not here: boto3 finds them (environment, files, instance role)."""

    url: str
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    ca: str | None = None


@dataclass(frozen=True)
class S3Limits:
    """Set the timeouts, in seconds of silence, and the number of connections to keep."""

    connect: float = 5.0
    read: float = 30.0
    connections: int = 32


def content_md5(body: bytes) -> str:
    """Return the MD5 that goes with every upload, so that the server refuses a damaged or truncated body. The SHA-256
    in the signature is not enough: SeaweedFS 4.48 does not check it, and without an MD5 it stores an *empty* object
    when the connection is cut between the headers and the body."""
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def content_crc32(body: bytes) -> str:
    """Return the CRC32, for a server that is known to check it: a fifth of the time of an MD5."""
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


@functools.cache
def _loader(paths: str | None) -> botocore.loaders.Loader:
    """Return the loader of botocore's service descriptions, which are large: read once per process, for all clients."""
    return botocore.loaders.create_loader(paths)


def _session(key: str | None = None) -> boto3.session.Session:
    core = botocore.session.get_session()
    core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
    return boto3.session.Session(aws_access_key_id=key, aws_secret_access_key=key, botocore_session=core)


def warm() -> None:
    """Load what every client needs. No request is sent: the credentials are made up, so boto3 does not look for any."""
    place = S3Place("s3://none/", "none", endpoint="http://127.0.0.1:1", region="us-east-1")
    with contextlib.suppress(BotoCoreError, ValueError):  # `s3_client` reports it
        client = _client(_session("none"), place, _config(S3Limits()))
        client.get_paginator("list_objects_v2")
        client.close()


def _config(limits: S3Limits) -> Config:
    return Config(
        signature_version="s3v4",
        # The MD5 is signed, and the data is sealed: a SHA-256 over the same bytes costs more than sealing them.
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        # Newer checksums are refused by many servers, over https as a trailer: FINDINGS, docs/reference/stores.md.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=limits.connect,
        read_timeout=limits.read,
        max_pool_connections=limits.connections,
        tcp_keepalive=True,
    )


def s3_client(place: S3Place, limits: S3Limits) -> S3Client:
    try:
        return _client(_session(), place, _config(limits))
    except (BotoCoreError, ValueError) as error:
        hint = "Check the URL of the store, AWS_PROFILE, and the AWS config file."
        raise BadConfig(f"cannot use the store {place.url}: {error}", hint) from error


def _client(session: boto3.session.Session, place: S3Place, config: Config) -> S3Client:
    return session.client(
        "s3",
        endpoint_url=place.endpoint,
        region_name=place.region or session.region_name or "us-east-1",
        verify=place.ca,
        config=config,
    )
