"""Settings, units, names, errors and records: what is refused, and with which words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate import config, errors, units
from cmdop_migrate.errors import BadConfig, CmdopError, Usage
from cmdop_migrate.events import Events
from cmdop_migrate.host.holder_order import private_paths
from cmdop_migrate.host.run import RunOptions, specify
from cmdop_migrate.lease import margins
from cmdop_migrate.model import Exit, ExitKind, Link, Record, Spec, exit_kind, new_session_id, session_name


def load(tmp_path: Path, text: str, environ: dict[str, str] | None = None, **flags: str) -> config.Config:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return config.load(str(file), flags, environ or {})


def test_default_file_environment_flag_in_this_order(tmp_path: Path) -> None:
    assert load(tmp_path, "").lease_ttl == 15
    assert load(tmp_path, 'lease_ttl = "20s"').lease_ttl == 20
    assert load(tmp_path, 'lease_ttl = "20s"', {"CMDOP_MIGRATE_LEASE_TTL": "25s"}).lease_ttl == 25
    assert load(tmp_path, 'host = "f"', {"CMDOP_MIGRATE_HOST": "e"}, host="flag").host == "flag"
    assert load(tmp_path, 'host = "f"', {"CMDOP_MIGRATE_HOST": ""}).host == "f"


def test_a_file_as_other_editors_write_it(tmp_path: Path) -> None:
    assert load(tmp_path, '\ufeffhost = "f"\r\nlease_ttl = "20s"\r\n').host == "f"
    with pytest.raises(BadConfig, match=":2: unknown key 'hots'"):
        load(tmp_path, '\ufeffhost = "f"\r\nhots = "g"\r\n')


def test_every_ttl_that_can_be_set_can_be_kept(tmp_path: Path) -> None:
    for seconds in (margins.TTL_MIN, margins.TTL_MAX):
        assert load(tmp_path, f'lease_ttl = "{units.exact_duration(seconds)}"').lease_ttl == margins.check_ttl(seconds)


def test_no_file_at_all_is_not_the_default_one() -> None:
    with pytest.raises(BadConfig, match="--config names no file"):
        config.load("", {}, {})


def test_an_example_is_one(tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as caught:
        load(tmp_path, "host = 5")
    assert "None" not in caught.value.hint


def test_defaults_follow_the_state_dir(tmp_path: Path) -> None:
    got = load(tmp_path, 'state_dir = "/srv/cm/"')
    assert (str(got.state_dir), got.store, str(got.key_file)) == ("/srv/cm", "file:///srv/cm/store", "/srv/cm/keys")
    assert got.lease == "sqlite:///srv/cm/lease.db"
    assert load(tmp_path, 'store = "file:///STATE_DIR"').store == "file:///STATE_DIR"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("host = ", "not valid TOML"),
        ('host = "a"\nhost = "b"', "not valid TOML"),
        ('# x\n\nhots = "a"', ":3: unknown key 'hots'"),
        ('[host]\nname = "a"', ":1: host must be a string"),
        ("[section]\nx = 1", ":1: unknown key 'section'"),
        ("ring_size = 4096", "must be a string, in quotes"),
        ('\nring_size = "1KiB"', ":2: ring_size: out of range"),
        ('state_dir = "relative"', "not an absolute path"),
        ('store = "ftp://x"', "not a URL"),
        ('subnet = "10.0.0.0/30"', "too small"),
        ('subnet = "10.0.0.1/8"', "not an IPv4 network"),
        ('keep_exited = "0s"', "greater than zero"),
        ('\nlease_ttl = "2d"', ":2: lease_ttl: out of range"),
        ('lease_ttl = "1ms"', ":1: lease_ttl: out of range"),
        ('host = "a b"', "not a host name"),
    ],
)
def test_bad_settings(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        load(tmp_path, text)
    assert words in caught.value.message and caught.value.hint and "\n" not in caught.value.message


def test_bad_environment_and_flag_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="CMDOP_MIGRATE_LEASE_TTL"):
        load(tmp_path, "", {"CMDOP_MIGRATE_LEASE_TTL": "x"})
    with pytest.raises(BadConfig, match="--state-dir"):
        load(tmp_path, "", state_dir="x")
    with pytest.raises(BadConfig, match="cannot read"):
        config.load("/no/such/file", {}, {})


def test_processes_of_our_own_get_the_same_settings(tmp_path: Path) -> None:
    """Also times that a float would be shown with an exponent for: a session's agent is given them."""
    text = 'keep_exited = "30d"\nhook_timeout = "1234567s"\nlease_ttl = "12.345678s"\ngate_timeout = "0.05ms"'
    got = load(tmp_path, text)
    assert (got.keep_exited, got.hook_timeout) == (30 * 86400, 1234567)
    assert config.load(environ=config.to_environment(got)) == got


