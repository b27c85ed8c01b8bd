"""What every benchmark needs: medians with their spread, tables, facts about the machine, the cost of a command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cmdop_migrate.holder import cgroup
from tests.support.servers import S3Server, seaweed

STORES = ("file", "s3")
_MIN_FREE = Path("/sys/module/page_reporting/parameters/min_free_ms")


@dataclass(frozen=True)
class Bar:
    """Hold a promise and its result. `value` must be at most `limit`. `best` compares the fastest round of each side,
    which other users of the machine disturbed least. `floor`: a lower bound for any implementation, on this machine and
    in this run."""

    name: str
    where: str
    value: float
    limit: float
    basis: str
    best: float | None = None
    floor: float | None = None

    @property
    def holds(self) -> bool:
        return self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


@dataclass(frozen=True)
class Cost:
    """One command: seconds on the clock, CPU seconds of it and its children, the largest of its own processes."""

    wall: float
    cpu: float
    peak_rss: int
    began: float
    answer: Any


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def show(values: Sequence[float], unit: str = "s") -> str:
    """Median, with the extremes where there are several."""
    if not values:
        return "-"
    scale, digits, word = {"s": (1.0, 2, ""), "MiB": (1 << 20, 1, ""), "x": (1.0, 2, "")}[unit]
    middle = f"{median(values) / scale:.{digits}f}{word}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values) / scale:.{digits}f}–{max(values) / scale:.{digits}f})"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown that is also readable as it stands."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    made = [f"| {' | '.join(line)} |" for line in padded]
    made.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([f"\n### {title}\n" if title else "", *made])


def bars_table(bars: Iterable[Bar]) -> str:
    rows = [
        [
            bar.name,
            bar.where,
            f"{bar.value:.3g}",
            "" if bar.best is None else f"{bar.best:.3g}",
            f"≤ {bar.limit:g}",
            "pass" if bar.holds else "MISS",
            "" if bar.floor is None else f"{bar.floor:.2g}",
            bar.basis,
        ]
        for bar in bars
    ]
    return table("Bars", ["bar", "where", "measured", "best / best", "limit", "", "floor", "basis"], rows)


@dataclass(frozen=True)
class Asked:
    """What was typed after `scripts/bench KIND`."""

    sizes: list[int]
    rounds: int
    stores: list[str]
    random: int
    warm: bool
    quick: bool
    json: str | None
    endpoint: str | None

    @contextmanager
    def s3(self, folder: Path) -> Iterator[S3Server]:
        """The server that was named, or one of our own."""
        if self.endpoint is None:
            with seaweed(folder) as server:
                yield server
        else:
            address, _, port = self.endpoint.removeprefix("http://").rpartition(":")
            key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
            yield S3Server(folder, (int(port),), address, access_key=key, secret_key=secret)

    def facts(self) -> dict[str, Any]:
        """For the report: about this machine, and this run."""
        return {
            **machine(),
            "load_before": load(),
            "rounds": self.rounds,
            "random": self.random,
            "warm": self.warm,
            "s3": self.endpoint or "SeaweedFS",
        }

    def report(self, report: dict[str, Any], tables: str) -> None:
        """To the file that was asked for, if any; and to stdout."""
        if self.json and self.json != "-":
            Path(self.json).write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report) if self.json == "-" else f"{report['machine']}\n{tables}")


def ask(
    arguments: list[str], kind: str, description: str | None, quick: str, sizes: Sequence[int], stores: Sequence[str]
) -> Asked:
    """`quick` says what --quick measures: `sizes` and `stores`, one round, where nothing else is asked for. Ends the
    program when it cannot run; from here on Ctrl-C is heard, which a shell has background jobs ignore."""
    parser = argparse.ArgumentParser(prog=f"scripts/bench {kind}", description=description)
    parser.add_argument("--sizes", type=_sizes, help="MiB of each session [64,512,2048]")
    parser.add_argument("--rounds", type=int, help="measured rounds [3]")
    parser.add_argument("--stores", type=_stores, help="[file,s3]")
    parser.add_argument(
        "--random", type=int, default=15, choices=range(76), metavar="PERCENT", help="of its memory [%(default)s]"
    )
    parser.add_argument(
        "--warm", action="store_true", help="meanwhile this kernel gives no free memory back to its hypervisor"
    )
    parser.add_argument(
        "--endpoint", type=_endpoint, metavar="URL",
        help="http://ADDRESS:PORT of an S3 server that runs already, with its keys in AWS_ACCESS_KEY_ID and so on",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=f"{quick}: does it run?")
    parser.add_argument("--json", metavar="FILE", help="all samples, bars and facts; - for stdout instead of tables")
    chosen = parser.parse_args(arguments)
    if os.geteuid() != 0:
        parser.error("sessions need root")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    usual: tuple[Sequence[int], Sequence[str], int] = (64, 512, 2048), STORES, 3
    sizes, stores, rounds = (sizes, stores, 1) if chosen.quick else usual
    sizes, stores, rounds = chosen.sizes or sizes, chosen.stores or stores, chosen.rounds or rounds
    if chosen.warm and not _MIN_FREE.exists():
        parser.error(f"--warm: this kernel has no {_MIN_FREE}")
    return Asked(
        list(sizes), rounds, list(stores), chosen.random, chosen.warm, chosen.quick, chosen.json, chosen.endpoint
    )


def _sizes(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of MiB, such as 64,512") from None


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"http://[^/:]+:\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no http://ADDRESS:PORT")
    if not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= os.environ.keys():
        raise argparse.ArgumentTypeError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY must be set")
    return text


def _stores(text: str) -> list[str]:
    if not set(text.split(",")) <= set(STORES):
        raise argparse.ArgumentTypeError(f"{text!r} names no stores (valid: {', '.join(STORES)})")
    return text.split(",")


@contextmanager
def warm(wanted: bool) -> Iterator[None]:
    """With `wanted`, what was freed stays ours for 300 s: what a hypervisor has taken back must be fetched from it page
    by page, and one and the same dump takes 1.5 or 6 s."""
    before = _MIN_FREE.read_text() if wanted else ""
    try:
        if wanted:
            _MIN_FREE.write_text("300000")
        yield
    finally:
        if wanted:
            _MIN_FREE.write_text(before)


def settle() -> None:
    """Wait until the machine is done with earlier work, but 10 s at most: a server works for seconds after its last
    answer, and the disk on what was written, which the next measurement would pay for."""
    os.sync()
    until = time.monotonic() + 10
    quiet = 0
    while quiet < 3 and time.monotonic() < until:
        before = psutil.cpu_times()
        time.sleep(0.2)
        after = psutil.cpu_times()
        idle = after.idle + after.iowait - before.idle - before.iowait
        quiet = quiet + 1 if idle > 0.85 * 0.2 * (os.cpu_count() or 1) else 0


def machine() -> dict[str, Any]:
    facts = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in facts.splitlines() if line.startswith("model name")), "?")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def load() -> float:
    """Processes wanting a CPU, averaged over the last minute; other users of the machine included."""
    return os.getloadavg()[0]


def call(argv: Sequence[str], env: Mapping[str, str], timeout: float = 300.0) -> Cost:
    """Run one command that answers in JSON, and see what it costs. What is done for it by a fork of another process is
    done in its cgroup: that is what is looked at."""
    with _group() as group:
        process = subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
            preexec_fn=lambda: cgroup.join(group),
        )  # fmt: skip
        began, clock = time.time(), time.monotonic()  # the program has just begun: to join a cgroup takes milliseconds
        peaks: dict[int, int] = {}
        ended = threading.Event()
        watcher = threading.Thread(target=_watch, args=(group, peaks, ended), name="watch")
        watcher.start()
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            assert process.stdout is not None and process.stderr is not None
            out, err = process.stdout.read(), process.stderr.read()
            process.wait()
            wall = time.monotonic() - clock
        finally:
            if process.returncode is None:  # interrupted: the command must not keep running
                process.kill()
                process.wait()
            timer.cancel()
            ended.set()
            watcher.join()
        cpu = cgroup.cpu_seconds(group)
    if process.returncode != 0:
        raise RuntimeError(f"{argv}: exit {process.returncode}\n{out.decode()[-800:]}\n{err.decode()[-2000:]}")
    return Cost(wall, cpu, max(peaks.values(), default=0), began, json.loads(out))


@contextmanager
def _group() -> Iterator[str]:
    """Make a cgroup for one command. Work that continues after it, such as a lazy restore, continues outside."""
    mount = cgroup.mount_point()
    assert mount is not None, "sessions need cgroup v2"
    group = f"{mount}/bench-{os.getpid()}-{time.monotonic_ns()}"
    cgroup.create(group)
    try:
        yield group
    finally:
        for pid in cgroup.pids(group):
            with suppress(OSError):  # it has ended meanwhile
                cgroup.join(mount, pid)
        cgroup.remove(group)


def _watch(group: str, peaks: dict[int, int], ended: threading.Event) -> None:
    """VmHWM only grows, so the last look before the end is what counts; what is missed is what grew after it."""
    seen: set[int] = set()
    while not ended.wait(0.03):
        seen.update(cgroup.pids(group))  # who brings memory leaves the group as soon as the session runs
        for pid in seen:
            if _is_ours(pid):
                peaks[pid] = max(peaks.get(pid, 0), _high_water(pid))


def _is_ours(pid: int) -> bool:
    """The command, and the workers it has or forked; not CRIU, not a holder, not the session."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False  # ended between two looks
    return b"cmdop_migrate" in command and b"holder" not in command


def _high_water(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except (FileNotFoundError, ProcessLookupError):
        pass  # ended between two looks
    return 0
