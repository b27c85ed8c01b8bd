"""checkpoints ls, show, prune; fork; keys; a second host; references: through the command line."""

from __future__ import annotations

import base64
import json
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cmdop_migrate.images.format import keys
from cmdop_migrate.util.faults import TEST_STOP
from tests.crash.witness import Witness, finished, stopped
from tests.support.host import CM, Host, pair, read_proc, until
from tests.support.servers import seaweed


def test_ls_show_and_prune(host: Host) -> None:
    one = Witness.start(host)
    made = [host.cm_json("checkpoint", "w", "--leave-running", "--tag", f"t{n}")["checkpoint"] for n in range(2)]
    made.append(host.cm_json("checkpoint", "w")["checkpoint"])
    rows = host.cm_json("checkpoints", "ls", "w")["checkpoints"]
    assert [row["checkpoint"] for row in rows] == made
    assert [row["tag"] for row in rows] == ["t0", "t1", None]
    facts = host.cm_json("checkpoints", "show", made[1][:12])
    assert facts["session"] == one.session and facts["live"] is True and facts["command"][0] == sys.executable
    host.fails("checkpoints", "show", "ffffffff", status=3, code="checkpoint_not_found")
    host.fails("checkpoints", "prune", status=2, code="usage")
    would = host.cm_json("checkpoints", "prune", "--keep-last", "1", "--dry-run")["checkpoints"]
    assert sorted(would) == sorted(made[:2])
    assert len(host.cm_json("checkpoints", "ls")["checkpoints"]) == 3
    assert sorted(host.cm_json("checkpoints", "prune", "--keep-within", "0.001s")["checkpoints"]) == sorted(made[:2])
    host.ok("checkpoints", "verify")
    assert one.restore()["checkpoint"] == made[2]
    host.cm_json("kill", "w", "--signal", "KILL")
    # The agent lets go of its lease in its own time: until then what it may be restored from stays.
    until(lambda: host.cm_json("checkpoints", "prune", "--keep-within", "0.001s")["checkpoints"] == made[2:])
    left = [path for path in (host.state / "store" / "packs").rglob("*") if path.is_file()]
    assert left == [], "no checkpoint needs these"


def test_prune_during_a_checkpoint(host: Host) -> None:
    """What the upload relies on stays, though nothing that is published needs it any more."""
    one = Witness.start(host)
    first = host.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    with stopped(host, "publish", "checkpoint", "w") as (cli, _):
        gone = host.cm_json("checkpoints", "prune", "--drop", first)
        assert gone["checkpoints"] == [first] and gone["packs"] == 0 and gone["waiting"] > 0, gone
        cli.send_signal(signal.SIGCONT)
        status, answer = finished(cli)
    assert status == 0, answer
    host.ok("checkpoints", "verify")
    assert one.restore()["checkpoint"] == answer["checkpoint"]


def test_fork_is_a_new_session_on_shared_chunks(host: Host) -> None:
    one = Witness.start(host)
    host.fails("fork", "w", "w", status=4, code="blocked")
    host.fails("fork", "w", "../x", status=2, code="usage")
    facts = host.cm_json("fork", "w", "branch")
    assert facts["parent"] == one.session and facts["session"] != one.session and facts["token"] == 1
    branch = Witness(host, "branch", facts["session"])
    one.assert_runs()
    branch.assert_runs()
    done = host.cm_json("checkpoint", "branch")
    assert done["bytes"]["new"] < done["bytes"]["stored"] / 4, "a branch shares what it did not change"
    host.cm_json("kill", "w", "--signal", "KILL")
    branch.restore()
    later = host.cm_json("restore", facts["checkpoint"], "--fork", "other")
    assert later["parent"] == one.session
    Witness(host, "other", later["session"]).assert_runs()
    host.fails("restore", facts["checkpoint"], "--fork", "other", status=4, code="blocked")


def test_fork_whose_memory_never_arrived_is_restored_as_itself(host: Host) -> None:
    one = Witness.start(host, size=40)
    saved = host.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    with stopped(host, "memory", "restore", saved, "--fork", "branch") as (cli, worker):
        worker.kill()
        status, _ = finished(cli)
    if status == 0:
        pytest.skip("all memory was there before it could be killed")
    row = until(lambda: [r for r in host.sessions() if r["name"] == "branch" and r["state"] == "parked"], 10)[0]
    facts = host.cm_json("restore", "branch")
    assert facts["session"] == row["session"] and facts["parent"] == one.session
    Witness(host, "branch", row["session"]).assert_runs()
    one.assert_runs()