@given(st.floats(min_value=1e-3, max_value=units.LONGEST))
def test_durations_are_read_back(seconds: float) -> None:
    text = units.exact_duration(seconds)
    assert re.fullmatch(r"[0-9.]+s", text)
    assert units.duration(text) == pytest.approx(seconds, abs=1e-9)


def test_units() -> None:
    assert [units.duration(text) for text in ("90s", "5m", "24h", "250ms", "1.5", " 2d ")] == [
        90, 300, 86400, 0.25, 1.5, 172800,
    ]  # fmt: skip
    assert [units.size(text) for text in ("64MiB", "1KiB", "17", "2 GiB")] == [64 << 20, 1024, 17, 2 << 30]
    for bad in ("", "x", "1 parsec", "-1s", "1MB", "1e3"):
        with pytest.raises(Usage):
            units.duration(bad)
        with pytest.raises(Usage):
            units.size(bad)
    assert [units.duration(text) for text in ("999999d", "9" * 400)] == [units.LONGEST] * 2  # forever
    for huge in ("8388608TiB", "9" * 400):
        with pytest.raises(Usage):
            units.size(huge)
    assert [units.show_duration(value) for value in (12, 185, 7620, 356400)] == ["12s", "3m05s", "2h07m", "4d03h"]
    assert [units.show_size(value) for value in (17, 3355443, 1 << 50)] == ["17 B", "3.2 MiB", "1024.0 TiB"]


@given(st.text(max_size=80))
def test_session_names(text: str) -> None:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text) and text.isascii():
        assert session_name(text) == text
        return
    with pytest.raises(Usage) as caught:
        session_name(text)
    assert "\n" not in caught.value.message


def test_session_ids_are_names_too() -> None:
    assert len({new_session_id() for _ in range(1000)}) == 1000
    assert session_name(new_session_id())


def test_every_error_has_one_code_and_is_in_the_tree() -> None:
    every = errors.all_errors()
    codes = [one.code for one in every]
    assert len(set(codes)) == len(codes)
    drawn = dict(re.findall(r"[├└]── (\w+)(?: +(\d+))?", errors.__doc__ or ""))
    assert set(drawn) == {one.__name__ for one in every} - {"CmdopError"}
    for one in every:
        assert one.__doc__ and 1 <= one.exit <= 12
        if drawn.get(one.__name__):
            assert int(drawn[one.__name__]) == one.exit
        assert isinstance(errors.from_code(one.code, "m", "h"), one)
    assert isinstance(errors.from_code("of a later version", "m"), errors.Unexpected)
    assert issubclass(errors.Unexpected, CmdopError)


SPEC = Spec(("sh", "-c", "x"), "/", "root", (("A", "1"),), "private", ("/data",))


