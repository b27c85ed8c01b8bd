"""Compare netlink written by hand with pyroute2: loading, a session's network, and the diagnosis of unix sockets.

Everything runs in network namespaces of its own. Each round lays the network of one session as `session/network.py`
does: a veth pair into another namespace, addresses, both ends up, a default route. The diagnosis lists the unix sockets
of one namespace both ways and compares the answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from scripts.benchlib.common import median, table

LOADS = {
    "by hand": "import cmdop_migrate.session.rtnetlink, cmdop_migrate.session.unix_sockets",
    "pyroute2": "from pyroute2 import IPRoute; from pyroute2.netlink.diag import DiagSocket",
}
_GATEWAY, _ADDRESS, _PREFIX = "100.64.0.1", "100.64.0.2", 30
_SHOW = 0x1 | 0x4 | 0x8 | 0x10  # name, peer, backlog, queues


def main(argv: list[str]) -> int:
    """Run the benchmark in a network namespace of its own, and print its tables or JSON."""
    parser = argparse.ArgumentParser(prog="scripts/bench netlink", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.inside:
        return subprocess.run(
            ["unshare", "--net", sys.executable, "-m", "scripts.benchlib", "netlink", "--inside", *argv], check=False
        ).returncode
    result = {
        "load": {name: _load(words, options.rounds) for name, words in LOADS.items()},
        "network": {"by hand": _networks(_by_hand, options.rounds), "pyroute2": _networks(_pyroute2, options.rounds)},
        "unix sockets": _diagnosis(options.rounds),
    }
    print(json.dumps(result, indent=1) if options.json else _tables(result))
    return 0


def _load(words: str, rounds: int) -> dict[str, float]:
    """Return the median seconds, and CPU seconds, by which a new interpreter takes longer with these imports."""
    wall, cpu = [], []
    for _ in range(rounds):
        (bare, bare_cpu), (loaded, loaded_cpu) = _run("pass"), _run(words)
        wall.append(loaded - bare)
        cpu.append(loaded_cpu - bare_cpu)
    return {"wall_s": median(wall), "cpu_s": median(cpu)}


def _run(words: str) -> tuple[float, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", words], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Yield the pid of a process in a new network namespace."""
    process = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    try:
        own = os.stat("/proc/self/ns/net").st_ino
        while os.stat(f"/proc/{process.pid}/ns/net").st_ino == own:
            time.sleep(0.001)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _networks(lay: Callable[[str, int], None], rounds: int) -> dict[str, float]:
    """Return the median and the fastest seconds for the network of one session, without loading."""
    times = []
    for number in range(rounds):
        with _namespace() as pid:
            began = time.perf_counter()
            lay(f"bench{number}", pid)
            times.append(time.perf_counter() - began)
            route = subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", "route"], capture_output=True, text=True)
            assert f"default via {_GATEWAY} dev eth0" in route.stdout, route.stdout + route.stderr
    return {"median_s": median(times), "fastest_s": min(times)}


def _by_hand(name: str, pid: int) -> None:
    from cmdop_migrate.session.rtnetlink import LOOPBACK, Netlink

    with Netlink() as host:
        host.add_veth(name, "eth0", pid)
        index = host.index(name)
        host.add_address(index, _GATEWAY, _PREFIX)
        host.raise_link(index)
    with Netlink(pid) as inside:
        inside.raise_link(LOOPBACK)
        index = inside.index("eth0")
        inside.add_address(index, _ADDRESS, _PREFIX)
        inside.raise_link(index)
        inside.set_default_route(_GATEWAY)


def _pyroute2(name: str, pid: int) -> None:
    from pyroute2 import IPRoute, NetNS

    with IPRoute() as host:
        host.link("add", ifname=name, kind="veth", peer={"ifname": "eth0", "net_ns_pid": pid})
        (index,) = host.link_lookup(ifname=name)
        host.addr("add", index=index, address=_GATEWAY, prefixlen=_PREFIX)
        host.link("set", index=index, state="up")
    with NetNS(f"/proc/{pid}/ns/net") as inside:
        inside.link("set", index=1, state="up")
        (index,) = inside.link_lookup(ifname="eth0")
        inside.addr("add", index=index, address=_ADDRESS, prefixlen=_PREFIX)
        inside.link("set", index=index, state="up")
        inside.route("add", dst="default", gateway=_GATEWAY)


def _diagnosis(rounds: int) -> dict[str, Any]:
    """List the unix sockets of this namespace both ways; return the times, and the differences of the answers."""
    from cmdop_migrate.session import unix_sockets

    with _some_sockets():
        times: dict[str, list[float]] = {"by hand": [], "pyroute2": []}
        for _ in range(rounds):
            began = time.perf_counter()
            ours = unix_sockets.read(os.getpid())
            times["by hand"].append(time.perf_counter() - began)
            began = time.perf_counter()
            theirs = _pyroute2_sockets()
            times["pyroute2"].append(time.perf_counter() - began)
    names = {number: (found.name, theirs.get(number)) for number, found in ours.items()}
    differing = [f"{mine!r} / {other!r}" for mine, other in names.values() if mine != other]
    return {
        **{name: {"median_s": median(each), "fastest_s": min(each)} for name, each in times.items()},
        "differing_names": differing,
        "refused_request": _refused_request(),
    }


@contextlib.contextmanager
def _some_sockets() -> Iterator[None]:
    """Hold listeners with a path, with a path that is not UTF-8, and with an abstract name."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        for name in (f"{directory}/path", os.fsencode(directory) + b"/\xff", "\0abstract"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(name)
            listener.listen()
        yield


def _pyroute2_sockets() -> dict[int, Any]:
    from pyroute2.netlink.diag import DiagSocket

    with DiagSocket() as diag:
        diag.bind()
        answers = diag.get_sock_stats(family=socket.AF_UNIX, show=_SHOW)
    return {answer["udiag_ino"]: answer.get_attr("UNIX_DIAG_NAME") or "" for answer in answers}


def _refused_request() -> str:
    """Return how pyroute2 reports a request that the kernel refuses with ENOENT."""
    from pyroute2.netlink.diag import DiagSocket, inet_diag_req

    with DiagSocket() as diag:
        diag.bind()
        request = inet_diag_req()
        request["sdiag_family"], request["sdiag_protocol"], request["idiag_states"] = socket.AF_INET, 253, 0xFFF
        try:
            return f"no error, {len(list(diag.nlm_request(request, 20, 0x301)))} sockets"
        except OSError as error:
            return type(error).__name__


def _tables(result: dict[str, Any]) -> str:
    rows = []
    for name in ("by hand", "pyroute2"):
        load, network, diagnosis = result["load"][name], result["network"][name], result["unix sockets"][name]
        rows.append(
            [
                name,
                f"{load['wall_s'] * 1e3:.0f} ms, {load['cpu_s'] * 1e3:.0f} ms CPU",
                f"{network['median_s'] * 1e3:.1f} ms ({network['fastest_s'] * 1e3:.1f})",
                f"{diagnosis['median_s'] * 1e3:.1f} ms ({diagnosis['fastest_s'] * 1e3:.1f})",
            ]
        )
    head = ["", "loading", "a session's network (fastest)", "unix sockets (fastest)"]
    sockets = result["unix sockets"]
    notes = [
        f"names of unix sockets that differ: {', '.join(sockets['differing_names']) or 'none'}",
        f"pyroute2 on a request that the kernel refuses (ENOENT): {sockets['refused_request']}",
    ]
    return "\n".join([table("netlink", head, rows), "", *notes])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
