"""A move between two hosts, cold and sent ahead, beside the sum of raw `criu dump`, a copy, and `criu restore`.

The other host is driven over a real sshd on loopback; images go through the store. The copy beside it, of what CRIU
dumped into memory-backed files, goes the same way: up to the S3 server and down again, or, where the store is only a
directory, by `tar` through the same sshd. The other two copies (ssh, and a plain one in memory) are measured for
comparison. docs/internals/benchmarks.md tells how to read it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cmdop_migrate import config
from cmdop_migrate.host import resources
from scripts.benchlib import common, rivals
from scripts.benchlib.common import Bar, median, show
from scripts.benchlib.moves import NAME, Subject
from tests.support.host import CM
from tests.support.host_pair import World, two
from tests.support.servers import S3Server

MEMORY = Path("/dev/shm")
CHANGE_EVERY = 25  # lines, of 5 ms and more: then a session that is sent ahead rewrites its working set, 5 %
Samples = dict[str, list[float]]


def main(arguments: list[str]) -> int:
    asked = common.ask(arguments, "migrate", __doc__, "64 MiB, one round, a file store", (64,), ("file",))
    facts = asked.facts()
    results: dict[tuple[str, int], Samples] = {}
    with common.warm(asked.warm):
        for store in asked.stores:
            for size in asked.sizes:
                results[store, size] = _measure(asked, store, size)
    facts["load_after"] = common.load()
    found = bars(results)
    report = {
        "machine": facts,
        "samples": {f"{store}/{size}": dict(one) for (store, size), one in results.items()},
        "bars": [bar.to_json() for bar in found],
    }
    asked.report(report, f"{tables(results)}\n{common.bars_table(found)}")
    return 0


def bars(results: dict[tuple[str, int], Samples]) -> list[Bar]:
    found = []
    for (store, size), one in results.items():
        where = f"{store}, {size} MiB"
        ways = {"ssh": one["raw_ssh_sum"]} | ({"s3": one["raw_sum"]} if store == "s3" else {})
        for kind, limit in (("cold", 1.3), ("ahead", 0.5)):
            if kind == "ahead" and size != max(size for _, size in results):
                continue
            for way, raw in ways.items():
                value = median(one[f"{kind}_downtime"]) / median(raw)
                best = min(one[f"{kind}_downtime"]) / min(raw)
                found.append(Bar(f"{kind}: downtime", where, value, limit, f"raw dump + copy by {way} + restore", best))
    return found


def tables(results: dict[tuple[str, int], Samples]) -> str:
    head = (
        "store, MiB",
        "raw dump",
        "copy",
        "by ssh",
        "by s3",
        "raw restore",
        "sum",
        "sum by ssh",
        "cold",
        "frozen",
        "ahead",
        "frozen",
        "sent",
    )
    keys = ("raw_dump", "raw_copy", "raw_ssh", "raw_s3", "raw_restore", "raw_sum", "raw_ssh_sum")
    ours = ("cold_downtime", "cold_frozen", "ahead_downtime", "ahead_frozen")
    rows = [
        (
            f"{store}, {size}",
            *(show(one.get(key, [])) for key in (*keys, *ours)),
            show(one["ahead_new"], "MiB"),
        )
        for (store, size), one in results.items()
    ]
    title = "Downtime of a move, seconds; `sent` are the MiB that went while it was frozen, after two rounds ahead"
    return common.table(title, head, rows)


def _measure(asked: common.Asked, store: str, mib: int) -> Samples:
    found: Samples = defaultdict(list)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=MEMORY)))
        places: dict[str, str] = {}
        server = None
        if store == "s3":
            server = stack.enter_context(asked.s3(folder))
            places = {"CMDOP_MIGRATE_STORE": server.url(server.new_bucket())} | server.environ()
        world = stack.enter_context(two(folder, ttl="15s", environ=places))
        criu = resources.find_criu(config.load(environ=world.a.env()))
        payload = rivals.Payload(mib, asked.random)
        twin = rivals.Twin(criu, payload, memory)
        stack.callback(twin.close)
        rivals.warm(memory, 2 * mib)
        for number in range(asked.rounds):
            with _session(world, Subject(world.a, criu, memory, payload), 0) as subject:
                raw = _raw(world, subject, twin, memory, server)
                cold = _move(world)
            with _session(world, Subject(world.a, criu, memory, payload), CHANGE_EVERY):
                ahead = _move(world, "--pre-ship", "2")
            for kind, one in (("cold", cold), ("ahead", ahead)):
                raw |= {f"{kind}_downtime": one["downtime_s"], f"{kind}_frozen": one["frozen_s"]}
                raw |= {f"{kind}_took": one["took_s"], f"{kind}_new": one["bytes"]["new"]}
                raw |= {f"{kind}_phase_{name}": seconds for name, seconds in one["phases"].items()}
            for key, value in raw.items():
                found[key].append(value)
            words = ", ".join(f"{key} {raw[key]:.2f}" for key in ("raw_sum", "cold_downtime", "ahead_downtime"))
            print(f"{mib} MiB, {store}, round {number + 1}: {words}, load {common.load():.1f}", file=sys.stderr)
    return found


@contextmanager
def _session(world: World, subject: Subject, change_every: int) -> Iterator[Subject]:
    subject.session = world.a.start(CM[0], *subject.program(change_every), name=NAME)["session"]
    world.a.cm_json("wait", NAME, "--for", r"^t 100 ", "--timeout", "120s", timeout=130)
    yield subject
    world.b.ok("kill", subject.session, "--signal", "KILL")


def _raw(world: World, subject: Subject, twin: rivals.Twin, memory: Path, server: S3Server | None) -> dict[str, float]:
    images, copy = memory / "raw", memory / "copy"
    dump = rivals.dump(subject.criu, subject.target(), images)
    began = time.monotonic()
    shutil.copytree(images, copy)
    plain = time.monotonic() - began
    shutil.rmtree(copy)
    copy.mkdir()
    began = time.monotonic()
    there = f"ssh {world.ssh_options} -p {world.sshd.port} root@127.0.0.1 tar -C '{copy}' -xf -"
    subprocess.run(["bash", "-o", "pipefail", "-c", f"tar -C '{images}' -cf - . | {there}"], check=True)
    by_ssh = time.monotonic() - began
    by_s3 = _by_s3(images, memory / "images.tar", server) if server is not None else None
    for one in (images, copy):
        shutil.rmtree(one)
    restore = twin.restore()
    found = {"raw_dump": dump, "raw_copy": plain, "raw_ssh": by_ssh, "raw_restore": restore}
    found |= {"raw_s3": by_s3} if by_s3 is not None else {}
    copy_s = by_ssh if by_s3 is None else by_s3
    return found | {"raw_sum": dump + copy_s + restore, "raw_ssh_sum": dump + by_ssh + restore}


def _by_s3(images: Path, archive: Path, server: S3Server) -> float:
    """Up, and down again. Packing and unpacking is not counted: kind to whom we compare with."""
    subprocess.run(["tar", "-C", str(images), "-cf", str(archive), "."], check=True)
    bucket = server.new_bucket()
    began = time.monotonic()
    rivals.copier("up", server, bucket, "images")(archive)
    rivals.copier("down", server, bucket, "images")(archive)
    took = time.monotonic() - began
    archive.unlink()
    return took


def _move(world: World, *options: str) -> dict[str, Any]:
    return world.a.cm_json("migrate", NAME, "--to", "host-b", *options, timeout=300)