def test_records_survive_json() -> None:
    record = Record("id", "n", "h", 3, "exited", SPEC, 1.5, ("/", "/home"), ("/data",),
                    Link("v", "10.0.0.2", "10.0.0.1", 30), None, Exit(143, "", 2.5, "moved", "b", 4))  # fmt: skip
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    ("code", "reason", "kind", "to", "token"),
    [
        (0, "exited 0", "exited", None, None),
        (137, "killed by SIGKILL", "killed", None, None),
        (137, "killed", "killed", None, None),
        (None, "its holder died", "holder_died", None, None),
        (None, "it ended while it was being parked", "parking_unknown", None, None),
        (None, "it ended before it was parked", "not_parked", None, None),
        (137, "killed; its lease has not heard of it yet", "kill_pending", None, None),
        (None, "moved to host-b (token 2)", "moved", "host-b", 2),
        (137, "superseded by token 4 on host-b", "superseded", "host-b", 4),
        (None, "a reason of no known version", "exited", None, None),
    ],
)
def test_exit_without_a_kind_is_read_by_its_old_reason(
    code: int | None, reason: str, kind: ExitKind, to: str | None, token: int | None
) -> None:
    data = Record("id", "n", "h", 3, "exited", SPEC, 1.5).to_json()
    data["exit"] = {"code": code, "reason": reason, "at": 2.5}
    assert Record.from_json(data).exit == Exit(code, reason, 2.5, kind, to, token)
    assert exit_kind({"event": "exit", "code": code, "reason": reason}) == kind


def test_exit_of_an_unknown_kind_is_refused() -> None:
    data = Record("id", "n", "h", 3, "exited", SPEC, 1.5).to_json()
    data["exit"] = {"code": 0, "reason": "", "at": 2.5, "kind": "evaporated"}
    with pytest.raises(ValueError, match="evaporated"):
        Record.from_json(data)


@pytest.mark.parametrize(
    "damage",
    [{"version": 2}, {"version": None}, {"spec": None}, {"spec": {}}, {"layers": 3}, {"more": 1}, {"link": {"x": 1}}],
)
def test_damaged_records_are_refused(damage: dict[str, object]) -> None:
    data = {**Record("id", "n", "h", 3, "live", SPEC, 1.5).to_json(), **damage}
    with pytest.raises((KeyError, TypeError, ValueError)):
        Record.from_json(data)


def test_private_paths_are_named_once(tmp_path: Path) -> None:
    got = load(tmp_path, 'state_dir = "/srv/cm"\nstore = "file:///srv/store"\nkey_file = "/srv/cm/keys"')
    assert private_paths(got) == ["/run/cmdop-migrate", "/srv/cm", "/srv/store"]


def test_environment_of_a_session() -> None:
    wish = RunOptions(("x",), env=("A=1", "B=", "C"), cwd="/")
    spec = dict(
        specify(wish, {"C": "3", "SECRET": "s", "LANG": "C", "LC_TIME": "x", "TERM": "dumb", "PATH": "/bin"}).env
    )
    assert {key: spec[key] for key in ("A", "B", "C", "LANG", "LC_TIME", "TERM", "PATH")} == {
        "A": "1", "B": "", "C": "3", "LANG": "C", "LC_TIME": "x", "TERM": "xterm-256color", "PATH": "/bin",
    }  # fmt: skip
    assert "SECRET" not in spec and "DEFAULT" not in spec
    for bad in (
        RunOptions(()),
        RunOptions(("x",), env=("=1",)),
        RunOptions(("x",), env=("NOT_THERE",)),
        RunOptions(("x" * (128 << 10),)),
    ):
        with pytest.raises(Usage):
            specify(bad, {})


def test_events_lines_stand_alone(tmp_path: Path) -> None:
    events = Events(tmp_path, "h")
    events.emit("one", "s1", x=1)
    with open(events.path, "ab") as file:
        file.write(b'{"event":"cut')
    events.emit("two", "s2")
    assert [line["event"] for line in events.read()] == ["one", "two"]
    assert [line["event"] for line in events.read("s2")] == ["two"]


def test_events_rotate_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cmdop_migrate.events.ROTATE_AT", 2000)
    events = Events(tmp_path, "h")
    for number in range(60):
        events.emit("e", number=number)
    kept = [line["number"] for line in events.read()]
    assert kept == list(range(int(str(kept[0])), 60)) and len(kept) >= 20


def test_events_are_followed_across_rotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cmdop_migrate.events.ROTATE_AT", 1500)
    events = Events(tmp_path, "h")
    numbers = iter(range(200))

    def emit_some() -> None:
        for _ in range(7):
            events.emit("e", number=next(numbers))

    emit_some()
    got = []
    for line in events.follow(None, emit_some):
        got.append(line["number"])
        if len(got) == 150:
            break
    assert got == list(range(150))
