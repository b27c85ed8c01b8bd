"""One hook at a time: which hooks are refused, what bounds a run, what is reported of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cmdop_migrate.errors import Usage
from cmdop_migrate.host import hooks
from cmdop_migrate.model import Spec
from cmdop_migrate.util import trusted_file
from tests.support.patience import bound

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="hooks belong to root")


@pytest.fixture
def hook(tmp_path: Path) -> Callable[[str], str]:
    tmp_path.chmod(0o755)

    def make(text: str) -> str:
        path = tmp_path / "hook"
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return make


def run(path: str, timeout: float = 10.0, **facts: object) -> hooks.HookOutcome:
    return hooks.execute("token", path, facts, timeout, {"EXTRA": "1"})


def test_hook_writable_by_others_is_refused(hook: Callable[[str], str]) -> None:
    path = Path(hook("exit 0"))
    assert trusted_file.refusal(str(path)) == ""
    for mode in (0o644, 0o655):
        path.chmod(mode)
        assert trusted_file.refusal(str(path)) == "not executable"
    for mode in (0o757, 0o775):
        path.chmod(mode)
        assert trusted_file.refusal(str(path)) == "users other than root may write it"
    path.chmod(0o755)
    os.chown(path, 65534, 0)
    assert trusted_file.refusal(str(path)) == "users other than root may write it"
    os.chown(path, 0, 0)
    link = path.with_name("link")
    link.symlink_to(path)
    assert trusted_file.refusal(str(link)) == ""
    path.parent.chmod(0o777)
    assert trusted_file.refusal(str(link)) == f"users other than root may write in {path.parent}"
    path.parent.chmod(0o1777)
    assert trusted_file.refusal(str(path)) == ""
    below = path.parent / "open" / "below" / "hook"
    below.parent.mkdir(parents=True)
    below.write_text("#!/bin/sh")
    below.chmod(0o755)
    below.parent.parent.chmod(0o777)
    assert trusted_file.refusal(str(below)) == f"users other than root may write in {below.parent.parent}"
    assert trusted_file.refusal(str(path.parent)) == "not a file"
    assert trusted_file.refusal("hook") == "not an absolute path"
    path.unlink()
    assert trusted_file.refusal(str(link)) == "No such file or directory"
    assert run(str(link)).problem == "not run: No such file or directory"


def test_hook_gets_facts_and_environment_and_its_output_is_kept(hook: Callable[[str], str]) -> None:
    done = run(
        hook('cat; echo "$EXTRA $CMDOP_MIGRATE_HOOK $PWD"; env | wc -l; ls /proc/self/fd'), session="x", big="y" * 1000
    )
    assert done.ok and done.exit == 0 and done.to_json()["ok"]
    first, second, count, *fds = done.output.splitlines()
    assert json.loads(first) == {"event": "token", "session": "x", "big": "y" * 1000}
    assert (second, count, fds) == ("1 token /", "6", ["0", "1", "2", "3"])


def test_hook_that_does_not_read_its_input(hook: Callable[[str], str]) -> None:
    assert run(hook("exit 0"), big="y" * (1 << 20)).ok


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo first; echo; echo last >&2; exit 7", "exited 7: last"),
        ("kill -9 $$", "killed by SIGKILL"),
        ("kill -40 $$", "killed by signal 40"),
        ("printf '\\033[2J\\nboo\\007\\n'; exit 1", "exited 1: boo"),
        ("#!/no/such/interpreter", "not run: No such file or directory"),
    ],
)
def test_failed_hook_reports_status_and_last_line(hook: Callable[[str], str], text: str, problem: str) -> None:
    done = run(hook(text))
    assert not done.ok and done.problem == problem


def test_hook_is_killed_at_its_timeout_and_its_output_is_bounded(hook: Callable[[str], str]) -> None:
    began = time.monotonic()
    done = run(hook("yes"), timeout=0.3)
    assert done.problem.startswith("not done after 0.3 s, and killed") and len(done.output) == hooks.OUTPUT_KEPT
    assert done.seconds >= 0.3 and time.monotonic() - began < bound(5)


def test_hook_that_leaves_a_process_behind_is_done(hook: Callable[[str], str]) -> None:
    began = time.monotonic()
    done = run(hook("sleep 1000 & echo $!"))
    assert done.ok and time.monotonic() - began < bound(5)
    os.kill(int(done.output), 9)


def test_hook_that_closes_its_output_is_waited_for(hook: Callable[[str], str]) -> None:
    done = run(hook("exec >&- 2>&-; sleep 0.3; exit 4"))
    assert done.problem == "exited 4" and done.seconds >= 0.3


def test_hooks_of_a_session() -> None:
    found = (("pre-freeze", "/etc/flush"), ("post-restore", "/no/such"))
    spec = Spec(("x",), "/", "root", (), hooks=found)
    assert hooks.of_session(spec, "pre-freeze") == [found[0][1]] and hooks.of_session(spec, "token") == []


@pytest.mark.parametrize("text", ["pre-freeze", "before=/bin/true", "pre-freeze=", "pre-freeze=true", "token=/no/such"])
def test_invalid_hooks_are_refused_by_run(text: str) -> None:
    with pytest.raises(Usage) as caught:
        hooks.parse(text)
    assert caught.value.hint
