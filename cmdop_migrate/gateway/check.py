"""Check for `doctor` whether this host's sessions can be reached through its relay. Changes nothing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from cmdop_migrate import clock
from cmdop_migrate.config import Config
from cmdop_migrate.errors import Blocked, CmdopError, NotAdmitted
from cmdop_migrate.gateway import link_main, link_status
from cmdop_migrate.gateway.link_status import LinkStatus
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import agent_process
from cmdop_migrate.host.host import Host
from cmdop_migrate.preflight.rules.doctor import Check
from cmdop_migrate.relay import backoff
from cmdop_migrate.relay.client_connection import dial

DIAL_TIMEOUT = 5.0
RECONNECT_TIMEOUT = backoff.MOST + 2.0  # a link tries again within this
_STOPPED = ("T", "t")  # states of a process in /proc


def check(config: Config) -> list[Check]:
    """Return one check, or none if no relay is set. It is never fatal: sessions run without a relay."""
    if config.relay is None:
        return []
    try:
        asyncio.run(_dial(config, config.relay))
    except NotAdmitted as error:
        return [Check("relay", "missing", error.message, error.hint)]
    except CmdopError as error:
        return [Check("relay", "degraded", error.message, error.hint)]
    old = outdated(config)
    if old is not None:
        return [Check("relay", "degraded", *old)]
    admitted, link = f"{config.relay} admits {config.host}", _link_process(config)
    if link is not None:
        return [_linked(config, admitted, link)]
    if agent_process.holder_of(config) is None:
        return [Check("relay", "ok", f"{admitted}; the link starts with the agent, and the agent with a session")]
    return [Check("relay", "degraded", f"{admitted}, but no link runs beside the agent now", _see_why(config))]


def outdated(config: Config) -> tuple[str, str] | None:
    """Return a message and a hint if the agent was started with another `relay` setting than the current one."""
    agent = agent_process.holder_of(config)
    if agent is None or agent.relay == config.relay:
        return None
    link = f"links to {agent.relay}" if agent.relay else "has no link"
    return (
        f"the agent (process {agent.pid}) {link}: it was started before `relay` was set to {config.relay}",
        "Restart it; sessions keep running meanwhile: systemctl restart cmdop-migrate-agent or, if it is not a "
        f"service: kill {agent.pid}; cmdop-migrate ls",
    )


def _linked(config: Config, admitted: str, link: int) -> Check:
    """Check the link by the status it has written. Wait for a link that has just started or lost its relay."""
    until = clock.boottime() + RECONNECT_TIMEOUT
    while True:
        state, status = _process_state(link), _status(config, link)
        if state in (None, *_STOPPED) or status.is_up or clock.boottime() >= until:
            break
        time.sleep(0.1)
    if state is None:
        return Check("relay", "degraded", f"{admitted}, but the link has just ended", _see_why(config))
    if state in _STOPPED:
        return Check("relay", "degraded", f"{admitted}, but its link is stopped: process {link}", f"kill -CONT {link}")
    if status.is_up:
        return Check("relay", "ok", f"{admitted}; linked by process {link}")
    some = f"only to {status.connected} of {status.relays} relays of that name" if status.connected else "not"
    message = f"{admitted}, but its link (process {link}) is {some} connected"
    return Check("relay", "degraded", message, _see_why(config))


def _see_why(config: Config) -> str:
    return f"See why: {config.log_file.with_name('link.log')}"


def _process_state(pid: int) -> str | None:
    """Return the state letter of a process, or None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return None


def _status(config: Config, pid: int) -> LinkStatus:
    """Return the status of this link; not connected if it has not written any yet."""
    status = link_status.read(config)
    return status if status is not None and status.pid == pid else LinkStatus(pid, 0, 0)


async def _dial(config: Config, url: str) -> None:
    """Connect to the relay as the link does. Raise NotAdmitted or Unreachable."""
    async with await dial(url, link_main.credential(config), DIAL_TIMEOUT):
        pass


def _link_process(config: Config) -> int | None:
    """Return the pid of the link, which is in the agent's cgroup."""
    try:
        pids = cgroup.pids(Host(config).cgroup("agent"))
    except (OSError, Blocked):
        return None  # no agent has ever run here
    for pid in pids:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # the process has just ended
        if arguments[-2:] == [b"link", b""]:
            return pid
    return None
