"""Whether this host's sessions can be found at its relay: what `doctor` says of the link. Changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, CmdopError, NotAdmitted
from cmdop_migrate.flows import agentlock, linkserve
from cmdop_migrate.preflight.checks import Check
from cmdop_migrate.relay.dial import dial
from cmdop_migrate.session import cgroup
from cmdop_migrate.session.records import Records

TIMEOUT = 5.0


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
        return [Check("relay", "ok", f"{admitted}; linked by process {link}")]
    if agentlock.holder_of(config) is None:
        return [Check("relay", "ok", f"{admitted}; the link comes with an agent, and that with a session")]
    log = config.log_file.with_name("link.log")
    return [Check("relay", "degraded", f"{admitted}, but no link runs beside the agent just now", f"See why: {log}")]


def outdated(config: Config) -> tuple[str, str] | None:
    """That the agent was started under another setting than is in force now, and what to do. None: it was not."""
    agent = agentlock.holder_of(config)
    if agent is None or agent.relay == config.relay:
        return None
    words = f"links to {agent.relay}" if agent.relay else "has no link"
    return (
        f"the agent (process {agent.pid}) {words}: it was started before `relay` was set to {config.relay}",
        "Start it again; sessions run on meanwhile: systemctl restart cmdop-migrate-agent, or, where it is no "
        f"service: kill {agent.pid}; cmdop-migrate ls",
    )


async def _knock(config: Config, url: str) -> None:
    """As the link does it. NotAdmitted, Unreachable."""
    async with await dial(url, linkserve.credential(config), TIMEOUT):
        pass


def _link(config: Config) -> int | None:
    """The process, which is in its agent's group."""
    try:
        beside = cgroup.pids(Records(config).cgroup("agent"))
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
