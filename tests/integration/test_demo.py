"""scripts/demo as a person runs it: its promises hold or it reports a failure, and it cleans up however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cmdop_migrate.holder import cgroup
from tests.support.patience import bound

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="sessions need root")
STORY = Path(__file__).parents[2] / "scripts/py/demo.py"


@contextmanager
def demo(tmp: Path) -> Iterator[subprocess.Popen[str]]:
    """On a temporary directory of its own, so that it neither sees nor clears other demos of this machine."""
    env = {**os.environ, "TMPDIR": str(tmp), "PYTHONPATH": str(STORY.parents[2])}
    argv = [sys.executable, str(STORY)]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def groups_of(tmp: Path) -> list[Path]:
    """The cgroups of demos that ran or run in `tmp`."""
    mount = cgroup.mount_point()
    assert mount is not None
    found = [file.read_text(encoding="ascii").strip() for file in tmp.glob("cmdop-demo.*/state/host-id")]
    return [Path(cgroup.path_of(mount, one, "holders")).parent for one in found]


def await_that(true: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + bound(seconds)
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def running(tmp: Path) -> bool:
    return any(cgroup.pids(str(one)) for group in groups_of(tmp) for one in group.glob("*") if one.is_dir())


def test_it_holds_what_it_promises_and_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        await_that(lambda: running(tmp_path))
        groups = groups_of(tmp_path)
        said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said
    assert "none missing, none doubled" in said
    assert max(map(len, said.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []
    assert groups and not any(group.exists() for group in groups)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        await_that(lambda: running(tmp_path))
        groups = groups_of(tmp_path)
        process.send_signal(number)
        process.communicate(timeout=90)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
    assert groups and not any(group.exists() for group in groups)


def test_the_next_one_clears_up_after_one_that_was_killed(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        await_that(lambda: running(tmp_path))
        groups = groups_of(tmp_path)
        process.kill()
        process.wait()
    left = set(tmp_path.iterdir())
    assert left and running(tmp_path)
    with demo(tmp_path) as process:
        await_that(lambda: running(tmp_path) and not left & set(tmp_path.iterdir()))
    assert list(tmp_path.iterdir()) == []
    assert not any(group.exists() for group in groups)
