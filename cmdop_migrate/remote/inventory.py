"""List the hosts this one knows, and from where: config file > STATE_DIR/hosts.json (`hosts add`) > ~/.ssh/config.

Settings that an entry of the first two does not have (port, user, key, jump) are looked up in ~/.ssh/config by its
address, as `ssh ADDRESS` would.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate import host_entry
from cmdop_migrate.errors import BadConfig, HostNotFound, Usage
from cmdop_migrate.host_entry import HostEntry
from cmdop_migrate.remote.sshconfig import SshConfig
from cmdop_migrate.util import locks

CONFIG, INVENTORY, SSH_CONFIG = "config file", "inventory", "~/.ssh/config"
COMMAND = "cmdop-migrate"
PORT = 22
_FORMAT = 1
_MAX_HOPS = 8


@dataclass(frozen=True)
class SshTarget:
    """Hold everything needed to reach one host. `via` is the jump host, itself resolved."""

    name: str
    address: str
    source: str
    port: int = PORT
    user: str | None = None
    keys: tuple[str, ...] = ()
    via: SshTarget | None = None
    sudo: bool = False
    command: str = COMMAND

    @property
    def known_as(self) -> str:
        """Return its name in a known_hosts file."""
        return self.address if self.port == PORT else f"[{self.address}]:{self.port}"

    @property
    def shown(self) -> str:
        where = f"[{self.address}]" if ":" in self.address else self.address
        return (f"{self.user}@" if self.user else "") + where + (f":{self.port}" if self.port != PORT else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "address": self.address,
            "port": self.port,
            "user": self.user,
            "keys": list(self.keys),
            "jump": self.via.name if self.via else None,
            "sudo": self.sudo,
            "command": self.command,
            "source": self.source,
        }


class Inventory:
    """Find hosts. `written`: the hosts of the config file. `home`: the directory whose .ssh/config is read."""

    def __init__(self, state_dir: Path, written: tuple[HostEntry, ...], home: Path) -> None:
        self._file = state_dir / "hosts.json"
        self._written = {entry.name: entry for entry in written}
        self._ssh = SshConfig(home / ".ssh" / "config", str(home))

    def all(self) -> list[SshTarget]:
        """Return every known host, by name."""
        names = {*self._written, *self._kept(), *self._ssh.names()}
        return [self.find(name) for name in sorted(names)]

    def find(self, name: str) -> SshTarget:
        """Return the host of this name. Raise HostNotFound, which names the known ones."""
        return self._find(name, 0)

    def resolve(self, entry: HostEntry, source: str = INVENTORY) -> SshTarget:
        """Return the target of this entry, which need not be in the inventory yet."""
        return self._resolve(entry, source, 0)

    def is_written(self, name: str) -> bool:
        """Tell whether the config file has this host: then hosts.json cannot change it."""
        return name in self._written

    def add(self, entry: HostEntry) -> None:
        """Add the entry, replacing one of the same name. Durable when this returns."""
        with self._locked():
            self._write({**self._kept(), entry.name: entry})

    def remove(self, name: str) -> None:
        """Remove a host from hosts.json. Raise HostNotFound if no host has this name, Usage if it comes from
        elsewhere."""
        with self._locked():
            kept = dict(self._kept())
            if name in kept:
                del kept[name]
                self._write(kept)
                return
        known = self.find(name)  # HostNotFound
        raise Usage(f"host {name!r} is not in the inventory: it comes from the {known.source}", "Remove it there.")

    def _find(self, name: str, hops: int) -> SshTarget:
        if name in self._written:
            return self._resolve(self._written[name], CONFIG, hops)
        kept = self._kept()
        if name in kept:
            return self._resolve(kept[name], INVENTORY, hops)
        if name in self._ssh.names():
            return self._resolve(HostEntry(name, name), SSH_CONFIG, hops)
        known = ", ".join(sorted({*self._written, *kept, *self._ssh.names()})) or "none"
        raise HostNotFound(f"no host {name!r}", f"Known hosts: {known}. Add it: cmdop-migrate hosts add NAME ADDRESS")

    def _resolve(self, entry: HostEntry, source: str, hops: int) -> SshTarget:
        if hops > _MAX_HOPS:
            raise BadConfig(f"the jump hosts of {entry.name!r} form a cycle", "See: cmdop-migrate hosts ls")
        settings = self._ssh.lookup(entry.address)
        filled = any(
            ours is None and theirs
            for ours, theirs in ((entry.port, settings.port), (entry.user, settings.user), (entry.key, settings.keys))
        )
        jump = entry.jump if entry.jump is not None else settings.jump
        return SshTarget(
            entry.name,
            settings.address or entry.address,
            f"{source}, {SSH_CONFIG}" if filled and source != SSH_CONFIG else source,
            entry.port or settings.port or PORT,
            entry.user or settings.user,
            (entry.key,) if entry.key else settings.keys,
            self._hop(jump, hops + 1) if jump else None,
            entry.sudo,
            entry.command or COMMAND,
        )

    def _hop(self, text: str, hops: int) -> SshTarget:
        """Resolve a jump specification; `a,b` means through a, then b."""
        before, _, last = text.rpartition(",")
        last = last.strip()
        if not before and (last in self._written or last in self._kept() or last in self._ssh.names()):
            return self._find(last, hops)
        user, address, port = host_entry.split_login(last)
        return self._resolve(HostEntry(last, address, port, user, jump=before or None), "jump", hops)

    def _kept(self) -> Mapping[str, HostEntry]:
        try:
            table = json.loads(self._file.read_bytes())
            if table["format"] != _FORMAT:
                raise ValueError(f"format {table['format']}, this version reads {_FORMAT}")
            return {name: host_entry.make(name, row) for name, row in table["hosts"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, Usage) as error:
            reason = error.message if isinstance(error, Usage) else str(error)
            raise BadConfig(
                f"cannot read {self._file}: {reason}", "Repair it, or delete it and add the hosts again."
            ) from error

    def _write(self, entries: Mapping[str, HostEntry]) -> None:
        table = {"format": _FORMAT, "hosts": {name: entry.to_json() for name, entry in sorted(entries.items())}}
        replace(self._file, json.dumps(table, indent=1).encode())

    def _locked(self) -> AbstractContextManager[None]:
        """Serialize changes: of two simultaneous ones, one would be lost."""
        return locks.held(self._file.with_suffix(".lock"))


def replace(path: Path, data: bytes) -> None:
    """Replace the file atomically: it is always the complete old one or the complete new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
