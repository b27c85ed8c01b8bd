"""Whether this host's sessions can be found at its relay: what `doctor` says of the link. Changes nothing."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate import clock
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, CmdopError, NotAdmitted
from cmdop_migrate.gateway import link_main
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import agent_process
from cmdop_migrate.host.host import Host
from cmdop_migrate.preflight.rules.doctor import Check
from cmdop_migrate.relay import backoff
from cmdop_migrate.relay.client_connection import dial

TIMEOUT = 5.0
PATIENCE = backoff.MOST + 2.0  # a link tries again within this


def check(config: Config) -> list[Check]:
    """One finding, or none where no relay is set. Never fatal: sessions do without."""
    if config.relay is None:
        return []
    try:
        asyncio.run(_knock(config, config.relay))
    except NotAdmitted as error:
        return [Check("relay", "missing", error.message, error.hint)]
    except CmdopError as error:
        return [Check("relay", "degraded", error.message, error.hint)]
    old = outdated(config)
    if old is not None:
        return [Check("relay", "degraded", *old)]
    admitted, link = f"{config.relay} admits {config.host}", _link(config)
    if link is not None:
        return [_linked(config, admitted, link)]
    if agent_process.holder_of(config) is None:
        return [Check("relay", "ok", f"{admitted}; the link comes with an agent, and that with a session")]
    return [Check("relay", "degraded", f"{admitted}, but no link runs beside the agent just now", _see_why(config))]


def outdated(config: Config) -> tuple[str, str] | None:
    """That the agent was started under another setting than is in force now, and what to do. None: it was not."""
    agent = agent_process.holder_of(config)
    if agent is None or agent.relay == config.relay:
        return None
    words = f"links to {agent.relay}" if agent.relay else "has no link"
    return (
        f"the agent (process {agent.pid}) {words}: it was started before `relay` was set to {config.relay}",
        "Start it again; sessions run on meanwhile: systemctl restart cmdop-migrate-agent, or, where it is no "
        f"service: kill {agent.pid}; cmdop-migrate ls",
    )


def _linked(config: Config, admitted: str, link: int) -> Check:
    """By what it says of itself. One that has just begun, or lost its relay a moment ago, is waited for."""
    until = clock.boottime() + PATIENCE
    while (standing := _standing(link)) is not None and not (standing.is_up or standing.is_stopped):
        if clock.boottime() >= until:
            break
        time.sleep(0.1)
    if standing is None:
        return Check("relay", "degraded", f"{admitted}, but the link has just ended", _see_why(config))
    if standing.is_stopped:
        return Check("relay", "degraded", f"{admitted}, but its link is stopped: process {link}", f"kill -CONT {link}")
    if standing.is_up:
        return Check("relay", "ok", f"{admitted}; linked by process {link}")
    some = f"only to {standing.up} of {standing.of} relays of that name" if standing.up else "not"
    words = f"{admitted}, but its link (process {link}) is {some} connected"
    return Check("relay", "degraded", words, _see_why(config))


def _see_why(config: Config) -> str:
    return f"See why: {config.log_file.with_name('link.log')}"


@dataclass(frozen=True)
class _Standing:
    """To how many relays, of how many, a link is connected."""

    up: int
    of: int
    is_stopped: bool

    @property
    def is_up(self) -> bool:
        return 0 < self.of == self.up and not self.is_stopped


def _standing(pid: int) -> _Standing | None:
    """None: it is gone. One that has not said anything yet is connected to none."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(") ")
    except OSError:
        return None
    said = re.fullmatch(rf"{link_main.NAME} (\d+)/(\d+)", name)
    up, of = (int(said[1]), int(said[2])) if said else (0, 0)
    return _Standing(up, of, rest[:1] in ("T", "t"))


async def _knock(config: Config, url: str) -> None:
    """As the link does it. NotAdmitted, Unreachable."""
    async with await dial(url, link_main.credential(config), TIMEOUT):
        pass


def _link(config: Config) -> int | None:
    """The process, which is in its agent's group."""
    try:
        beside = cgroup.pids(Host(config).cgroup("agent"))
    except (OSError, Blocked):
        return None  # no agent ever was here
    for pid in beside:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        if words[-2:] == [b"link", b""]:
            return pid
    return None
