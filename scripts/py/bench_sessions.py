"""What live sessions cost: starting one, keeping fifty, and typing through one."""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench_figure import Figure, percentile
from demo_place import Place, Trouble

from cmdop_migrate.holder import cgroup

QUIET = 0.002  # between keys, so that one echo is never waited for by the next
PATIENCE = 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=50, help="how many to start and keep [50]")
    parser.add_argument("--keys", type=int, default=1000, help="how many to type for the latency [1000]")


def measure(options: argparse.Namespace) -> list[Figure]:
    with Place() as place:
        for unwanted in ("PYTHONDONTWRITEBYTECODE", "PYTHONPROFILEIMPORTTIME"):
            place.environment.pop(unwanted, None)
        place.json("ls")  # compiles what is not compiled yet, as installing does
        place.json("kill", place.json("run", "-d", "--", "true")[0]["session"])
        starts = [_start(place, number) for number in range(options.sessions)]
        pss = [_pss(pid) / (1 << 20) for pid in _holders(place)]
        if len(pss) != options.sessions:
            raise Trouble(f"{len(pss)} holders for {options.sessions} sessions")
        bare, through = _echoes(place, options.keys)
    return [
        Figure("start (run -d), p50", percentile(starts, 0.5), "s", 0.5),
        Figure("start (run -d), p95", percentile(starts, 0.95), "s"),
        Figure(f"holder, PSS with {options.sessions} sessions, median", percentile(pss, 0.5), "MiB", 12),
        Figure(f"holder, PSS with {options.sessions} sessions, largest", max(pss), "MiB", 12),
        Figure("echo, bare terminal, p50", percentile(bare, 0.5), "ms"),
        Figure("echo, through attach, p50", percentile(through, 0.5), "ms"),
        Figure("echo, difference at p50", percentile(through, 0.5) - percentile(bare, 0.5), "ms", 5),
        Figure("echo, bare terminal, p99", percentile(bare, 0.99), "ms"),
        Figure("echo, through attach, p99", percentile(through, 0.99), "ms"),
        Figure("echo, difference at p99", percentile(through, 0.99) - percentile(bare, 0.99), "ms", 5),
    ]


def _start(place: Place, number: int) -> float:
    _, seconds = place.json("run", "-d", "--name", f"s{number}", "--", "sleep", "100000")
    return seconds


def _holders(place: Place) -> list[int]:
    mount = cgroup.mount_point()
    if mount is None:
        raise Trouble("cgroup v2 is not mounted")
    host_id = (place.top / "state" / "host-id").read_text(encoding="ascii").strip()
    return cgroup.pids(cgroup.path_of(mount, host_id, "holders"))


def _pss(pid: int) -> int:
    """Proportional set size: what is shared is counted in shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise Trouble(f"no Pss for {pid}")


def _echoes(place: Place, keys: int) -> tuple[list[float], list[float]]:
    """Milliseconds per key: on a bare terminal, and through attach. By turns, so that both meet the same noise."""
    place.json("run", "-d", "--name", "echo", "--", "cat")
    with (
        _terminal(["/bin/cat"], place.environment) as bare,
        _terminal(place.argv("attach", "echo"), place.environment) as through,
    ):
        for master in (bare, through):
            _until_it_echoes(master)
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(keys):
            for master, times in zip((bare, through), found, strict=True):
                key = b"\r" if number % 64 == 63 else bytes([97 + number % 26])
                times.append(_echo(master, key) * 1000)
    return found


@contextmanager
def _terminal(argv: list[str], environment: Mapping[str, str]) -> Iterator[int]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    pid = os.fork()
    if pid == 0:
        try:
            os.login_tty(slave)
            os.execve(argv[0], argv, dict(environment))
        finally:
            os._exit(127)
    os.close(slave)
    try:
        yield master
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(master)


def _until_it_echoes(master: int) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        os.write(master, b"\r")
        time.sleep(0.3)
        if _drain(master):
            time.sleep(0.3)
            _drain(master)
            return
    raise Trouble("nothing is echoed")


def _drain(master: int) -> bytes:
    data = b""
    while select.select([master], [], [], 0)[0]:
        data += os.read(master, 65536)
    return data


def _echo(master: int, key: bytes) -> float:
    """From the key to its echo. `cat` repeats each line: that is read away before the next key."""
    began = time.perf_counter()
    os.write(master, key)
    if not select.select([master], [], [], PATIENCE)[0]:
        raise Trouble("a key was not echoed")
    seconds = time.perf_counter() - began
    time.sleep(QUIET if key != b"\r" else 10 * QUIET)
    _drain(master)
    return seconds


if __name__ == "__main__":
    sys.exit("Run: scripts/bench sessions")
