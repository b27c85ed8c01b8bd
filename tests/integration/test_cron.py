"""The scripts that cron runs: nothing in the environment, no terminal, one of a kind at a time, one line to say."""

from __future__ import annotations

import configparser
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cmdop_migrate
from cmdop_migrate.host.resources import TEST_STOP
from tests.support import fenced_sessions
from tests.support.host import CM, PROJECT, Host, until
from tests.support.host_group import World, several

SCRIPTS = PROJECT / "scripts"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with several(tmp_path, "host-a", "host-b") as made:
        yield made


def cron(host: Host, script: str, *words: str, **environ: str) -> subprocess.Popen[str]:
    """As cron does: `env -i`, /bin/sh, no terminal. What is set is what a config file would say."""
    command = host.dir / "cmdop-migrate"
    settings = {
        key: value for key, value in host.env(**environ).items() if key.startswith(("CMDOP_", "PYTHONPATH", "HOME"))
    }
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in settings.items())
    command.write_text(f'#!/bin/sh\n{exports}exec {shlex.join(CM)} "$@"\n')
    command.chmod(0o755)
    given = {
        "CMDOP_MIGRATE_COMMAND": str(command),
        "CMDOP_MIGRATE_STATE_DIR": str(host.state),
        "CMDOP_MIGRATE_DEFAULTS": str(host.dir / "default"),
        "PATH": "/usr/bin:/bin",
    }
    line = shlex.join([str(SCRIPTS / script), *words])
    return subprocess.Popen(
        ["env", "-i", *(f"{key}={value}" for key, value in given.items()), "/bin/sh", "-c", line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd="/",
    )


def said(process: subprocess.Popen[str], status: int = 0) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == status, out
    return out


def log(host: Host, script: str) -> str:
    return (host.state / "log" / f"cron-{script}.log").read_text()


def test_a_night_of_maintenance(world: World) -> None:
    a = world["host-a"]
    session = fenced_sessions.counter(a)
    out = said(cron(a, "checkpoint-all"))
    assert out == "checkpoint-all: ok: 1 saved\n"
    assert "cron" in a.ok("checkpoints", "ls")
    first = cron(a, "drain-maintenance", "--deadline", "5m", **{TEST_STOP: "drain:flagged"})
    standing = until(lambda: _stopped(a), 30, "the drain stands still")
    second = said(cron(a, "drain-maintenance", "--quiet-ok"), 4)
    assert second.startswith("drain-maintenance: runs already (process ") and second.count("\n") == 1
    os.kill(standing, signal.SIGCONT)
    out = said(first)
    assert out.startswith("drain-maintenance: ok: host-a: 1 moved, in ") and out.count("\n") == 1, out
    assert "w: moved to host-b" in log(a, "drain-maintenance")
    fenced_sessions.counts_on(world["host-b"], session)
    assert said(cron(a, "drain-maintenance", "--quiet-ok")) == ""  # nothing to do, nothing to say
    assert said(cron(a, "undrain-maintenance")) == (
        "undrain-maintenance: ok: host-a: sessions are accepted again; 1 back\n"
    )
    fenced_sessions.counts_on(a, session)
    assert said(cron(a, "reap-idle", "--idle", "1h")) == "reap-idle: ok: 0 idle sessions\n"
    (a.dir / "default").write_text('REAP_OPTIONS="--idle nothing"\n')
    out = said(cron(a, "reap-idle", "--quiet-ok"), 2)
    assert out.startswith("reap-idle: NOT DONE (exit 2): ") and str(a.state / "log/cron-reap-idle.log") in out


def _stopped(host: Host) -> int | None:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            environ = Path(f"/proc/{name}/environ").read_bytes()
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "T" and b"drain" in words and f"STATE_DIR={host.state}".encode() in environ:
            return int(name)
    return None


def test_failed_cron_run_is_reported_in_one_line(world: World) -> None:
    a = world["host-a"]
    hook = a.dir / "no"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    fenced_sessions.counter(a, "stays", "--hook", f"pre-freeze={hook}")
    fenced_sessions.counter(a, "goes")
    out = said(cron(a, "checkpoint-all", "--quiet-ok"), 10)
    assert out.startswith("checkpoint-all: NOT DONE (exit 10): 1 saved, 1 not: stays (") and out.count("\n") == 1
    (a.state / "log/cron-drain-maintenance.log").write_text("old\n" * 400_000)
    out = said(cron(a, "spot-reclaim", "20", "--quiet-ok"), 10)  # too short to move: parked
    assert out.startswith("drain-maintenance: NOT DONE (exit 10): 1 session stays on host-a: stays ("), out
    said_there = log(a, "drain-maintenance")
    assert "old" not in said_there and "drain --deadline 15s --parallel 4 --park" in said_there
    assert (a.state / "log/cron-drain-maintenance.log.1").read_text().startswith("old")
    assert "whole seconds" in said(cron(a, "spot-reclaim", "soon"), 2)


def test_a_full_disk_keeps_no_host_from_being_emptied(tmp_path: Path) -> None:
    state, command, ran = tmp_path / "s", tmp_path / "cm", tmp_path / "ran"
    command.write_text(f'#!/bin/sh\necho "$@" > {ran}\necho all gone\n')
    command.chmod(0o755)
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "test-cron", str(state)], check=True)
    try:
        with pytest.raises(OSError, match="No space"):
            (state / "fill").write_bytes(bytes(1 << 20))
        environ = {"CMDOP_MIGRATE_COMMAND": str(command), "CMDOP_MIGRATE_STATE_DIR": str(state)}
        for _ in range(2):
            done = subprocess.run(
                [SCRIPTS / "spot-reclaim", "120"], env=environ, capture_output=True, text=True, timeout=60, check=False
            )
            assert (done.returncode, done.stdout) == (0, "drain-maintenance: ok: all gone\n"), done
            assert ran.read_text() == "drain --deadline 96s --parallel 4\n"
            ran.unlink()
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)


