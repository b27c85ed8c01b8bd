"""Give every test its fixtures: `host` is a host of the test's own (tests/support/host.py); choose and report the tests of a run."""

from __future__ import annotations

import os
import platform
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import sampling, suite_report
from tests.support.host import Host, a_host

CAP_SYS_RESOURCE = 24
# A slow example on a busy machine is not a finding.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# A suite started in the background ignores SIGINT, and so would every command it starts; tests send it to some.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which all of them would ignore under nohup


def end_as_by_ctrl_c(number: int, frame: FrameType | None, owner: int = os.getpid()) -> None:
    """Clear up as with Ctrl-C: sessions outlive the process that started them, those of tests too. A process that a test
    has forked inherits this handler, and just ends."""
    if os.getpid() == owner:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


signal.signal(signal.SIGTERM, end_as_by_ctrl_c)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run tests marked `heavy`")
    parser.addoption("--fast", action="store_true", help="leave out tests that start servers")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run's samples."""
    sampling.configure(bool(config.getoption("--all")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this run leaves out, and put the longest files first."""
    suite_report.select(config, items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of tests left out to the controller, if this is a worker of xdist."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(suite_report.LEFT_OUT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the counts of tests left out from a worker of xdist: all workers collect the same tests."""
    left_out = getattr(node, "workeroutput", {}).get("left_out")
    if left_out is not None:
        node.config.stash[suite_report.LEFT_OUT] = Counter(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the slowest tests and what was left out; the summary after it (-ra) lists what was skipped and why."""
    reports = [one for kind in terminalreporter.stats.values() for one in kind if isinstance(one, pytest.TestReport)]
    if len({report.nodeid for report in reports}) > 1:
        terminalreporter.section(f"slowest {suite_report.SLOWEST} tests")
        for line in suite_report.lines(reports, config.stash.get(suite_report.LEFT_OUT, Counter())):
            terminalreporter.write_line(line)


def pytest_report_header() -> list[str]:
    tools = [
        f"{tool} {'yes' if shutil.which(tool) else 'no'}" for tool in ("criu", "tini-static", "nft", "vim", "tmux")
    ]
    return [
        f"machine: kernel {platform.release()}, {os.cpu_count()} cores, root {'yes' if os.geteuid() == 0 else 'no'}, "
        f"CAP_SYS_RESOURCE {'yes' if has_capability(CAP_SYS_RESOURCE) else 'no'}, "
        f"userfaultfd {'yes' if has_userfaultfd() else 'no'}, cgroup v2 {'yes' if has_cgroup2() else 'no'}",
        "tools: " + ", ".join(tools),
        f"samples of long matrices: {sampling.SEED}={os.environ[sampling.SEED]} (./scripts/test --all: every case)",
        "virtual machines: "
        + ("up" if "CMDOP_VM_RUN" in os.environ else "not up, tests/vm is left out (scripts/test-vm)"),
    ]


def has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def has_userfaultfd() -> bool:
    return os.path.exists("/proc/sys/vm/unprivileged_userfaultfd") or os.path.exists("/dev/userfaultfd")


def has_cgroup2() -> bool:
    return any(line.split()[2] == "cgroup2" for line in Path("/proc/self/mounts").read_text().splitlines())


def _must_be_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("sessions need root")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Give the test a host that ends with it; the test fails if anything of the host stays."""
    _must_be_root()
    with a_host(tmp_path) as one:
        yield one


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Callable[[str], Host]]:
    """Return a function that makes more hosts on this machine, each with its own directories."""
    _must_be_root()
    made: list[Host] = []

    def make(name: str) -> Host:
        (tmp_path / name).mkdir()
        made.append(Host(tmp_path / name, name=name))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()