def test_killed_fork_leaves_nothing(host: Host) -> None:
    one = Witness.start(host)
    saved = host.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    for step in ("fetch", "files", "pre-resume"):
        with stopped(host, step, "restore", saved, "--fork", "branch") as (cli, worker):
            error = host.fails("restore", saved, "--fork", "branch", status=4, code="blocked")
            assert "exists already" in error["message"]
            worker.kill()
            finished(cli)
        until(lambda: [row["name"] for row in host.sessions()] == ["w"], 10, "it is forgotten")
        assert host.session_dirs() == [one.session]
    one.assert_runs()


def test_references(host: Host) -> None:
    for reference in ("nobody", "abcdef0123"):
        host.fails("restore", reference, status=3, code="session_not_found")
        host.fails("checkpoint", reference, status=3, code="session_not_found")
    host.fails("restore", status=3, code="session_not_found")
    a, b = Witness.start(host, "a"), Witness.start(host, "b")
    host.cm_json("checkpoint", "a")
    for words in (("checkpoint", "a"), ("fork", "a", "x"), ("send", "a", "x"), ("wait", "a")):
        assert "restore a" in host.fails(*words, status=4, code="blocked")["hint"]
    assert host.cm_json("restore")["name"] == "a"
    host.cm_json("checkpoint", "a")
    host.cm_json("checkpoint", "b")
    error = host.fails("restore", status=2, code="usage")
    assert "a, b" in error["message"] and "--all" in error["hint"]
    host.fails("restore", "a", "--all", status=2, code="usage")
    # a's name was taken meanwhile: that is reported, and it stays parked; b is restored
    host.start("sleep", "100", name="c")
    record = host.state / "sessions" / a.session / "session.json"
    text = record.read_text()
    manifests = host.state / "store" / "manifests" / a.session
    for path in manifests.iterdir():
        path.rename(path.with_suffix(".away"))
    done = host.cm("--json", "restore", "--all")
    assert done.returncode == 10, done
    answer = json.loads(done.stdout)  # one object, also after an error
    assert [one["name"] for one in answer["restored"]] == ["b"] and [one["name"] for one in answer["failed"]] == ["a"]
    assert answer["error"]["exit"] == 10 and "a (" in answer["error"]["message"]
    for path in manifests.iterdir():
        path.rename(path.with_suffix(""))
    assert record.read_text() == text
    b.assert_runs()
    a.restore()


def test_restore_under_a_name_taken_meanwhile(host: Host) -> None:
    one = Witness.start(host)
    saved = host.cm_json("checkpoint", "w")["checkpoint"]
    host.fails("run", "-d", "--name", "w", "--", "sleep", "9", status=4, code="blocked")
    one.restore()
    host.cm_json("kill", "w", "--signal", "KILL")
    host.start("sleep", "100", name="w")
    host.fails("restore", saved, status=5, code="fenced")
    host.fails("restore", saved, "--fork", "w", status=4, code="blocked")


def test_stopped_program_stays_stopped(host: Host) -> None:
    host.start("bash", "--norc", name="sh")
    host.cm_json("send", "sh", "PS1='$ '; sleep 300", "--enter")
    time.sleep(0.5)
    host.cm_json("send", "sh", "\x1a")
    host.wait_for("sh", "Stopped")
    host.cm_json("checkpoint", "sh")
    facts = host.cm_json("restore", "sh")

    def standing() -> list[int]:
        return [pid for pid in host.pids(facts["session"]) if b" T " in read_proc(pid, "stat")]

    assert len(standing()) == 1
    host.cm_json("send", "sh", "jobs; fg", "--enter")
    until(lambda: not standing(), 10, "it continues after SIGCONT")


def test_keys_are_private_and_rotate(host: Host) -> None:
    one = Witness.start(host)
    first = host.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    before = host.cm_json("key", "show")
    file = host.state / "keys"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    after = host.cm_json("key", "rotate")
    assert after["fingerprint"] != before["fingerprint"] and after["keys"] == 2
    second = host.cm_json("checkpoint", "w")["checkpoint"]
    assert host.cm_json("checkpoints", "show", first)["key"] == before["fingerprint"]
    assert host.cm_json("checkpoints", "show", second)["key"] == after["fingerprint"]
    host.ok("checkpoints", "verify")
    one.restore()
    old = host.cm_json("restore", first, "--fork", "old")
    Witness(host, "old", old["session"]).assert_runs()
    file.chmod(0o640)
    error = host.fails("checkpoint", "w", status=2, code="bad_config")
    assert "chmod 600" in error["hint"]
    one.assert_runs()
    file.chmod(0o600)
    assert host.cm("--json", "key", "export").returncode == 2
    _assert_no_secret(host)


