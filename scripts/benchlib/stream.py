"""Measure the least work that sends a session's memory to a store as CRIU gives it: no step waits for another, nothing
is written to a file, and the data is only compressed and sent.

    CRIU -> a pipe, spliced -> zstd -1 -T0 -> 8 MiB at a time into the store

No digest, so nothing is deduplicated; no seal, so everyone may read or change it; no files of the session, no
manifest; the session is not ended. What it makes cannot be restored: it is a measure, not a rival.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cmdop_migrate.criu import page_server
from cmdop_migrate.criu.install.find import Criu
from cmdop_migrate.images.format import layout
from cmdop_migrate.images.write.upload_queue import UPLOADERS
from cmdop_migrate.storage.base import Store
from scripts.benchlib import rivals

ZSTD = ["zstd", "-q", "-1", "-T0", "-c"]
PIPE = 1 << 20


@dataclass(frozen=True)
class Streamed:
    total: float
    cpu: float  # of all processes but the store's and the session's


def stream(criu: Criu, session: rivals.Target, images: Path, store: Store) -> Streamed:
    """`store` has been used before: neither its client nor its connections are made here."""
    began, cpu = time.monotonic(), rivals.cpu_seconds()
    with subprocess.Popen(ZSTD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as zstd:
        assert zstd.stdin is not None and zstd.stdout is not None
        for end in (zstd.stdin, zstd.stdout):
            fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, PIPE)
        ours, theirs = page_server.channel()
        with ThreadPoolExecutor(2, "stream") as pool, theirs:
            try:
                taken = pool.submit(_take, ours, criu, zstd.stdin)
                sent = pool.submit(_send, zstd.stdout, store)
                rivals.dump(criu, session, images, theirs)
            finally:
                theirs.close()  # else who takes would wait for a CRIU that has failed
            taken.result()
            sent.result()
    small = subprocess.run(["tar", "-C", str(images), "-cf", "-", "."], check=True, stdout=subprocess.PIPE).stdout
    store.put(layout.pack_name(layout.new_id()), small)
    total = time.monotonic() - began
    shutil.rmtree(images)
    return Streamed(total, rivals.cpu_seconds() - cpu)


def _take(sock: socket.socket, criu: Criu, out: IO[bytes]) -> None:
    """All pages, moved by the kernel: none of them comes up to us."""
    with sock, out:
        wire = page_server.Wire(sock, criu.version)
        while (message := wire.next()) is not None:
            command, flags, nr_pages, _, _ = message
            if command == page_server.OPEN2:
                sock.sendall(b"\0")
            elif command == page_server.ADD or (command == page_server.ADD_F and flags & page_server.PRESENT):
                left = nr_pages * page_server.PAGE
                while left:
                    moved = os.splice(sock.fileno(), out.fileno(), left)
                    if not moved:
                        raise page_server.ProtocolError("the connection ended inside a message")
                    left -= moved
            elif command in (page_server.CHECK_PARENT, page_server.CLOSE, page_server.FORCE_CLOSE):
                sock.sendall(struct.pack("<i", 0))
                if command != page_server.CHECK_PARENT:
                    return
    raise page_server.ProtocolError("CRIU closed the connection before it had sent everything")


def _send(source: IO[bytes], store: Store) -> None:
    with ThreadPoolExecutor(UPLOADERS, "send") as pool:
        sent: list[Future[None]] = []
        while piece := _fill(source.readinto, memoryview(bytearray(layout.PACK_SIZE))):
            sent.append(pool.submit(store.put, layout.pack_name(layout.new_id()), piece))
        for one in sent:
            one.result()


def _fill(read: Callable[[memoryview], int], view: memoryview) -> memoryview:
    """What of `view` could be filled before the end."""
    at = 0
    while at < len(view) and (got := read(view[at:])):
        at += got
    return view[:at]
