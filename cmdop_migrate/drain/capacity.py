"""What a drain has to place, and where there is room: read from this host and asked of the others."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmdop_migrate import clock
from cmdop_migrate.config import Config
from cmdop_migrate.drain import schedule
from cmdop_migrate.drain.schedule import Load, Target
from cmdop_migrate.errors import CmdopError, Usage
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host.host import Host
from cmdop_migrate.images.files import walk
from cmdop_migrate.migration import gather_session_facts, peers, plan
from cmdop_migrate.model import Record
from cmdop_migrate.preflight.facts.host import HostQuery
from cmdop_migrate.preflight.facts.session import PastCheckpoint, estimate
from cmdop_migrate.remote.inventory import SSH_CONFIG
from cmdop_migrate.remote.ssh import Pool


@dataclass(frozen=True)
class Unfit:
    """A host that takes nothing, and why."""

    name: str
    why: str


def load(this_host: Host, record: Record, measured: Sequence[PastCheckpoint]) -> Load:
    """What moving this session costs, from outside: it is not stopped for it."""
    directory = this_host.directory(record.session)
    uppers = [directory / f"layers/{number}/upper" for number in range(len(record.layers))]
    memory = gather_session_facts.memory(cgroup.pids(this_host.cgroup(record.session)))
    files = sum(walk.measure(upper).data_bytes for upper in uppers)
    guess = estimate(memory, files, measured, record.session)
    if guess is None:
        send, seconds = memory // schedule.RATIO + files, (memory + files) / schedule.RATE
    else:
        send, seconds = guess.new, guess.frozen_s + guess.upload_s
    return Load(record.session, record.name, memory, files, send, seconds)


def names(config: Config, given: Sequence[str]) -> list[str]:
    """The hosts to go to: those given, each known and another one than this; without any, all of the inventory.
    ~/.ssh/config names every machine a person logs in to: those go only by name."""
    inventory = peers.inventory(config)
    if not given:
        return [one.name for one in inventory.all() if one.source != SSH_CONFIG and one.name != config.host]
    for name in given:
        if name == config.host:
            raise Usage(f"{name} is this host itself", "Name another one; see: cmdop-migrate hosts ls")
        inventory.find(name)
    return list(dict.fromkeys(given))


def targets(
    this_host: Host, hosts: Sequence[str], sample: Record, patience: float = math.inf
) -> tuple[list[Target], list[Unfit]]:
    """All of them asked at once; one that has not answered after `patience` seconds is not waited for. Usage when one
    is this host itself under another name."""
    if not hosts:
        return [], []
    peers.own_facts(this_host)  # makes the key there must be, once
    found: dict[str, Target | Unfit | Usage] = {}
    with peers.pool(this_host.config) as pool:

        def ask(name: str) -> None:
            found[name] = _ask(this_host, pool, name, sample)

        asking = [threading.Thread(target=ask, args=(name,), daemon=True) for name in hosts]
        for one in asking:
            one.start()
        until = clock.boottime() + patience
        for one in asking:
            one.join(None if patience == math.inf else max(0.0, until - clock.boottime()))
        answers = [found.get(name, Unfit(name, f"{name}: no answer within {patience:.1f} s")) for name in hosts]
    for answer in answers:
        if isinstance(answer, Usage):
            raise answer
    return [one for one in answers if isinstance(one, Target)], [one for one in answers if isinstance(one, Unfit)]


def _ask(this_host: Host, pool: Pool, name: str, sample: Record) -> Target | Unfit | Usage:
    try:
        peer = peers.partner(this_host, pool, name)
        facts = plan.OtherHost(peer).facts(HostQuery(sample.session, sample.name))
    except Usage as error:
        return error
    except CmdopError as error:
        return Unfit(name, error.message)
    fatal = [one.message for one in facts.needs if one.fatal]
    if fatal:
        return Unfit(name, f"{name}: {'; '.join(fatal)}")
    return Target(name, facts.memory_available, facts.disk_free)


def memory_here() -> int:
    """Bytes available on this host."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 30


def hosts_json(targets: Sequence[Target], unfit: Sequence[Unfit]) -> list[dict[str, Any]]:
    """As `drain` answers them."""
    fit = [{"name": one.name, "ok": True, "memory": one.memory, "disk": one.disk} for one in targets]
    return [*fit, *({"name": one.name, "ok": False, "why": one.why} for one in unfit)]
