"""Simulate hosts for tests: a network namespace each, joined to this machine by a veth pair, cut off by nftables.

with NetHost("10.213.7.", 0) as host:
    subprocess.Popen([*host.enter, …])     # reaches this machine at host.gateway
    host.cut("input")                      # its requests arrive, the answers do not
    host.heal()
"""

from __future__ import annotations

import os
import subprocess
from typing import Literal, Self

Way = Literal["input", "output", "both"]


class NetHost:
    """Make one network namespace. `block` names three octets that no other test uses; `number` is below 60."""

    def __init__(self, block: str, number: int) -> None:
        self.name = f"cm-{os.getpid()}-{number}"
        self._link = f"cmv{os.getpid() % 100000}-{number}"
        self.gateway = f"{block}{number * 4 + 1}"
        self._address = f"{block}{number * 4 + 2}"
        self.enter = ["ip", "netns", "exec", self.name]

    def __enter__(self) -> Self:
        try:
            _run("ip", "netns", "add", self.name)
            _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _run("ip", "address", "add", f"{self.gateway}/30", "dev", self._link)
            _run("ip", "link", "set", self._link, "up")
            _run(*self.enter, "ip", "address", "add", f"{self._address}/30", "dev", "eth0")
            _run(*self.enter, "ip", "link", "set", "eth0", "up")
            _run(*self.enter, "ip", "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "link", "delete", self._link], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, check=False)

    def cut(self, way: Way) -> None:
        """Drop its packets, as on a broken wire: neither side gets an error."""
        self.heal()
        hooks = ("input", "output") if way == "both" else (way,)
        chains = "\n".join(f"chain {hook} {{ type filter hook {hook} priority 0; policy drop; }}" for hook in hooks)
        _run(*self.enter, "nft", f"table inet cut {{\n{chains}\n}}")

    def heal(self) -> None:
        subprocess.run([*self.enter, "nft", "delete", "table", "inet", "cut"], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
