"""Read HostName, Port, User, IdentityFile and ProxyJump of a host from ~/.ssh/config. Nothing else of it is used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cmdop_migrate.errors import BadConfig

if TYPE_CHECKING:
    from paramiko import SSHConfig


@dataclass(frozen=True)
class SshSettings:
    """Hold the settings of one host in ~/.ssh/config; None or empty where it has none."""

    address: str | None = None
    port: int | None = None
    user: str | None = None
    keys: tuple[str, ...] = ()
    jump: str | None = None


class SshConfig:
    """Look up hosts in the file. It is read once, on first use; a missing file counts as empty."""

    def __init__(self, file: Path, home: str) -> None:
        self._file, self._home = file, home

    @cached_property
    def _parsed(self) -> SSHConfig | None:
        if not self._file.exists():
            return None
        from paramiko import SSHConfig, SSHException  # most hosts have no such file

        try:
            return SSHConfig.from_text(self._file.read_text(encoding="utf-8", errors="replace"))
        except (OSError, SSHException) as error:
            raise BadConfig(f"cannot read {self._file}: {error}", "Repair it; see: ssh -G HOST") from error

    def names(self) -> list[str]:
        """Return the hosts that the file names individually; patterns are rules, not hosts."""
        if self._parsed is None:
            return []
        return sorted(name for name in self._parsed.get_hostnames() if not set(name) & set("*?!"))

    def lookup(self, host: str) -> SshSettings:
        """Return the settings of a host. Raise BadConfig if the file is invalid or needs ProxyCommand."""
        if self._parsed is None:
            return SshSettings()
        from paramiko import SSHException

        try:
            settings = self._parsed.lookup(host)
            port = int(settings["port"]) if "port" in settings else None
        except (SSHException, ValueError, ImportError) as error:  # ImportError: `Match exec` needs another package
            raise BadConfig(f"{self._file}: cannot be used for {host!r}: {error}", "See: ssh -G " + host) from error
        jump = _unless_none(settings.get("proxyjump"))
        if jump is None and _unless_none(settings.get("proxycommand")):
            raise BadConfig(
                f"{self._file}: ProxyCommand of {host!r} is not supported", "Use ProxyJump there, or hosts add --jump."
            )
        named = [self._expanded(str(path)) for path in settings.get("identityfile", [])]
        # As ssh does: a general rule may name files that do not exist.
        keys = tuple(path for path in named if os.path.exists(path))
        address = settings.get("hostname")
        return SshSettings(address if address != host else None, port, settings.get("user"), keys, jump)

    def _expanded(self, path: str) -> str:
        """Expand ~ to the home directory that contains this file."""
        return self._home + path[1:] if path.startswith("~/") else path


def _unless_none(value: str | None) -> str | None:
    return None if value is None or value.lower() == "none" else value
