"""Measure what each session of this host costs to move, and ask other hosts how much room they have."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate import clock
from cmdop_migrate.config import Config
from cmdop_migrate.drain import schedule
from cmdop_migrate.drain.schedule import DrainTarget, Load
from cmdop_migrate.errors import CmdopError, Usage
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.files import walk
from cmdop_migrate.migration import gather_facts, peers, plan
from cmdop_migrate.model import Record
from cmdop_migrate.preflight.facts.host import HostQuery
from cmdop_migrate.preflight.facts.session import PastCheckpoint, estimate
from cmdop_migrate.remote.inventory import SSH_CONFIG
from cmdop_migrate.remote.ssh import SshPool


@dataclass(frozen=True)
class UnfitHost:
    """Name a host that takes no session, and why."""

    name: str
    why: str


def load(this_host: Host, record: Record, measured: Sequence[PastCheckpoint]) -> Load:
    """Return what moving this session costs, measured from outside: the session is not stopped."""
    directory = this_host.directory(record.session)
    uppers = [directory / f"layers/{number}/upper" for number in range(len(record.layers))]
    memory = gather_facts.memory(cgroup.pids(this_host.cgroup(record.session)))
    files = sum(walk.measure(upper).data_bytes for upper in uppers)
    guess = estimate(memory, files, measured, record.session)
    if guess is None:
        send, seconds = memory // schedule.RATIO + files, (memory + files) / schedule.RATE
    else:
        send, seconds = guess.new, guess.frozen_s + guess.upload_s
    return Load(record.session, record.name, memory, files, send, seconds)


def names(config: Config, given: Sequence[str]) -> list[str]:
    """Return the names of the hosts to move sessions to: those given, or without any all of the inventory.
    ~/.ssh/config lists every machine that a person logs in to, so its hosts are used only if they are given. Raise
    Usage if one is this host, HostNotFound if one is unknown."""
    inventory = peers.inventory(config)
    if not given:
        return [host.name for host in inventory.all() if host.source != SSH_CONFIG and host.name != config.host]
    for name in given:
        if name == config.host:
            raise Usage(f"{name} is this host itself", "Name another one; see: cmdop-migrate hosts ls")
        inventory.find(name)
    return list(dict.fromkeys(given))


def targets(
    this_host: Host, hosts: Sequence[str], sample: Record, timeout: float = math.inf
) -> tuple[list[DrainTarget], list[UnfitHost]]:
    """Ask all hosts simultaneously how much room they have. A host that has not answered after `timeout` seconds is
    reported as unfit. Raise Usage if one is this host itself under another name."""
    if not hosts:
        return [], []
    peers.own_facts(this_host)  # create the key first, once: several threads need it
    answered: dict[str, DrainTarget | UnfitHost | Usage] = {}
    with peers.pool(this_host.config) as pool:

        def ask(name: str) -> None:
            answered[name] = _ask(this_host, pool, name, sample)

        asking = [threading.Thread(target=ask, args=(name,), daemon=True) for name in hosts]
        for thread in asking:
            thread.start()
        until = clock.boottime() + timeout
        for thread in asking:
            thread.join(None if timeout == math.inf else max(0.0, until - clock.boottime()))
        answers = [answered.get(name, UnfitHost(name, f"{name}: no answer within {timeout:.1f} s")) for name in hosts]
    for answer in answers:
        if isinstance(answer, Usage):
            raise answer
    fit = [answer for answer in answers if isinstance(answer, DrainTarget)]
    return fit, [answer for answer in answers if isinstance(answer, UnfitHost)]


def _ask(this_host: Host, pool: SshPool, name: str, sample: Record) -> DrainTarget | UnfitHost | Usage:
    try:
        peer = peers.checked_peer(this_host, pool, name)
        facts = plan.RemoteFacts(peer).facts(HostQuery(sample.session, sample.name))
    except Usage as error:
        return error
    except CmdopError as error:
        return UnfitHost(name, error.message)
    fatal = [need.message for need in facts.needs if need.fatal]
    if fatal:
        return UnfitHost(name, f"{name}: {'; '.join(fatal)}")
    return DrainTarget(name, facts.memory_available, facts.disk_free)


def memory_here() -> int:
    """Return the bytes of memory available on this host."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 30
