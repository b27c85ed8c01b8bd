"""Run commands in forks of the fork server: same results as without it, done at most once, never longer than the client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.crash.witness import Witness
from tests.support import fork_server
from tests.support.fork_server import OFF
from tests.support.host import CM, PROJECT, Host, a_host, open_files, until
from tests.support.patience import bound
from tests.support.servers import seaweed

ECHO = "stty -echo; while read line; do echo got-$line; done"
HELD = "echo $$ > {0}/held.new; mv {0}/held.new {0}/held; exec sleep 60"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """For tests that leave it as it was."""
    with a_host(tmp_path_factory.mktemp("ready"), ready=True) as host:
        host.start("bash", "-c", ECHO, name="w")
        fork_server.wait(host)
        yield host


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Host]:
    with a_host(tmp_path, ready=True) as host:
        yield host


@contextlib.contextmanager
def held(host: Host, *args: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command while its pre-freeze hook runs; the hook is ended afterwards."""
    path, note = fork_server.hook(host, HELD.format(host.dir)), host.dir / "held"
    note.unlink(missing_ok=True)
    with fork_server.begun(host, *args, env=env) as command:
        try:
            until(note.exists, 20, "the hook runs")
            yield command
        finally:
            path.unlink()
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(int(note.read_text()), signal.SIGKILL)


def alike(text: bytes) -> bytes:
    """Without what is another number at each look."""
    return re.sub(rb"[0-9a-f]{32}|[0-9]+(\.[0-9]+)?( [KM]iB)?", b"#", b" ".join(text.split()))


@pytest.mark.parametrize(
    "words",
    [
        "ls",
        "--json ls",
        "ls --json",
        "-v ls",
        "show w",
        "output w",
        "plan w",
        "checkpoints ls",
        "send w hello --enter",
        "checkpoint w --leave-running",
        "show nobody",
        "--json show nobody",
        "checkpoint",
        "ls --nonsense",
        "--json restore nobody",
        "--store nonsense checkpoints ls",
    ],
)
def test_command_run_by_a_fork_has_the_same_output(shared: Host, words: str) -> None:
    without = fork_server.run(shared, *words.split(), env=OFF)
    fork_server.wait(shared)
    done = fork_server.run(shared, *words.split())
    assert (done.status, alike(done.out), alike(done.err)) == (without.status, alike(without.out), alike(without.err))
    assert done.faults < without.faults / 2, (done.faults, without.faults)
    until(lambda: not fork_server.forks(shared), 2, "nothing is left of it")


def test_commands_not_sent_to_the_fork_server_work_as_before(shared: Host) -> None:
    for words in (["--help"], ["ls", "--help"], ["version"], ["lease", "show", "w"], ["--version"], []):
        without, done = fork_server.run(shared, *words, env=OFF), fork_server.run(shared, *words)
        assert (done.status, done.out, done.err) == (without.status, without.out, without.err)
        assert done.faults > without.faults / 2


def test_fork_server_has_one_thread_and_no_foreign_descriptors(shared: Host) -> None:
    one = fork_server.wait(shared)
    assert one.num_threads() == 1 and one.nice() == psutil.Process(shared.agent_pid() or 0).nice()
    until(lambda: not one.children(), 5, "forks end")
    kept = sorted(re.sub(r"\d+", "#", path) for path in open_files(one.pid))
    log = re.sub(r"\d+", "#", str(shared.state / "log/ready.log"))
    assert kept == sorted([log, log, "pipe:[#]", "socket:[#]", re.sub(r"\d+", "#", str(shared.run))])
    seen = (shared.run / "ready.sock").stat()
    assert seen.st_mode & 0o777 == 0o600 and seen.st_uid == 0
    assert (shared.state / "log/ready.log").read_bytes() == b""


