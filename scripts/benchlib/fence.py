"""Measure how long a session runs after its lease's deadline when its agent is dead: deadline to frozen."""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import tempfile
import time
from pathlib import Path

from cmdop_migrate.session.holder_client import Channel
from tests.support.host import Host, a_host

BAR_MS = 50.0
PROGRAMS = {"idle": ("sleep", "100000"), "busy": ("bash", "-c", "while :; do :; done")}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench fence", description=__doc__)
    parser.add_argument("--sessions", type=int, default=50, help="how many lose their lease at once [50]")
    parser.add_argument("--rounds", type=int, default=3, help="how often [3]")
    parser.add_argument("--busy", type=int, default=2, help="how many of them burn a CPU [2]")
    parser.add_argument("--ttl", default="5s", help="[5s]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(argv)
    delays: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-fence-") as place, a_host(Path(place), ttl=options.ttl) as host:
        sessions = [_start(host, number < options.busy) for number in range(options.sessions)]
        for _ in range(options.rounds):
            delays += _round(host, sessions)
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "load": round(os.getloadavg()[0], 2)}
    figures = {
        "sessions": options.sessions,
        "rounds": options.rounds,
        "p50_ms": _part(delays, 0.5),
        "p99_ms": _part(delays, 0.99),
        "max_ms": max(delays),
        "bar_p99_ms": BAR_MS,
        "holds": _part(delays, 0.99) < BAR_MS,
        "machine": machine,
    }
    if options.json:
        print(json.dumps(figures))
        return 0
    print(f"self-fence delay (deadline to frozen), {options.sessions} sessions, {options.rounds} rounds")
    print(f"  p50 {figures['p50_ms']:8.2f} ms")
    print(f"  p99 {figures['p99_ms']:8.2f} ms   bar < {BAR_MS:g} ms   {'ok' if figures['holds'] else 'MISSED'}")
    print(f"  max {figures['max_ms']:8.2f} ms")
    print("  " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    return 0


def _start(host: Host, busy: bool) -> str:
    found = host.start(*PROGRAMS["busy" if busy else "idle"], options=("--net", "host"))
    return str(found["session"])


def _round(host: Host, sessions: list[str]) -> list[float]:
    """Return milliseconds from each holder's deadline until the kernel reports its whole cgroup as frozen."""
    host.cm("ls")  # an agent, and a fresh lease for all
    time.sleep(3)
    host.kill_agent()
    deadlines = {session: _deadline(host, session) for session in sessions}
    watch = select.poll()
    files: dict[int, str] = {}
    for session in sessions:
        fd = os.open(f"{host.group(session)}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        os.read(fd, 4096)  # from now on a change is reported
        files[fd] = session
        watch.register(fd, select.POLLPRI)
    delays = []
    try:
        while files:
            ready = watch.poll(60_000)
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            if not ready:
                raise RuntimeError(f"{len(files)} sessions were not frozen within a minute")
            for fd, _ in ready:
                if b"frozen 1" in os.pread(fd, 4096, 0):
                    watch.unregister(fd)
                    os.close(fd)
                    delays.append((now - deadlines[files.pop(fd)]) * 1000)
    finally:
        for fd in files:
            os.close(fd)
    return delays


def _deadline(host: Host, session: str) -> float:
    with Channel(host.run / f"{session}.sock") as channel:
        return float(channel.ask(op="status")["fresh_until"])


def _part(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3)
