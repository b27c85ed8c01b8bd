"""What we compare with: CRIU alone, and the script an engineer would write around it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from cmdop_migrate.criu import request, runner
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.holder import cgroup
from scripts.benchlib import common
from tests.integration.criu_session import Session
from tests.support.servers import S3Server

PAYLOAD = Path(__file__).with_name("payload.py")


@dataclass(frozen=True)
class Script:
    """One run of the script, and its steps."""

    dump: float
    pack: float
    send: float
    total: float
    cpu: float
    stored: int


@dataclass(frozen=True)
class Target:
    """A running session, as CRIU must know it."""

    group: str
    pid: int
    shared: tuple[request.SharedMount, ...]


def dump(criu: Criu, session: Target, images: Path, pages: socket.socket | None = None) -> float:
    """Freeze a session, `criu dump` it into memory-backed files, and let it resume; return the seconds it was frozen.

    The same request as ours but for the page server: CRIU writes the pages itself, unless `pages` is where they go.
    """
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir(parents=True)
    fd = os.open(images, os.O_RDONLY | os.O_DIRECTORY)
    began = time.monotonic()
    try:
        cgroup.freeze(session.group)
        spec = request.DumpSpec(
            pid=session.pid,
            images_dir_fd=fd,
            root="/",
            freeze_cgroup=session.group,
            leave_running=True,
            pages_fd=pages.fileno() if pages else None,
            shared=session.shared,
        )
        fds = (pages.fileno(),) if pages else ()
        runner.run(criu.argv, request.dump(spec), images / "dump.log", what="raw dump", timeout=120, pass_fds=fds)
        return time.monotonic() - began
    finally:
        cgroup.thaw(session.group)
        os.close(fd)


def script(criu: Criu, session: Target, work: Path, put: Callable[[Path], None] | None, target: Path) -> Script:
    """criu dump, tar, zstd -T0, upload. With `put` the archive is made in `work` (memory) and uploaded; without, tar
    and zstd write straight to `target` and it is fsynced, which is kinder to the script than a copy."""
    images = work / "script"
    began, cpu = time.monotonic(), cpu_seconds()
    dumped = dump(criu, session, images)
    archive = target if put is None else work / "script.tar.zst"
    pack = f"tar -C '{images}' -cf - . | zstd -q -T0 -f -o '{archive}'"
    packing = time.monotonic()
    subprocess.run(["bash", "-o", "pipefail", "-c", pack], check=True)
    sending = time.monotonic()
    if put is None:
        _sync(archive)
    else:
        put(archive)
    ended = time.monotonic()
    spent = cpu_seconds() - cpu
    done = Script(dumped, sending - packing, ended - sending, ended - began, spent, archive.stat().st_size)
    shutil.rmtree(images)
    if put is not None:
        archive.unlink()
    return done


def unpack(archive: Path, work: Path) -> float:
    """What the script must do before CRIU can restore: zstd -d, untar; -> seconds."""
    images = work / "unpacked"
    images.mkdir()
    began = time.monotonic()
    line = f"zstd -q -d -c '{archive}' | tar -C '{images}' -xf -"
    subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True)
    took = time.monotonic() - began
    shutil.rmtree(images)
    return took


@dataclass(frozen=True)
class Payload:
    """The program that is moved: so much memory, so much of it random."""

    mib: int
    random: int

    def program(self, every: int = 0) -> list[str]:
        """What Python is to run."""
        return [str(PAYLOAD), str(self.mib), str(every), str(self.random)]


class Twin:
    """The same program in a session with nothing of ours around it: namespaces, an overlay and a terminal of its own,
    dumped into memory-backed files, and `criu restore` of it. No network device, no holder, no cgroup to set up."""

    def __init__(self, criu: Criu, payload: Payload, work: Path) -> None:
        self.payload = payload
        self.images = work / "twin"
        self.images.mkdir()
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))  # an overlay's own files cannot lie in memory
        self.session = Session(self.folder / "twin", criu.argv)
        try:
            self._dump()
        except BaseException:
            self.close()
            raise

    def _dump(self) -> None:
        session = self.session
        os.close(session.directory)
        session.images, session.directory = self.images, os.open(self.images, os.O_RDONLY | os.O_CLOEXEC)
        session.start(sys.executable, *self.payload.program()).wait_for("t 2 ", 120)
        session.dump(None, timeout=120)
        self._gone()
        session.prepare_root()

    def restore(self) -> float:
        """`criu restore` until it returns: all memory is in place, the program runs."""
        common.settle()
        began = time.monotonic()
        self.session.restore(timeout=120)
        took = time.monotonic() - began
        os.kill(self.session.pid, signal.SIGKILL)
        self._gone()
        return took

    def _gone(self) -> None:
        """Restored, it is our child; as it was before, init's."""
        pid, until = self.session.pid, time.monotonic() + 30
        self.session.gone()
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        self.session.close()
        shutil.rmtree(self.images)
        shutil.rmtree(self.folder)


def warm(folder: Path, mib: int) -> None:
    """First-touch of memory is dear on a virtual machine: have it touched before anything is measured."""
    path = folder / "warm"
    block = bytes(1 << 20)
    with path.open("wb") as file:
        for _ in range(min(mib, psutil.virtual_memory().available >> 21)):  # at most half of what is free
            file.write(block)
    path.unlink()


_COPY = """
import sys
import boto3
from botocore.config import Config
verb, endpoint, bucket, key, path = sys.argv[1:]
config = Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required")
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
client.upload_file(path, bucket, key) if verb == "up" else client.download_file(bucket, key, path)
"""


def copier(verb: str, server: S3Server, bucket: str, key: str) -> Callable[[Path], None]:
    """`aws s3 cp`, as a program of its own: boto3's parallel transfer, with its defaults."""

    def copy(path: Path) -> None:
        command = [sys.executable, "-c", _COPY, verb, server.endpoint, bucket, key, str(path)]
        subprocess.run(command, check=True, env={**os.environ, **server.environ()})

    return copy


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def forget(path: Path) -> None:
    """Out of the page cache, where ours is not either: who restores is on another host, or it is another day."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cpu_seconds() -> float:
    """Of this process and of those it has waited for."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
