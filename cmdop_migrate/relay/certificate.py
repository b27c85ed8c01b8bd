"""Provide the relay's TLS certificate: the operator's, or a self-signed one that is made once and pinned."""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cmdop_migrate.errors import BadConfig
from cmdop_migrate.util import locks

NAME = "cmdop-migrate relay"
YEARS = 20  # a client that pins the certificate checks nothing else in it
_FILE = "self-signed.pem"


def self_signed(directory: Path) -> Path:
    """Return the file with certificate and key; create it if it does not exist. Of several processes that do this
    simultaneously, one creates it. Raise BadConfig if the directory is not writable."""
    file = directory / _FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = locks.open_file(directory / ".lock")
    except OSError as error:
        raise BadConfig(f"cannot write to {directory}: {error.strerror}", "Check state_dir, or give --cert.") from error
    try:
        locks.lock(lock)
        if not file.exists():
            new = file.with_suffix(".new")
            new.unlink(missing_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as out:
                out.write(_generate())
                out.flush()
                os.fsync(out.fileno())
            new.replace(file)
    finally:
        os.close(lock)
    return file


def made_here(directory: Path) -> Path | None:
    """Return the file of the self-signed certificate, or None if it was not made."""
    file = directory / _FILE
    return file if file.exists() else None


def pin_of(certificate: Path) -> str:
    """Return the SHA-256 of the first certificate in the file, in DER form, which is what clients pin. Raise
    BadConfig."""
    try:
        text = certificate.read_text(encoding="ascii")
        begin = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).hexdigest()
    except (OSError, ValueError) as error:
        raise BadConfig(f"no certificate in {certificate}: {error}", "Name a PEM file with --cert.") from error


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return the TLS settings of the server. Raise BadConfig if certificate or key cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # connections are few and long: TLS sessions are not resumed
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise BadConfig(
            f"cannot use the certificate {certificate}: {error}", "Give --cert and --key, PEM files that go together."
        ) from error
    return context


def _generate() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return private + certificate.public_bytes(serialization.Encoding.PEM)
