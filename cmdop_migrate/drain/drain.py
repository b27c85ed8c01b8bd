"""Empty this host: every session moved to another, or parked in the store.

    flag      STATE_DIR/draining.json: no session begins here from now on
    resume    moves that were cut off come first, and sessions of a drain that was
    place     schedule.py says who is next; each goes in a process of its own (evacuation.py, workers.py)

Killed at any instant, what was under way ends by itself or by `resume`; the next
drain goes on. Only `undrain` takes the flag away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cmdop_migrate import clock
from cmdop_migrate.drain import capacity, schedule
from cmdop_migrate.drain.drain_options import Say, Wanted
from cmdop_migrate.drain.runner import Evacuation
from cmdop_migrate.drain.schedule import Planned
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import draining
from cmdop_migrate.host.drain_journal import Drains
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration import gather_facts
from cmdop_migrate.util.signals import Stop


def dry_run(this_host: Host, wanted: Wanted) -> dict[str, Any]:
    """The schedule; nothing is changed."""
    wanted.check()
    hosts = [] if wanted.park else capacity.names(this_host.config, wanted.hosts)
    here = [one for one in this_host.all() if one.phase == "live"]
    targets, unfit = capacity.targets(this_host, hosts, here[0]) if here else ([], [])
    measured = gather_facts.measured(this_host)
    found = [wanted.allows(capacity.load(this_host, one, measured)) for one in here]
    planned = schedule.schedule(found, targets, wanted.budget(), wanted.limit)
    rows = [_row(one) for one in planned]
    lists: dict[str, list[dict[str, Any]]] = {
        word: [row for row, one in zip(rows, planned, strict=True) if one.how == how]
        for word, how in (("moved", "move"), ("parked", "park"), ("left", "leave"))
    }
    return {"dry_run": True, "schedule": rows, **lists, "failed": [], "targets": capacity.hosts_json(targets, unfit)}


def drain(this_host: Host, wanted: Wanted, flags: Sequence[str], stop: Stop, say: Say) -> dict[str, Any]:
    """What `drain --json` answers. `flags`: the global ones, for the commands it starts."""
    wanted.check()
    began = clock.boottime()
    hosts = [] if wanted.park else capacity.names(this_host.config, wanted.hosts)
    drains = Drains(this_host.config.state_dir)
    with drains.alone():
        before = draining.read(this_host.config.state_dir)
        made = (drains.find(before.drain) if before else None) or drains.begin(this_host.config.host)
        with this_host.locked():
            draining.write(this_host.config.state_dir, made.id)
        try:
            run = Evacuation(this_host, drains, made, wanted, flags, stop, say, hosts)
        except Usage:
            if before is None:  # nothing was begun: the host is as it was
                with this_host.locked():
                    draining.clear(this_host.config.state_dir)
            raise
        this_host.events.emit("drain_started", drain=made.id, to=hosts, deadline_s=wanted.deadline)
        run.run()
        facts = run.facts(clock.boottime() - began)
        counts = {word: len(facts[word]) for word in ("moved", "parked", "failed", "left", "ended")}
        this_host.events.emit("drained", drain=made.id, took_s=facts["took_s"], sessions=counts)
        return facts


def _row(one: Planned) -> dict[str, Any]:
    known = {"session": one.load.session, "name": one.load.name, "how": one.how, "to": one.target, "why": one.why}
    times = {"begin_s": round(one.begin_s, 1), "end_s": round(one.end_s, 1)}
    return {**known, **times, "bytes": {"memory": one.load.memory, "files": one.load.files, "send": one.load.send}}
