"""Renewals a second, for many sessions of one host, on each lease backend.

Real servers on loopback, started here: SeaweedFS, one etcd and three. The figure is
of `LeaseStore.renew_many` over all sessions, as an agent calls it; beside it, of one `renew` after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("memory", "sqlite", "s3", "etcd-one", "etcd-three")


@contextlib.contextmanager
def _store(kind: str, tmp: Path) -> Iterator[object]:
    from cmdop_migrate.lease.memory import MemoryRegister
    from cmdop_migrate.lease.registry import open_lease
    from cmdop_migrate.lease.store import LeaseStore
    from tests.support.etcd_server import etcd
    from tests.support.servers import seaweed

    if kind == "memory":
        yield LeaseStore(MemoryRegister())
    elif kind == "sqlite":
        yield open_lease(f"sqlite://{tmp}/lease.db")
    elif kind == "s3":
        with seaweed(tmp) as server:
            os.environ.update(server.environ())
            store = open_lease(server.url(server.new_bucket(), "bench"))
            store.check()
            yield store
    else:
        with etcd(tmp / kind, members=3 if kind == "etcd-three" else 1) as cluster:
            yield open_lease(cluster.url("bench"))


def measure(kind: str, sessions: int, rounds: int, tmp: Path) -> dict[str, object]:
    """All sessions are renewed `rounds` times; the fastest round counts, the machine being shared."""
    from cmdop_migrate.lease.store import Held, LeaseStore

    with _store(kind, tmp) as store:
        assert isinstance(store, LeaseStore)
        leases = [store.acquire(f"bench-{number:05}", "bench", "bench", 600.0) for number in range(sessions)]
        times: list[float] = []
        for _ in range(rounds):
            begun = time.perf_counter()
            answers = store.renew_many([lease for lease in leases if isinstance(lease, Held)])
            times.append(time.perf_counter() - begun)
            assert len(answers) == sessions and all(isinstance(answer, Held) for answer in answers), "a renewal failed"
            leases = [answer for answer in answers if isinstance(answer, Held)]
        one_by_one = leases[: min(100, sessions)]
        begun = time.perf_counter()
        assert all(isinstance(store.renew(lease), Held) for lease in one_by_one if isinstance(lease, Held))
        single = time.perf_counter() - begun
    return {
        "backend": kind,
        "sessions": sessions,
        "renewals_per_s": round(sessions / min(times), 1),
        "round_s": round(min(times), 4),
        "one_by_one_per_s": round(len(one_by_one) / single, 1),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench lease", description="Renewals a second, on each lease backend.")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", action="append", choices=KINDS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    results = []
    for kind in args.backend or KINDS:
        with tempfile.TemporaryDirectory(prefix="bench-lease-") as made:
            results.append(measure(kind, args.sessions, args.rounds, Path(made)))
        if not args.json:
            one = results[-1]
            print(
                f"{one['backend']:<11} {one['sessions']} sessions: {one['renewals_per_s']:>9} renewals/s together, "
                f"{one['one_by_one_per_s']:>8} one by one"
            )
    if args.json:
        print(json.dumps({"lease": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
