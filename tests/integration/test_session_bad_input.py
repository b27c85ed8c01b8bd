"""What cannot work: one line that says so and what to do next, the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import click
import pytest

from cmdop_migrate.cli.main import cli
from cmdop_migrate.holder import cgroup
from tests.support.host import CM, Host, until


def test_unknown_session(host: Host) -> None:
    for command in ("show", "output", "wait", "kill", "events"):
        host.fails(command, "nobody", status=3, code="session_not_found")
    host.fails("send", "nobody", "x", status=3, code="session_not_found")
    assert host.cm("attach", "nobody").returncode == 3
    host.assert_clean()


def test_duplicate_name(host: Host) -> None:
    host.start("sleep", "1000", name="t")
    host.fails("run", "-d", "--name", "t", "--", "sleep", "1000", status=4, code="blocked")
    host.ok("kill", "t")
    host.start("true", name="t")  # an ended session's name is free again


@pytest.mark.parametrize("name", ["a/b", "x" * 300, "", "../x", "-x", "a b", "ü", "a\n"])
def test_bad_name(host: Host, name: str) -> None:
    host.fails("run", "-d", f"--name={name}", "--", "true", status=2, code="usage")
    host.assert_clean()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["no-such-command"], "command not found"),
        (["/no/such/command"], "command not found"),
        (["/usr"], "is a directory"),
        ([""], "command not found"),
        (["PLAIN"], "not executable"),
        (["SHEBANG"], "no interpreter /no/such/interpreter"),
    ],
)
def test_bad_command(host: Host, tmp_path: Path, command: list[str], words: str) -> None:
    plain, shebang = tmp_path / "plain", tmp_path / "shebang"
    plain.write_text("x")
    shebang.write_text("#!/no/such/interpreter\n")
    shebang.chmod(0o755)
    command = [{"PLAIN": str(plain), "SHEBANG": str(shebang)}.get(one, one) for one in command]
    error = host.fails("run", "-d", "--", *command, status=2, code="usage")
    assert words in error["message"]
    host.assert_clean()


def test_bad_options(host: Host, tmp_path: Path) -> None:
    for options in (
        ["--cwd", "/no/such/dir"],
        ["--user", "no-such-user"],
        ["--share", "/no/such/dir"],
        ["--env", "=x"],
        ["--net", "bridge"],
    ):
        host.fails("run", "-d", *options, "--", "true", status=2, code="usage")
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    error = host.fails("run", "-d", "--user", "nobody", "--cwd", str(secret), "--", "true", status=2, code="usage")
    assert "Permission denied" in error["message"]
    here = tmp_path / "here"
    host.prefix = ("sh", "-c", f'mkdir {here} && cd {here} && rmdir {here} && exec "$@"', "sh")
    for option in ("--cwd", "--share"):
        error = host.fails("run", "-d", option, ".", "--", "true", status=2, code="usage")
        assert "was removed" in error["message"]
    host.prefix = ()
    host.fails("run", "-d", status=2, code="usage")
    host.fails("wait", "x", "--timeout", "soon", status=2, code="usage")
    host.fails("kill", "x", "--signal", "NONE", status=2, code="usage")
    host.fails("no-such-command", status=2, code="usage")
    assert host.cm("run", "--", "true").returncode == 2
    host.assert_clean()


def test_environment_at_and_past_the_limit(host: Host) -> None:
    def many(total: int) -> list[str]:
        return [part for number in range(total // 1000) for part in ("--env", f"V{number:06d}={'x' * 985}")]

    error = host.fails("run", "-d", *many(1_100_000), "--", "true", status=2, code="usage")
    assert "too long" in error["message"]
    host.assert_clean()
    session = host.start("sh", "-c", "env | grep -c ^V", options=tuple(many(900_000)))["session"]
    host.cm_json("wait", session)
    assert host.output(session).strip() == "900"


def test_not_text(host: Host) -> None:
    """A command may hold any bytes: it runs, and listing it does not fail."""
    made = host.cm("run", "-d", "--", "sh", "-c", "sleep 1000", os.fsdecode(b"\xff\x1b[31m"))
    assert made.returncode == 0
    assert "\\udcff\\x1b[31m" in host.ok("ls")
    assert host.cm_json("ls")["sessions"][0]["state"] == "running"


def test_not_root(host: Host, tmp_path: Path) -> None:
    host.ok("ls")
    # The interpreter must be reachable for that user; where it is not, there is nothing to test.
    host.prefix = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--")
    probe = subprocess.run([*host.prefix, *CM, "--version"], env=host.env(), capture_output=True, cwd="/")
    if probe.returncode != 0:
        host.prefix = ()
        pytest.skip("another user cannot run this interpreter")
    try:
        for command in (["run", "-d", "--", "true"], ["ls"]):
            host.fails(*command, status=2, code="not_root")
    finally:
        host.prefix = ()


def test_bad_settings(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    for text, words in (
        ("host = \n", "not valid TOML"),
        ('host = "a"\n\nhots = "b"\n', f"{file}:3: unknown key 'hots'"),
        ("lease_ttl = 15\n", "must be a string"),
        ('lease_ttl = "soon"\n', f"{file}:1: lease_ttl: not a duration"),
    ):
        file.write_text(text)
        error = host.fails("--config", str(file), "ls", status=2, code="bad_config")
        assert words in error["message"]
    host.fails("--config", "/no/such/file", "ls", status=2, code="bad_config")
    host.fails("--state-dir", "relative", "ls", status=2, code="bad_config")
    assert not host.state.exists()


def test_state_dir_that_cannot_be_written(host: Host) -> None:
    host.state.mkdir()
    script = f'mount --bind {host.state} {host.state} && mount -o remount,bind,ro {host.state} && exec "$@"'
    host.prefix = ("unshare", "-m", "sh", "-c", script, "sh")
    try:
        for command in (["ls"], ["run", "-d", "--", "true"]):
            host.fails(*command, status=2, code="bad_config")
    finally:
        host.prefix = ()
    host.state.rmdir()
    host.state.write_text("a file")
    host.fails("ls", status=2, code="bad_config")
    host.state.unlink()


def test_state_dir_on_an_overlay(host: Host, tmp_path: Path) -> None:
    host.ok("ls")
    for name in ("u", "w"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={host.state},upperdir={tmp_path}/u,workdir={tmp_path}/w"
    host.prefix = (
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount -t overlay overlay -o {options} {host.state} && exec "$@"',
        "sh",
    )
    try:
        error = host.fails("run", "-d", "--", "true", status=4, code="blocked")
    finally:
        host.prefix = ()
    assert "overlay" in error["message"] and "ext4" in error["hint"]
    host.assert_clean()


@pytest.mark.parametrize("room", ["8k", "16k", "24k", "36k", "48k", "60k", "72k"])
def test_disk_full_while_starting(host: Host, room: str) -> None:
    """Wherever in a start the disk gets full: it says so, and the next command finds nothing."""
    host.extra["CMDOP_MIGRATE_LEASE"] = f"sqlite://{host.dir}/lease.db"  # on a disk with room: else it ends there
    host.ok("ls")
    host_id = (host.state / "host-id").read_text()
    script = (
        f"mount -t tmpfs -o size={room} t {host.state} && echo -n {host_id} > {host.state}/host-id; "
        f'"$@"; status=$?; find {host.state}/sessions -mindepth 1 -maxdepth 1 >&2; exit $status'
    )
    host.prefix = ("unshare", "-m", "sh", "-c", script, "sh")
    try:
        done = host.cm("--json", "run", "-d", "--", "true")
    finally:
        host.prefix = ()
    assert done.returncode in (0, 2, 4), (done.stdout, done.stderr)
    if done.returncode != 0:
        assert b"No space left" in done.stdout
        assert done.stderr == b"", done.stderr
    until(lambda: not cgroup.pids(host.group("holders")))
    host.assert_clean()


def test_killed_at_any_moment(host: Host) -> None:
    """kill -9 of `run`, and of `run` with its holder, over its whole length: the next command leaves a whole
    session or nothing."""
    host.ok("ls")
    began = time.monotonic()
    host.ok("kill", host.start("sleep", "1000")["session"])
    length = max(0.3, (time.monotonic() - began) * 0.7)
    source = random.Random(7)
    whole = 0
    for round_ in range(26):
        process = subprocess.Popen(
            [*CM, "run", "-d", "--name", f"k{round_}", "--", "sleep", "1000"],
            env=host.env(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(length * (round_ + source.random()) / 26)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        holders = children.read_text().split() if children.exists() and round_ % 2 else []
        process.kill()
        for pid in map(int, holders):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        time.sleep(0.05)
        rows = [row for row in host.sessions() if row["state"] != "exited"]
        if rows:
            assert rows[0]["state"] == "running"
            assert len(host.pids(rows[0]["session"])) == 2
            host.ok("kill", "--grace", "0s", rows[0]["session"])
            whole += 1
        host.assert_clean(ended=True)
    assert whole < 26


def test_a_damaged_record(host: Host) -> None:
    session = host.start("sleep", "1000", name="t")["session"]
    record = host.state / "sessions" / session / "session.json"
    os.kill(host.holder(session), signal.SIGKILL)
    record.write_text("{")
    assert host.sessions() == []
    host.assert_clean()


def test_ctrl_c_while_starting(host: Host) -> None:
    for delay in (0.1, 0.2, 0.3):
        process = subprocess.Popen([*CM, "run", "-d", "--", "sleep", "1000"], env=host.env(), stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode in (0, 130, -2), said
        for row in host.sessions():
            host.ok("kill", row["session"])
        host.assert_clean(ended=True)


def test_closed_streams(host: Host) -> None:
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        script = f'"$@" {closed}'
        done = subprocess.run(["sh", "-c", script, "sh", *CM, "run", "-d", "--", "sleep", "1000"], env=host.env(),
                              capture_output=True, timeout=30)  # fmt: skip
        assert done.returncode == 0, done.stderr
    rows = host.sessions()
    assert [row["state"] for row in rows] == ["running"] * 4
    for row in rows:
        for pid in host.pids(row["session"]):
            assert len(os.listdir(f"/proc/{pid}/fd")) == 3
    script = '"$@" | head -1'
    done = subprocess.run(["sh", "-c", script, "sh", *CM, "events"], env=host.env(), capture_output=True, timeout=30)
    assert done.returncode == 0 and done.stderr == b""


def test_half_a_command(host: Host) -> None:
    for words in ("key", "checkpoints", "hosts", "lease", "relay", "relay token"):
        error = host.fails(*words.split(), status=2, code="usage")
        assert f"cmdop-migrate {words} needs a subcommand: " in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("words", [["show", "nobody"], ["--json", "show", "nobody"]])
def test_exit_status_tells_an_error_whose_reader_is_gone(host: Host, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, os.fdopen(writer, "wb") as broken:
        for where in (full, broken):
            done = subprocess.run([*CM, *words], env=host.env(), stdout=where, stderr=subprocess.PIPE, timeout=30)
            assert done.returncode == 3
            assert b"no session 'nobody'" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_gone_reader_of_the_answer_does_not_change_exit_status(host: Host, options: list[str]) -> None:
    host.start("true", name="t")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as broken:
        for words, status in ((["wait", "t", "--for", "never"], 4), (["show", "t"], 0), (["events", "--follow"], 0)):
            done = subprocess.run(
                [*CM, *options, *words], env=host.env(), stdout=broken, stderr=subprocess.PIPE, timeout=30
            )
            assert (done.returncode, done.stderr) == (status, b""), words


def test_an_answer_that_cannot_be_written(host: Host) -> None:
    """What was asked for is done; a full disk is not a plan that blocks it."""
    host.start("sleep", "1000", name="t")
    for words in (["--json", "ls"], ["ls"], ["--json", "checkpoint", "t", "--leave-running"], ["output", "t"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([*CM, *words], env=host.env(), stdout=full, stderr=subprocess.PIPE, timeout=60)
        wanted = 0 if words[0] == "output" else 1  # it printed nothing
        assert done.returncode == wanted and b"Traceback" not in done.stderr, done.stderr
        assert wanted == 0 or b"cannot write to standard output: No space left on device" in done.stderr
    assert len(host.cm_json("checkpoints", "ls")["checkpoints"]) == 1


def test_help_needs_nothing(host: Host) -> None:
    for command in ([], ["run"], ["ls"], ["show"], ["attach"], ["send"], ["output"], ["wait"], ["kill"], ["events"]):
        text = host.ok(*command, "--help", env={"CMDOP_MIGRATE_CONFIG": "/no/such/file"})
        assert "cmdop-migrate" in text and "Usage" in text
    assert not host.state.exists()


def test_every_help_has_an_example() -> None:
    def walk(command: click.Command, words: str) -> None:
        ctx = click.Context(command, info_name=words)
        text = command.get_help(ctx).split("Usage: ", 1)[1]
        assert re.search(rf"Examples?:\s+{re.escape(words)}", text), text
        for name in command.list_commands(ctx) if isinstance(command, click.Group) else []:
            inner = command.get_command(ctx, name)
            assert inner is not None
            walk(inner, f"{words} {name}")

    walk(cli, "cmdop-migrate")


def test_a_record_of_another_version_is_left_alone(host: Host) -> None:
    session = host.start("true", name="t")["session"]
    host.cm_json("wait", "t")
    record = host.state / "sessions" / session / "session.json"
    before = record.read_text()
    record.write_text(before.replace('"version": 1', '"version": 2'))
    assert host.sessions() == []
    assert record.exists()
    record.write_text(before)
    assert host.sessions()[0]["session"] == session
