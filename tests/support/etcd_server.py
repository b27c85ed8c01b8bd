"""Run a real etcd for tests: one member or a cluster, on free loopback ports, in the test's directory.

with etcd(tmp_path, members=3) as cluster:
    lease = open_lease(cluster.url("prefix"))
    cluster.members[0].stop()
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.patience import bound
from tests.support.servers import free_ports

START_WITHIN = 30.0


@dataclass
class Member:
    """Control one etcd process. `stop` and `start` keep its ports and its data: a crash and a reboot."""

    name: str
    dir: Path
    client_port: int
    peer_port: int
    cluster: str
    address: str = "127.0.0.1"
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def peer(self) -> str:
        return f"http://{self.address}:{self.peer_port}"

    def command(self) -> list[str]:
        client = f"http://{self.address}:{self.client_port}"
        options = {
            "name": self.name,
            "data-dir": self.dir / "data",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": self.peer,
            "initial-advertise-peer-urls": self.peer,
            "initial-cluster": self.cluster,
            "initial-cluster-state": "new",
        }
        return [etcd_binary(), *(f"--{key}={value}" for key, value in options.items())]

    def start(self) -> None:
        assert self.process is None, "runs already"
        with (self.dir / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.dir,
                env={"PATH": "/usr/bin:/bin"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the process, by its own pid, as a crash does."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)

    def call(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self.address, self.client_port, timeout=2)
        try:
            connection.request("POST", path, json.dumps(request))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer

    def is_leader(self) -> bool:
        status = self.call("/v3/maintenance/status", {})
        return bool(status.get("leader")) and status["leader"] == status["header"]["member_id"]

    def trouble(self) -> str | None:
        """Return why it cannot be used yet, or None."""
        try:
            answer = self.call("/v3/kv/put", {"key": "cmVhZHk=", "value": "eA=="})
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(error) or type(error).__name__
        return None if "header" in answer else str(answer)


@dataclass
class Cluster:
    members: list[Member]

    def url(self, prefix: str) -> str:
        return f"etcd://{','.join(f'{one.address}:{one.client_port}' for one in self.members)}/{prefix}"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + bound(START_WITHIN)
        for one in self.members:
            if one.process is None:
                continue
            while (trouble := one.trouble()) is not None:
                if one.process.poll() is not None or time.monotonic() > deadline:
                    tail = (one.dir / "etcd.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"etcd {one.name} did not start: {trouble}\n{tail}")
                time.sleep(0.05)

    def leader(self) -> Member:
        return next(one for one in self.members if one.process is not None and one.is_leader())

    def stop(self) -> None:
        for one in self.members:
            one.stop()


def etcd_binary() -> str:
    found = shutil.which("etcd", path="/usr/bin:/usr/local/bin:/usr/sbin:/bin")
    if not found:
        raise RuntimeError("no `etcd`: run scripts/setup --test (package etcd-server)")
    return found


@contextlib.contextmanager
def etcd(tmp: Path, members: int = 1) -> Iterator[Cluster]:
    """Run a real etcd for the length of the block."""
    ports = free_ports(2 * members)
    pairs = list(zip(ports[::2], ports[1::2], strict=True))
    everyone = ",".join(f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(pairs))
    cluster = Cluster([])
    try:
        for number, (client, peer) in enumerate(pairs):
            home = tmp / f"m{number}"
            home.mkdir(parents=True)
            cluster.members.append(Member(f"m{number}", home, client, peer, everyone))
            cluster.members[-1].start()
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()
