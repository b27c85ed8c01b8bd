"""Run a real sshd on a free loopback port, with its own host key, that accepts one key of the test.

with an_sshd(tmp_path / "b", keys.public) as server:
    server.port, server.fingerprint
    server.hang_up()        # its connections die, as when the host does
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.patience import bound
from tests.support.servers import free_ports

START_WITHIN = 10.0
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass
class Sshd:
    dir: Path
    port: int
    prefix: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def public_key(self) -> str:
        """Return the host key in the form `ssh-ed25519 AAAA…`."""
        return " ".join((self.dir / "host_key.pub").read_text().split()[:2])

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the host key as OpenSSH prints it."""
        said = subprocess.run(
            ["ssh-keygen", "-lf", self.dir / "host_key.pub"], capture_output=True, text=True, check=True
        )
        return said.stdout.split()[1]

    def log(self) -> str:
        return (self.dir / "sshd.log").read_text(errors="replace")

    def logins(self) -> int:
        return self.log().count("Accepted publickey")

    def start(self) -> None:
        assert self.process is None, "runs already"
        os.makedirs("/run/sshd", exist_ok=True)
        with (self.dir / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, SSHD, "-D", "-e", "-f", str(self.dir / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + bound(START_WITHIN)
        while not self._listens():
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"sshd did not start:\n{self.log()[-2000:]}")
            time.sleep(0.02)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def connections(self) -> list[int]:
        """Return the processes that serve one connection each."""
        if self.process is None:
            return []
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def hang_up(self) -> None:
        """Cut every connection immediately, without a farewell. The commands that run there are not touched."""
        for pid in self.connections():
            for one in [*_below(pid, "sshd"), pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop its connections for the length of the block: they stay open and answer nothing, as on a suspended host."""
        pids = [one for pid in self.connections() for one in [pid, *_below(pid, "sshd")]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        process = self.process
        if process is None:
            return
        self.hang_up()
        self.process = None
        if process.poll() is None:
            process.kill()
        process.wait(10)


def _below(pid: int, name: str) -> list[int]:
    """Return the descendants of `pid` called `name`, each after its parent."""
    found = []
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            if Path(f"/proc/{child}/comm").read_text().strip().startswith(name):
                found += [child, *_below(child, name)]
    return found


@dataclass(frozen=True)
class Login:
    """Hold a key pair to log in with."""

    private: Path

    @property
    def public(self) -> str:
        return self.private.with_suffix(".pub").read_text()


def new_key(path: Path, passphrase: str = "") -> Login:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=20)
    return Login(path)


def with_account(directory: Path, user: str, rule: str) -> tuple[str, ...]:
    """Return a command prefix: the sshd and all that it runs see one more user, who may do by sudo what `rule` says. No other
    process sees that user."""
    files = {
        "passwd": Path("/etc/passwd").read_text() + f"{user}:x:4711:4711::/:/bin/sh\n",
        "shadow": Path("/etc/shadow").read_text() + f"{user}:*:19000:0:99999:7:::\n",
        "sudoers": f"root ALL=(ALL:ALL) ALL\n{user} {rule}\n",
    }
    for name, text in files.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o440 if name == "sudoers" else 0o644)
    mounts = " && ".join(f"mount --bind {directory}/{name} /etc/{name}" for name in files)
    return "unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} && exec "$0" "$@"'


@contextlib.contextmanager
def an_sshd(directory: Path, login: Login, options: str = "", prefix: tuple[str, ...] = ()) -> Iterator[Sshd]:
    """Run an sshd until the end of the block. `options` are more lines of sshd_config; `prefix` is a command that executes
    the sshd."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "host_key").exists():
        new_key(directory / "host_key")
    port = free_ports(1)[0]
    (directory / "authorized_keys").write_text(login.public)
    (directory / "sshd_config").write_text(
        f"""ListenAddress 127.0.0.1
Port {port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
PrintMotd no
LogLevel VERBOSE
SetEnv HOME={directory}
{options}
"""
    )
    server = Sshd(directory, port, prefix)
    try:
        server.start()
        yield server
    finally:
        server.stop()
