"""What ~/.ssh/config says of a host: HostName, Port, User, IdentityFile, ProxyJump. Nothing else of it is used."""

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
    address: str | None = None
    port: int | None = None
    user: str | None = None
    keys: tuple[str, ...] = ()
    jump: str | None = None


class SshConfig:
    """Read once, on first use. No file is an empty one."""

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
            raise BadConfig(f"cannot read {self._file}: {error}", "Mend it; `ssh -G HOST` reads it too.") from error

    def names(self) -> list[str]:
        """The hosts it names one by one; patterns are rules, not hosts."""
        if self._parsed is None:
            return []
        return sorted(name for name in self._parsed.get_hostnames() if not set(name) & set("*?!"))

    def lookup(self, host: str) -> SshSettings:
        if self._parsed is None:
            return SshSettings()
        from paramiko import SSHException

        try:
            found = self._parsed.lookup(host)
            port = int(found["port"]) if "port" in found else None
        except (SSHException, ValueError, ImportError) as error:  # ImportError: `Match exec` needs another package
            raise BadConfig(f"{self._file}: cannot be used for {host!r}: {error}", "See: ssh -G " + host) from error
        jump = _unless_none(found.get("proxyjump"))
        if jump is None and _unless_none(found.get("proxycommand")):
            raise BadConfig(
                f"{self._file}: ProxyCommand of {host!r} is not supported", "Use ProxyJump there, or hosts add --jump."
            )
        named = [self._expanded(str(one)) for one in found.get("identityfile", [])]
        keys = tuple(
            one for one in named if os.path.exists(one)
        )  # as ssh does: a general rule may name some that are not
        address = found.get("hostname")
        return SshSettings(address if address != host else None, port, found.get("user"), keys, jump)

    def _expanded(self, path: str) -> str:
        """~ is the home this file lies in."""
        return self._home + path[1:] if path.startswith("~/") else path


def _unless_none(value: str | None) -> str | None:
    return None if value is None or value.lower() == "none" else value