def install(script: str, dest: Path, *words: str, status: int = 0, **more: str) -> str:
    environ = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "DESTDIR": str(dest), **more}
    done = subprocess.run(
        [SCRIPTS / script, *words], env=environ, capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def files(dest: Path) -> set[str]:
    return {str(one.relative_to(dest)) for one in dest.rglob("*") if not one.is_dir() or one.is_symlink()}


def test_installed_and_removed(tmp_path: Path) -> None:
    dest, command = tmp_path / "dest", tmp_path / "cm"
    command.write_text("#!/bin/sh\necho {}\n")
    command.chmod(0o755)
    how = ("--prefix", "/opt/cm", "--command", str(command))
    assert "no command" in install("install", dest, "--command", "/nowhere", status=2)
    assert "unknown" in install("install", dest, "--frobnicate", status=2)
    assert "absolute" in install("install", dest, "--command", "scripts/install", status=2)
    for odd in ("/opt/my tools", "/opt/50%", "/opt/a&b", "/opt/a|b"):
        assert "units and crontabs" in install("install", dest, "--prefix", odd, *how[2:], status=2)
    assert not dest.exists()
    install("install", dest, *how, "--with-cron")
    found = files(dest)
    assert {"opt/cm/bin/cmdop-migrate", "opt/cm/lib/cmdop-migrate/lib/cron.sh", "etc/cron.d/cmdop-migrate"} <= found
    assert os.readlink(dest / "opt/cm/bin/cmdop-migrate") == str(command)
    for unit in (dest / "etc/systemd/system").iterdir():
        parsed = configparser.ConfigParser(strict=False, interpolation=None)
        parsed.optionxform = str  # type: ignore[assignment,method-assign]
        parsed.read(unit)
        if unit.suffix == ".service":
            program = parsed["Service"]["ExecStart"].split()[0]
            assert program == "/bin/true" or os.access(f"{dest}{program}", os.X_OK), unit
        assert "@" not in unit.read_text() and parsed["Unit"]["Description"]
    for line in (dest / "etc/cron.d/cmdop-migrate").read_text().splitlines():
        if line.startswith(("#", "SHELL", "MAILTO")) or not line:
            continue
        user, program = line.split()[5:7]
        assert user == "root" and os.access(f"{dest}{program}", os.X_OK), line
    assert install("install", dest, *how, "--with-cron") == ""  # nothing changed
    (dest / "etc/default/cmdop-migrate").write_text("DRAIN_OPTIONS=--park\n")
    assert "removed: /etc/cron.d/cmdop-migrate" in install("install", dest, *how, "--no-systemd")
    assert not list((dest / "etc/systemd").rglob("*.service"))
    state = dest / "var/lib/cmdop-migrate"
    state.mkdir(parents=True)
    (state / "keys").write_text("secret")
    install("uninstall", dest, "--prefix", "/opt/cm")
    assert files(dest) == {"etc/default/cmdop-migrate", "var/lib/cmdop-migrate/keys"}
    (tmp_path / "another").write_text('state_dir = "/srv/cm"\n')  # is another host's state
    elsewhere = dest / "srv/cm"
    elsewhere.mkdir(parents=True)
    said = install("uninstall", dest, "--prefix", "/opt/cm", CMDOP_MIGRATE_CONFIG=str(tmp_path / "another"))
    assert "kept: /srv/cm" in said
    elsewhere.rmdir()
    assert "nothing installed" in install("uninstall", dest, "--prefix", "/opt/cm")
    install("uninstall", dest, "--prefix", "/opt/cm", "--purge")
    assert files(dest) == set()


def test_uninstall_refuses_while_sessions_run_or_cannot_be_listed(tmp_path: Path) -> None:
    prefix, state = tmp_path / "prefix", tmp_path / "state"
    command, listed = prefix / "bin/cmdop-migrate", prefix / "lib/cmdop-migrate/installed"
    for one in (command, listed, state / "keys"):
        one.parent.mkdir(parents=True, exist_ok=True)
        one.touch()
    listed.write_text(f"{command}\n")
    command.chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "CMDOP_MIGRATE_STATE_DIR": str(state)}
    words = [SCRIPTS / "uninstall", "--prefix", str(prefix)]
    running = '{"sessions": [{"session": "a1", "name": "w", "host": "h", "state": "running"}]}'
    for answer, status, said in ((running, 0, "1 sessions run here"), ('{"error": {}}', 2, "cannot tell")):
        command.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, said in done.stderr) == (4, True), done
        assert command.exists() and listed.exists()
    command.write_text("#!/bin/sh\necho '{\"sessions\": []}'\n")
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert not command.exists() and (state / "keys").exists()