def test_fork_inherits_no_descriptors_of_the_server(shared: Host) -> None:
    one = fork_server.wait(shared)
    before = {path for path in open_files(one.pid) if path != "/dev/null"}
    with fork_server.begun(shared, "output", "w", "--follow") as first:
        fork = fork_server.fork_of(shared)
        until(lambda: any("log/cmdop-migrate.log" in path for path in open_files(fork.pid)), 10, "it has begun")
        with fork_server.begun(shared, "output", "w", "--follow"):
            second = until(lambda: next((c for c in one.children() if c.pid != fork.pid), None), 10)
            until(lambda: any("log/cmdop-migrate.log" in path for path in open_files(second.pid)), 10, "it has begun")
            for pid in (
                fork.pid,
                second.pid,
            ):  # it looks into the parent's run directory for a moment, by a path of its own
                until(lambda pid=pid: not before & set(open_files(pid)), 5, "it keeps nothing open of its parent's")
            shared_by_both = set(open_files(fork.pid)) & set(open_files(second.pid))
            assert all("/" in path for path in shared_by_both), shared_by_both  # no socket and no pipe
            same = [(f"/proc/{first.pid}/{name}", f"/proc/{fork.pid}/{name}") for name in ("cgroup", "environ")]
            assert Path(same[0][0]).read_text() == Path(same[0][1]).read_text()
            assert os.getsid(fork.pid) == fork.pid


