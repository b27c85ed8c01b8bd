"""The client of the fork server: which commands it sends to which server, decided without loading our modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.cli.forkserver import child, client, compat, server
from cmdop_migrate.cli.main import COMMANDS, cli
from tests.support.host import PROJECT

RUN = "/run/cmdop-migrate"


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONFIG", "/nonexistent")


@pytest.mark.parametrize(
    ("words", "environ", "place"),
    [
        ("ls", {}, RUN),
        ("--json -v checkpoint w", {}, RUN),
        ("--store s3://x/y --host=h restore", {}, RUN),
        ("--run-dir /r ls", {}, "/r"),
        ("--run-dir=/r ls", {"CMDOP_MIGRATE_RUN_DIR": "/e"}, "/r"),
        ("ls", {"CMDOP_MIGRATE_RUN_DIR": "/e"}, "/e"),
        ("ls", {"CMDOP_MIGRATE_RUN_DIR": ""}, RUN),
        ("ls", {"CMDOP_MIGRATE_CONFIG": "/dev/null"}, RUN),
        ("ls", {"CMDOP_MIGRATE_READY": "1"}, RUN),
        ("ls", {"CMDOP_MIGRATE_READY": "0"}, None),
        ("ls", {"CMDOP_MIGRATE_READY": "false"}, None),
        ("ls", {"CMDOP_MIGRATE_TEST_STOP": "x:y"}, None),
        ("--config /dev/fd/63 ls", {}, None),
        ("send w x --credential /proc/self/fd/3", {}, None),
        ("ls", {"CMDOP_MIGRATE_KEY_FILE": "/dev/fd/3"}, None),
        ("--run-dir r ls", {}, None),
        ("--run-dir", {}, None),
        ("--nonsense ls", {}, None),
        ("-h ls", {}, None),
        ("ls --help", {}, None),
        ("checkpoint -h", {}, None),
        ("--version", {}, None),
        ("run -- ls", {}, None),
        ("--store ls", {}, None),
        ("agent", {}, None),
        ("", {}, None),
    ],
)
def test_command_is_sent_to_the_fork_server_of_its_run_dir(
    words: str, environ: dict[str, str], place: str | None
) -> None:
    assert client.run_dir_of(words.split(), environ) == place


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('host = "a"\n', RUN),
        ('run_dir = "/elsewhere"\n', "/elsewhere"),
        ('# run_dir = "/elsewhere"\n', RUN),
        ("run_dir = 7\n", RUN),
        ("run_dir = not toml\n", RUN),
        ('run_dir = "relative"\n', None),
    ],
)
def test_config_file_sets_the_run_dir_of_the_fork_server(tmp_path: Path, text: str, place: str | None) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert client.run_dir_of(["--config", str(file), "ls"], {}) == place
    assert client.run_dir_of(["ls"], {"CMDOP_MIGRATE_CONFIG": str(file)}) == place
    assert client.run_dir_of(["ls"], {"CMDOP_MIGRATE_CONFIG": str(tmp_path / "none")}) == RUN


def test_config_in_a_pipe_is_not_read_by_the_client(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert client.run_dir_of(["--config", str(pipe), "ls"], {}) is None


def test_client_repeats_the_settings_of_config_correctly() -> None:
    assert config.KEYS["run_dir"].default == RUN == client.RUN_DIR
    assert config.DEFAULT_FILE == "/etc/cmdop-migrate/config.toml"
    assert compat.SWITCH == config.ENV_PREFIX + "READY"
    assert set(COMMANDS) >= client.COMMANDS
    assert not client.COMMANDS & {"run", "attach", "agent", "relay", "doctor", "drain", "migrate", "resume", "key"}
    valued = {name for one in cli.params for name in one.opts if not getattr(one, "is_flag", False)}
    assert {name for name in valued if name.startswith("--")} - {"--verbose"} == set(client._WITH_VALUE)


def test_client_loads_almost_no_modules() -> None:
    code = (
        "import sys; before = set(sys.modules); import cmdop_migrate.entry; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True)
    allowed = {
        "__future__",
        "_socket",
        "select",
        "cmdop_migrate",
        "cmdop_migrate.entry",
        "cmdop_migrate.cli",
        "cmdop_migrate.cli.forkserver",
        "cmdop_migrate.cli.forkserver.client",
        "cmdop_migrate.cli.forkserver.compat",
    }
    assert set(done.stdout.split()) <= allowed | {"math"}, done.stdout


def request(*words: str, **environ: str) -> bytes:
    fields = ["like", "utf-8 strict 1 0", "", "utf-8 strict 1 0", str(len(words)), *words]
    return "\0".join([*fields, *(f"{key}={value}" for key, value in environ.items())]).encode()


def test_request_round_trip_keeps_arguments_and_environment() -> None:
    parsed = child.Request.parse(request("cm", "send", "", "a=b", LANG="C", EMPTY="", EQUALS="a=b"))
    assert parsed.argv == (b"cm", b"send", b"", b"a=b")
    assert dict(parsed.environ) == {b"LANG": b"C", b"EMPTY": b"", b"EQUALS": b"a=b"}
    assert parsed.streams[1] is None and parsed.streams[0] == child.Stream("utf-8", "strict", True, False)


@pytest.mark.parametrize(
    "body", [b"", b"x", b"\0\0\0\0", b"l\0\0\0\x002\0only", b"l\0\0\0\x001\0a\0noequals", b"l\0x\0\0\x001\0a"]
)
def test_malformed_request_is_refused(body: bytes) -> None:
    with pytest.raises((ValueError, LookupError)):
        child.Request.parse(body)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (request("cm", "ls"), False),
        (request("cm", "--store", "s3://b/p", "ls"), True),
        (request("cm", "--store=s3://b/p", "ls"), True),
        (request("cm", "ls", CMDOP_MIGRATE_STORE="s3://b"), True),
        (request("cm", "ls", CMDOP_MIGRATE_LEASE="s3://b"), True),
        (request("cm", "ls", OTHER="s3://b"), False),
        (b"", False),
        (b"l\0\0\0\0x", False),
    ],
)
def test_request_that_names_s3_is_recognised(body: bytes, named: bool) -> None:
    assert server.names_s3(body) is named


def test_server_loads_every_command_that_the_client_sends() -> None:
    expected = {f"cmdop_migrate.cli.commands.{COMMANDS[name]}.{name}" for name in client.COMMANDS}
    assert expected <= set(server.MODULES)