def test_installed_for_real(tmp_path: Path) -> None:
    """On a copy-on-write view of this machine's own root: /usr/local, /etc, and what cron would run from there."""
    command = Path(sys.executable).with_name("cmdop-migrate")
    view, store = tmp_path / "view", tmp_path / "store"
    view.mkdir()
    store.mkdir()
    steps = f"""
        set -eu
        mount -t tmpfs none {store}
        mkdir {store}/upper {store}/work
        mount -t overlay none -o lowerdir=/,upperdir={store}/upper,workdir={store}/work {view}
        for each in proc sys dev; do mount --rbind /$each {view}/$each; done
        inside() {{ chroot {view} env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }}
        inside {PROJECT}/scripts/install --with-cron --no-systemd --command {command}
        echo "version: $(inside /usr/local/bin/cmdop-migrate --version)"
        line=$(sed -n 's/.* root \\(.*reap-idle.*\\)/\\1/p' {view}/etc/cron.d/cmdop-migrate)
        inside /bin/sh -c "$line" || echo "cron: exit $?"
        echo "log: $(tail -n 1 {view}/var/lib/cmdop-migrate/log/cron-reap-idle.log)"
        inside {PROJECT}/scripts/uninstall --purge
        echo "left: $(cd {store}/upper && find . -type f | grep -v -e '^./root/' -e __pycache__ | sort | tr '\\n' ' ')"
    """
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", steps],
        text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert f"version: cmdop-migrate, version {cmdop_migrate.__version__}" in said, said
    assert "cron: exit" not in said and "reap" in said.partition("log: ")[2], said
    assert "left: \n" in said, said