def test_fork_takes_over_process_attributes_of_its_client(shared: Host, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    tell = "nice; umask; ulimit -a; taskset -p $$; cat /proc/self/cgroup /proc/self/oom_score_adj /proc/$PPID/limits"
    shell = 'umask 027; ulimit -n 900; ulimit -c 0; cd /usr; trap "" USR1; exec "$@"'
    prefix = ("nice", "-n", "7", "taskset", "1", "sh", "-c", shell, "sh")
    # While it starts a program, its C library has all signals blocked: a busy machine shows that.
    command = f"sleep 0.2; grep -E '^(Sig(Ign|Blk)|Umask)' /proc/$PPID/status; readlink /proc/$PPID/cwd; {tell}"
    path = fork_server.hook(shared, f"{{ {command}; }} > {seen} 2>&1")
    told = []
    try:
        for env in (OFF, {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"}):
            done = fork_server.run(shared, "checkpoint", "w", "--leave-running", env=env, prefix=prefix)
            assert done.status == 0, done
            told.append((re.sub(r"pid \d+'s", "its", seen.read_text()).splitlines(), done.faults))
    finally:
        path.unlink()
    (without, faults), (handed, fewer) = told
    assert handed == without and str(os.nice(0) + 7) in without and "/usr" in without
    assert fewer < faults / 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_of_the_client_are_closed_in_the_fork(shared: Host, closed: str) -> None:
    fork_server.wait(shared)
    words = [*CM, "ls"]
    found = []
    for env in (OFF, {}):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *words], env=shared.env(**env), capture_output=True, timeout=30
        )
        found.append((done.returncode, alike(done.stdout), alike(done.stderr)))
    assert found[0] == found[1]


def test_fork_ends_when_the_reader_of_its_output_is_gone(shared: Host) -> None:
    fork_server.wait(shared)
    shared.ok("send", "w", "early", "--enter")
    script = f"{' '.join(CM)} output w --follow | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    ends = []
    for env in (OFF, {}):
        with subprocess.Popen(
            ["bash", "-c", script], env=shared.env(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as reader:
            time.sleep(1.0)
            assert bool(fork_server.forks(shared)) is (env != OFF)
            shared.ok("send", "w", "more", "--enter")
            ends.append(reader.communicate(timeout=20))
    assert ends == [(b"0\n", b"")] * 2, "nothing is wrong with that"
    until(lambda: not fork_server.forks(shared), 5, "the fork ends")


@pytest.mark.parametrize("how", ["--config <(cat {0}) show nobody", "--config /dev/stdin show nobody < <(cat {0})"])
def test_config_from_a_pipe_is_used(shared: Host, tmp_path: Path, how: str) -> None:
    """Whether there is a ready process or not: they must not be read, and gone, before they are needed."""
    fork_server.wait(shared)
    file = tmp_path / "config.toml"
    env = {key: value for key, value in shared.env().items() if not key.endswith(("_CONFIG", "_RUN_DIR", "_HOST"))}
    for run_dir in (shared.run, tmp_path / "nobody"):
        file.write_text(f'run_dir = "{run_dir}"\nhost = "piped"\n')
        words = f"{' '.join(CM)} {how.format(file)}"
        done = subprocess.run(["bash", "-c", words], env=env, capture_output=True, timeout=30)
        assert (done.returncode, b"on piped" in done.stderr) == (3, True), done.stderr


def test_long_arguments_and_environment_reach_the_fork_unchanged(shared: Host) -> None:
    fork_server.wait(shared)
    long = {f"LONG_{number}": "x" * 50_000 for number in range(6)}  # more than a socket takes at once
    odd = "caf\udce9-\u263a"  # a byte that is no UTF-8, and characters that are
    found = []
    for env in (OFF, {}):
        done = fork_server.run(shared, "send", "w", odd, "--enter", "--actor", f"a{len(found)}", env={**long, **env})
        assert (done.status, done.out, done.err) == (0, b"", b"")
        found.append(done.faults)
    assert found[1] < found[0] / 2
    until(lambda: shared.cm("output", "w").stdout.count(b"got-" + odd.encode("utf-8", "surrogateescape")) == 2)


def test_fork_server_serves_many_clients_at_the_same_time(shared: Host) -> None:
    fork_server.wait(shared)
    begun = [
        subprocess.Popen([*CM, "send", "w", f"many-{number}-", "--enter"], env=shared.env(), cwd="/")
        for number in range(12)
    ]
    assert [one.wait(60) for one in begun] == [0] * 12
    until(lambda: all(shared.output("w").count(f"got-many-{number}-") == 1 for number in range(12)), 5, "each once")


def test_fork_does_nothing_before_go(shared: Host) -> None:
    before = shared.events()
    with fork_server.asking(shared, "send", "w", "never", "--enter") as (_, answer):
        assert answer == "ready"
        fork = fork_server.fork_of(shared)
        time.sleep(1.0)
        assert fork.is_running()
    until(lambda: not fork_server.lives(fork), 2, "it ends with its client")
    time.sleep(0.3)
    assert "never" not in shared.output("w") and shared.events() == before


def test_silent_client_is_dropped_and_delays_no_other(shared: Host) -> None:
    one = fork_server.wait(shared)
    silent = []
    try:
        for said in (b"", b"12", b"99\nhalf", b"nonsense\n", b"x" * 5000):
            silent.append(socket.socket(socket.AF_UNIX))
            silent[-1].connect(str(shared.run / "ready.sock"))
            silent[-1].sendall(said)
        began = time.monotonic()
        assert fork_server.ask(shared, "ls") == "ready" and time.monotonic() - began < bound(1.0)
        for each in silent:
            each.settimeout(3.0)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(100) == b""
        assert time.monotonic() - began < bound(3.0)
    finally:
        for each in silent:
            each.close()
    assert fork_server.wait(shared).pid == one.pid


@pytest.mark.parametrize(
    ("prefix", "env"),
    [
        (("unshare", "-n"), {}),
        (("unshare", "-m"), {}),
        (("unshare", "-u"), {}),
        (("unshare", "-i"), {}),
        (("unshare", "-C"), {}),
        (("unshare", "-p", "-f"), {}),
        (("setpriv", "--no-new-privs"), {}),
        (("setpriv", "--bounding-set", "-sys_time"), {}),
        (("setpriv", "--groups", "1,2"), {}),
        (("chroot", "/proc/self/root"), None),
        ((), {"PYTHONOPTIMIZE": "1"}),
        ((), {"PYTHONUTF8": "0", "LC_ALL": "POSIX"}),
        ((), {"LD_BIND_NOW": "1"}),
    ],
)
def test_client_in_other_namespaces_does_its_work_itself(
    shared: Host, prefix: tuple[str, ...], env: dict[str, str] | None
) -> None:
    fork_server.wait(shared)
    assert fork_server.ask(shared, "ls", prefix=prefix, **(env or {})) == ("no" if env is not None else "ready")
    if env is not None:
        done = fork_server.run(shared, "ls", env=env, prefix=prefix)
        assert done.status == 0 and b"got" not in done.err


def test_fork_server_is_not_used_when_disabled_or_with_fault_points(shared: Host) -> None:
    full = fork_server.run(shared, "ls", env=OFF).faults
    assert fork_server.run(shared, "ls").faults < full / 2
    assert fork_server.run(shared, "ls", env={"CMDOP_MIGRATE_TEST_STOP": "none:none"}).faults > full / 2


def test_killed_client_takes_its_fork_along_and_the_session_resumes(own: Host) -> None:
    one = Witness.start(own)
    fork_server.wait(own)
    with held(own, "checkpoint", one.name) as command:
        fork = fork_server.fork_of(own)
        command.kill()
        began = time.monotonic()
        until(lambda: not fork_server.lives(fork), 2, "the fork is gone")
        assert time.monotonic() - began < bound(0.5)
        assert command.wait(5) == -signal.SIGKILL
    one.assert_runs()
    assert [event["event"] for event in own.events(one.session) if "checkpoint" in event["event"]] == []
    for step in range(8):  # at any other moment
        with fork_server.begun(own, "checkpoint", one.name, "--leave-running") as command:
            time.sleep(0.03 + step * 0.05)
            command.kill()
        until(lambda: not fork_server.forks(own), 5, "no fork is left")
        until(lambda: one.state == "running", 5, "what CRIU had begun is put back")
        one.assert_runs()
    own.ok("checkpoint", one.name)
    one.assert_parked()
    for step in range(4):
        with fork_server.begun(own, "restore", one.name) as command:
            time.sleep(0.04 + step * 0.06)
            command.kill()
        until(lambda: not fork_server.forks(own), 5, "no fork is left")
        until(lambda: one.state in ("running", "parked"), 30, "it ends as one of the two")
        if one.state == "running":
            one.assert_runs()
            own.ok("checkpoint", one.name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_client_act_on_the_fork(own: Host, number: signal.Signals) -> None:
    one = Witness.start(own)
    fork_server.wait(own)
    ends = []
    for env in (OFF, {}):
        with held(own, "checkpoint", one.name, env=env) as command:
            assert bool(fork_server.forks(own)) is (env != OFF)
            command.send_signal(number)
            ends.append((command.wait(20), command.communicate()))
        until(lambda: not fork_server.forks(own), 5, "the fork is gone")
        one.assert_runs()
    assert ends[0] == ends[1]


def test_fork_is_stopped_continued_and_killed_with_its_client(own: Host) -> None:
    own.start("bash", "-c", ECHO, name="w")
    fork_server.wait(own)
    with fork_server.begun(own, "output", "w", "--follow") as command:
        fork = fork_server.fork_of(own)
        client = psutil.Process(command.pid)
        own.ok("send", "w", "one", "--enter")
        assert command.stdout is not None and b"got-one" in command.stdout.readline()
        command.send_signal(signal.SIGTSTP)
        until(lambda: {client.status(), fork.status()} == {psutil.STATUS_STOPPED}, 5, "both stand still")
        own.ok("send", "w", "two", "--enter")
        command.send_signal(signal.SIGCONT)
        assert b"got-two" in command.stdout.readline()
        fork.kill()
        assert command.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("words", [["output", "w", "--follow"], ["--json", "output", "w", "--follow"]])
def test_fork_with_unknown_exit_status_is_reported_as_lost(own: Host, words: list[str]) -> None:
    """And its work is not done again."""
    own.start("bash", "-c", ECHO, name="w")
    one = fork_server.wait(own)
    own.ok("send", "w", "one", "--enter")
    with fork_server.begun(own, *words) as command:
        fork = fork_server.fork_of(own)
        assert command.stdout is not None and b"got-one" in command.stdout.readline()
        one.suspend()
        try:
            fork.kill()
            out, err = command.communicate(timeout=10)
        finally:
            one.resume()
    assert command.returncode == 1
    if "--json" in words:
        assert json.loads(out)["error"]["code"] == "unexpected" and not err
    else:
        assert not out and err.startswith(b"cmdop-migrate: the process that did the work was killed\n  See")


def test_ignored_signals_stay_ignored(own: Host) -> None:
    """As after nohup."""
    own.start("bash", "-c", ECHO, name="w")
    fork_server.wait(own)
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *CM, "output", "w", "--follow"]
    with subprocess.Popen(shell, env=own.env(), stdout=subprocess.PIPE, cwd="/") as command:
        fork = fork_server.fork_of(own)
        own.ok("send", "w", "one", "--enter")
        assert command.stdout is not None and b"got-one" in command.stdout.readline()
        for pid in (command.pid, fork.pid):
            os.kill(pid, signal.SIGHUP)
        own.ok("send", "w", "two", "--enter")
        assert b"got-two" in command.stdout.readline()
        command.terminate()
        assert command.wait(5) == -signal.SIGTERM


def test_hanging_fork_server_costs_a_moment_and_work_is_done_once(own: Host) -> None:
    own.start("bash", "-c", ECHO, name="w")
    one = fork_server.wait(own)
    one.suspend()
    try:
        for word in ("first", "second", "third"):
            began = time.monotonic()
            without = fork_server.run(own, "ls", env=OFF)
            usual, began = time.monotonic() - began, time.monotonic()
            assert without.status == 0
            own.ok("send", "w", word, "--enter")
            assert time.monotonic() - began < bound(2 * usual + 0.6)
    finally:
        one.resume()
    fork_server.wait(own)
    until(lambda: not fork_server.forks(own), 5, "forks that nobody waits for end")
    time.sleep(0.5)
    text = own.output("w")
    assert [text.count(f"got-{word}") for word in ("first", "second", "third")] == [1, 1, 1], text


def test_fork_server_that_dies_is_restarted(own: Host) -> None:
    own.start("bash", "-c", ECHO, name="w")
    first = fork_server.wait(own)
    with fork_server.begun(own, "output", "w", "--follow") as command:
        fork_server.fork_of(own)
        first.kill()
        own.ok("send", "w", "one", "--enter")  # done by the client: the socket is there, but no server behind it
        assert command.stdout is not None and b"got-one" in command.stdout.readline()  # its fork keeps running
        assert fork_server.wait(own).pid != first.pid
        command.send_signal(signal.SIGINT)
        assert command.wait(10) == 130  # … and says how it ended
    assert own.output("w").count("got-one") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_fork_server_ends_with_its_agent_and_forks_finish(own: Host, number: signal.Signals) -> None:
    own.start("bash", "-c", ECHO, name="w")
    first = fork_server.wait(own)
    own.ok("send", "w", "zero", "--enter")
    with fork_server.begun(own, "output", "w", "--follow") as command:
        assert command.stdout is not None and b"got-zero" in command.stdout.readline()  # it looks for no agent any more
        if number == signal.SIGKILL:
            first.suspend()  # even so
        own.kill_agent(number)
        until(lambda: not fork_server.lives(first), 2, "it is gone")
        assert not (own.run / "ready.sock").exists()
        own.ok("send", "w", "one", "--enter")
        assert b"got-one" in command.stdout.readline()
    fork_server.wait(own)  # that send started another agent, with another


def test_fork_server_does_not_keep_an_idle_agent_alive(own: Host) -> None:
    own.ttl = "3s"
    own.start("sleep", "1000", name="w")
    first = fork_server.wait(own)
    own.ok("kill", "w")
    until(lambda: own.agent_pid() is None, 15, "the agent leaves")
    until(lambda: not fork_server.lives(first), 2, "and so does this")
    assert not (own.run / "ready.sock").exists()


def test_changed_code_ends_the_fork_server(tmp_path: Path) -> None:
    code = tmp_path / "code"
    shutil.copytree(PROJECT / "cmdop_migrate", code / "cmdop_migrate", ignore=shutil.ignore_patterns("__pycache__"))
    with a_host(tmp_path, ready=True, extra={"PYTHONPATH": str(code)}) as host:
        host.start("sleep", "1000", name="w")
        first = fork_server.wait(host)
        assert fork_server.ask(host, "ls", PYTHONPATH=str(PROJECT)) == "no"  # another copy of the same code
        assert fork_server.ask(host, "ls") == "ready"
        changed = code / "cmdop_migrate" / "units.py"
        changed.write_text(changed.read_text() + "\n")
        assert fork_server.ask(host, "ls") == "no"
        until(lambda: not fork_server.lives(first), 2, "it ends")
        assert host.ok("ls")
        assert fork_server.wait(host).pid != first.pid


def test_no_fork_server_when_disabled_in_the_settings(tmp_path: Path) -> None:
    with a_host(tmp_path) as host:
        host.start("sleep", "1000", name="w")
        time.sleep(2)
        assert fork_server.process(host) is None and not (host.run / "ready.sock").exists()


def test_fork_server_loads_boto3_after_the_first_s3_command(own: Host, tmp_path: Path) -> None:
    with seaweed(tmp_path) as server:
        own.extra |= server.environ()
        own.start("sleep", "1000", name="w")
        one = fork_server.wait(own)
        before = one.memory_info().rss
        url = server.url(server.new_bucket())
        own.ok("--store", url, "checkpoint", "w", "--leave-running")
        until(lambda: one.memory_info().rss > before + (8 << 20), 10, "it is loaded")
        assert fork_server.wait(own).pid == one.pid
        assert one.num_threads() == 1 and one.num_fds() == 5
        without = fork_server.run(own, "--store", url, "checkpoints", "ls", env=OFF)
        done = fork_server.run(own, "--store", url, "checkpoints", "ls")
        assert (done.status, alike(done.out), done.err) == (0, alike(without.out), without.err)
        assert done.faults < without.faults / 2