def test_checkpoint_after_a_key_rotation_logs_no_warning(host: Host) -> None:
    """What the old key has sealed is not damaged."""
    host.start("sleep", "1000", name="t")
    host.ok("checkpoint", "t", "--leave-running")
    host.ok("key", "rotate")
    done = host.cm("checkpoint", "t", "--leave-running")
    assert (done.returncode, done.stderr) == (0, b"")
    host.ok("checkpoints", "verify")


def _assert_no_secret(host: Host) -> None:
    """No form of any key is in files, output or the arguments that `ps` shows."""
    said = b""
    for args in (("--json", "key", "show"), ("-vv", "checkpoints", "verify"), ("--json", "ls"), ("events",)):
        done = host.cm(*args)
        assert done.returncode == 0, done
        said += done.stdout + done.stderr
    for path in host.state.rglob("*"):
        if path.is_file() and path.name != "keys" and "/store/" not in str(path):
            said += path.read_bytes()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said += process.read_bytes()
        except OSError:
            continue
    for key in keys.load(host.state / "keys").keys:
        for secret in (key.master.reveal(), key.seal_key.reveal(), key.id_key.reveal()):
            for form in (secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")):
                assert form not in said, f"a form of key {key.fingerprint} leaked"


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_second_host_with_the_key_and_the_store_restores(
    make_host: Callable[[str], Host], tmp_path: Path, kind: str
) -> None:
    a, b = make_host("host-a"), make_host("host-b")
    if kind == "file":
        for host in (a, b):
            host.extra["CMDOP_MIGRATE_STORE"] = f"file://{tmp_path}/shared"
        _move(a, b)
        return
    with seaweed(tmp_path) as server:
        url = server.url(server.new_bucket(), "sessions")
        for host in (a, b):
            host.extra |= server.environ() | {"CMDOP_MIGRATE_STORE": url}
        _move(a, b)


def _move(a: Host, b: Host) -> None:
    one = Witness.start(a)
    saved = a.cm_json("checkpoint", "w")["checkpoint"]
    b.fails("restore", saved, status=7, code="image_refused")
    exported = a.ok("key", "export")
    bad = subprocess.run([*CM, "key", "import"], env=b.env(), input=exported[:-60].encode(), capture_output=True)
    assert bad.returncode == 2 and re.search(rb"BEGIN|key block", bad.stderr), bad
    subprocess.run([*CM, "key", "import"], env=b.env(), input=exported.encode(), check=True, capture_output=True)
    assert stat.S_IMODE((b.state / "keys").stat().st_mode) == 0o600
    assert b.cm_json("key", "show")["fingerprint"] == a.cm_json("key", "show")["fingerprint"]
    facts = b.cm_json("restore", "w")
    assert facts["host"] == "host-b" and facts["token"] == 2 and facts["session"] == one.session
    there = Witness(b, "w", one.session)
    assert there.assert_runs() >= len(one.numbers())
    b.cm_json("checkpoint", "w")
    assert b.cm_json("restore", "w")["token"] == 3
    there.assert_runs()
    b.cm_json("kill", "w", "--signal", "KILL")  # its address is one of host-a's: gone before that is looked at


def test_leftover_of_a_killed_pre_copy_round_is_removed(host: Host) -> None:
    """CRIU's images of a pre-copy round are of no use once the command that made them is gone."""
    session = host.start("sleep", "1000", name="t")["session"]
    (left,) = host.state.glob(f"sessions/{session}*")
    (left / "images.before").mkdir()
    (left / "images.before/inventory.img").write_bytes(b"x")
    host.ok("checkpoint", "t", "--leave-running")
    assert not (left / "images.before").exists() and not (left / "dump").exists()


def test_empty_reference_matches_no_session(host: Host) -> None:
    """A variable that is not set, in quotes: the only checkpoint or session there is was not meant."""
    one = Witness.start(host)
    made = host.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
    for words in (("show", ""), ("verify", ""), ("prune", "--drop", "")):
        host.fails("checkpoints", *words, status=3, code="checkpoint_not_found")
    for words in (("restore", ""), ("restore", "", "--fork", "x"), ("checkpoints", "ls", ""), ("lease", "show", ""),
                  ("lease", "break", "", "--yes"), ("kill", ""), ("fork", "", "x"), ("plan", ""),
                  ("checkpoint", ""), ("events", "")):  # fmt: skip
        host.fails(*words, status=3, code="session_not_found")
    host.fails("drain", "--to", "", "--dry-run", status=2, code="usage")
    assert [row["checkpoint"] for row in host.cm_json("checkpoints", "ls")["checkpoints"]] == [made]
    assert host.cm_json("lease", "show", "w")["state"] == "held"
    one.assert_runs()


def test_name_wins_over_the_prefix_of_an_id(tmp_path: Path) -> None:
    """On a host that knows a session from the store alone."""
    with pair(tmp_path) as (a, b):
        other = a.start("sleep", "1000", name="other")["session"]
        saved = a.cm_json("checkpoint", "other")["checkpoint"]
        name = saved[:3]
        meant = a.start("sleep", "1000", name=name)["session"]
        a.cm_json("checkpoint", name)
        assert [one["session"] for one in b.cm_json("checkpoints", "ls", name)["checkpoints"]] == [meant]
        b.fails("lease", "break", other[:4], "--yes", status=3, code="session_not_found")
        assert b.cm_json("lease", "show", other[:4])["state"] == "parked"
        assert b.cm_json("restore", name)["session"] == meant
        assert b.cm_json("restore", saved[:14])["session"] == other
        for session in (meant, other):
            b.ok("kill", session, "--signal", "KILL")


def test_invalid_keys_and_key_files_are_refused(host: Host, tmp_path: Path) -> None:
    first = host.cm_json("key", "show")["fingerprint"]
    for given in (
        b"\xff\xfe-\x00",
        b"",
        b"-----BEGIN CMDOP-MIGRATE KEYS-----\n\xff\n-----END CMDOP-MIGRATE KEYS-----\n",
    ):
        done = subprocess.run([*CM, "--json", "key", "import"], env=host.env(), input=given, capture_output=True)
        error = json.loads(done.stdout)["error"]
        assert done.returncode == 2 and error["code"] == "usage" and "key export" in error["hint"], error
    assert host.cm_json("key", "show")["fingerprint"] == first
    exported = host.ok("key", "export").encode()
    plain = tmp_path / "plain"
    plain.write_text("x")
    for bad in (tmp_path, plain / "keys", Path("/dev/null")):
        host.extra["CMDOP_MIGRATE_KEY_FILE"] = str(bad)
        for word in ("show", "rotate"):
            assert "chmod" not in host.fails("key", word, status=2, code="bad_config")["hint"]
        done = subprocess.run([*CM, "--json", "key", "import"], env=host.env(), input=exported, capture_output=True)
        assert json.loads(done.stdout)["error"]["code"] == "bad_config", done
    del host.extra["CMDOP_MIGRATE_KEY_FILE"]


def test_tag_with_control_characters_does_not_move_the_cursor(host: Host) -> None:
    host.start("sleep", "1000", name="t")
    made = host.cm_json("checkpoint", "t", "--leave-running", "--tag", "a\x1b[2Jb\nkey          c")["checkpoint"]
    for words in (("ls",), ("show", made)):
        said = host.ok("checkpoints", *words)
        assert "\x1b" not in said and "a\\x1b[2Jb\\nkey" in said


def test_interrupted_command_names_the_next_command(host: Host) -> None:
    """Its work may be done, undone or still under way in the background: only `ls` tells."""
    one = Witness.start(host)
    cli = subprocess.Popen(
        [*CM, "checkpoint", "w"], env=host.env(**{TEST_STOP: "checkpoint:upload"}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: psutil.Process(cli.pid).status() == psutil.STATUS_STOPPED, 20, "it stands")
        cli.send_signal(signal.SIGINT)
        cli.send_signal(signal.SIGCONT)
        out, said = cli.communicate(timeout=30)
    finally:
        cli.kill()
        cli.wait()
    assert (cli.returncode, out) == (130, b""), said
    assert b"interrupted\n  See the state of the session: cmdop-migrate ls" in said and b"Traceback" not in said
    one.assert_runs()
