"""Check that a dump that fails or is killed half-way leaves the terminal state of a session unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from cmdop_migrate.holder import cgroup, stopped_jobs
from tests.crash.witness import Witness, dumping, finished, gone, stopped
from tests.support.host import Host, open_files, read_proc, until
from tests.support.program_session import Program

# Large enough that the dump can be stopped while it reads memory.
HOLDS_DEV_TTY = (
    "import os,time; tty=os.open('/dev/tty',2); m=os.urandom(100<<20); os.write(tty,b'holds\\n'); time.sleep(999)"
)


@pytest.fixture
def bash(host: Host) -> Iterator[Program]:
    """Start a shell with a job that its terminal has stopped, and one that has /dev/tty open."""
    with Program(host, "bash", "--norc") as program:
        program.type("PS1='> '; cat &\n")
        until(lambda: states(program).get("cat") == "T")
        program.type(f'{sys.executable} -c "{HOLDS_DEV_TTY}" &\n')
        program.see("holds\r\n")
        yield program


def states(program: Program) -> dict[str, str]:
    """Return the state, as in ps, of each process of the session by its name."""
    found = {}
    for pid in program.host.pids(program.session):
        if stat := read_proc(pid, "stat").decode():
            name, _, rest = stat.partition("(")[2].rpartition(")")
            found[name] = rest.split()[0]
    return found


def assert_as_before(bash: Program) -> None:
    group = bash.host.group(bash.session)
    until(lambda: not cgroup.is_to_freeze(group), 20, "the session is thawed")
    until(lambda: states(bash).get("cat") == "T")
    note = bash.host.state / "sessions" / bash.session / stopped_jobs.NAME
    assert not note.exists()
    links = {link for pid in bash.host.pids(bash.session) for link in open_files(pid)}
    assert "/dev/tty" in links
    bash.type("jobs -l\n")
    bash.see(r"\[1\].* Stopped \(tty input\) +cat")


def assert_moves(bash: Program) -> None:
    bash.park()
    bash.back()
    bash.type("jobs -l\n")
    bash.see(r"\[1\].* Stopped \(tty input\) +cat")
    bash.type("fg 1\n")
    bash.see(r"fg 1\r\n.*cat\r\n")
    bash.type("mewed\n\x04")
    bash.see(r"mewed\r\nmewed\r\n")


def test_command_killed_in_the_dump_leaves_jobs_stopped_as_they_were(bash: Program) -> None:
    one = Witness(bash.host, bash.name, bash.session)
    with dumping(one) as (cli, criu):
        assert (bash.host.state / "sessions" / bash.session / stopped_jobs.NAME).exists()
        gone(cli)
        criu.resume()
    assert_as_before(bash)
    assert_moves(bash)


def test_criu_killed_in_the_dump_leaves_jobs_stopped_as_they_were(bash: Program) -> None:
    one = Witness(bash.host, bash.name, bash.session)
    with dumping(one) as (cli, criu):
        criu.kill()
        status, answer = finished(cli)
    assert (status, answer["error"]["code"]) == (8, "criu_failed"), answer
    assert_as_before(bash)
    assert_moves(bash)


@pytest.mark.parametrize("step", ["capture", "upload", "prove:complete"])
def test_command_killed_after_the_dump_leaves_jobs_stopped_as_they_were(bash: Program, step: str) -> None:
    with stopped(bash.host, step, "checkpoint", bash.name) as (cli, _):
        gone(cli)
    assert_as_before(bash)
