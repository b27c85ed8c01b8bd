"""Know which key a host must show. A key is known only after a person accepted it: nothing is added automatically.

Files are read in this order, and the first that knows the host decides: STATE_DIR/known_hosts (what `hosts add`
accepted), ~/.ssh/known_hosts, /etc/ssh/ssh_known_hosts. A key marked @revoked in any of them is never accepted.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paramiko import PKey
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

from cmdop_migrate.errors import BadConfig
from cmdop_migrate.remote.inventory import replace
from cmdop_migrate.util import locks

SYSTEM_FILE = Path("/etc/ssh/ssh_known_hosts")


@dataclass(frozen=True)
class ShownKey:
    """Show a key as a person compares it: `ssh-ed25519 SHA256:…`, the fingerprint as OpenSSH prints it."""

    kind: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"


def shown(key: PKey) -> ShownKey:
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return ShownKey(key.get_name(), f"SHA256:{digest}")


class KnownHosts:
    """Look up, accept and forget host keys."""

    def __init__(self, own: Path, home: Path, system: Path = SYSTEM_FILE) -> None:
        self.own = own
        self._files = (own, home / ".ssh" / "known_hosts", system)

    def find(self, name: str) -> tuple[Path, list[PKey]] | None:
        """Return the first file that knows `name` (`host` or `[host]:port`), and the keys it allows, or None."""
        for file in self._files:
            keys = [entry.key for entry in _entries(file) if entry.key is not None and _names(entry, name)]
            if keys:
                return file, keys
        return None

    def is_revoked(self, key: PKey) -> bool:
        body = key.get_base64()
        return any(
            line.startswith("@revoked") and body in line.split() for file in self._files for line in _lines(file)
        )

    def accept(self, name: str, key: PKey) -> None:
        """Record a key that a person accepted, replacing known keys of `name` in our own file. Durable when this
        returns."""
        self._rewrite(name, f"{name} {key.get_name()} {key.get_base64()}")

    def forget(self, name: str) -> None:
        """Remove the keys of `name` from our own file only: the others belong to other programs."""
        if self.own.exists():
            self._rewrite(name, None)

    def _rewrite(self, name: str, line: str | None) -> None:
        with locks.held(self.own.with_name(".known_hosts.lock")):
            kept = [one for one in _lines(self.own) if one.split()[:1] != [name]]
            replace(self.own, "".join(f"{one}\n" for one in [*kept, *([line] if line else [])]).encode())


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadConfig(f"cannot read {file}: {error.strerror}", "Check its permissions.") from error


def _entries(file: Path) -> Iterator[HostKeyEntry]:
    """Yield the entries of a file. Skip lines of unknown kinds (certificates, markers, unknown key types)."""
    for line in map(str.strip, _lines(file)):
        if not line or line.startswith(("#", "@")):
            continue
        try:
            entry = HostKeyEntry.from_line(" ".join(line.split()))
        except InvalidHostKey:
            continue
        if entry is not None:
            yield entry


def _names(entry: HostKeyEntry, name: str) -> bool:
    """Tell whether the line is about `name`; names in it may be hashed."""
    table = HostKeys()
    for hostname in entry.hostnames or ():
        if entry.key is not None:
            table.add(hostname, entry.key.get_name(), entry.key)
    return table.lookup(name) is not None
