"""Check fetching a real CRIU: what it leaves, what it does not change, and what a kill does to it."""

from __future__ import annotations

import fcntl
import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.criu.install import apt, fetch, find
from cmdop_migrate.errors import Unreachable
from cmdop_migrate.host import doctor
from cmdop_migrate.preflight.rules import doctor as rules_doctor
from tests.support.patience import bound

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root"),
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="a private CRIU comes through apt"),
]

FETCH = (
    "import sys, pathlib; from cmdop_migrate.criu.install import fetch; fetch.fetch(pathlib.Path(sys.argv[1]), print)"
)


def system_state() -> dict[str, tuple[int, int]]:
    """Return all files of apt and dpkg, by size and time of change."""
    tops = ("/etc/apt", "/var/lib/apt", "/var/lib/dpkg", "/var/cache/apt", "/var/log/apt")
    files = [path for top in tops for path in Path(top).rglob("*")]
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files}


@dataclass(frozen=True)
class Fetched:
    prefix: Path
    criu: find.Criu
    said: tuple[str, ...]
    changed: dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Fetched:
    prefix = tmp_path_factory.mktemp("provide") / "criu"
    said: list[str] = []
    before = system_state()
    try:
        criu = fetch.fetch(prefix, said.append)
    except Unreachable as error:
        pytest.skip(f"no archive to fetch from: {error.message}")
    after = system_state()
    changed = {path: state for path, state in after.items() if before.get(path) != state}
    changed |= {path: state for path, state in before.items() if path not in after}
    return Fetched(prefix, criu, tuple(said), changed)


def test_fetched_criu_passes_criu_check(fetched: Fetched) -> None:
    done = subprocess.run([*fetched.criu.argv, "check"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert fetched.criu.source == "private"
    assert find.too_old(fetched.criu.version, os.uname().release) is None
    assert any("unpacking" in line for line in fetched.said)


def test_fetch_does_not_change_packages_or_apt(fetched: Fetched) -> None:
    assert fetched.changed == {}


def test_fetch_leaves_only_the_unpacked_tree(fetched: Fetched) -> None:
    names = {path.name for path in fetched.prefix.iterdir()}
    assert {name for name in names if not name.startswith("criu-")} == {"lock", "verdicts.json"}


def test_a_second_fetch_does_nothing(fetched: Fetched) -> None:
    trees = {path: path.stat().st_ctime_ns for path in fetched.prefix.glob("criu-*")}
    said: list[str] = []
    assert fetch.fetch(fetched.prefix, said.append) == fetched.criu
    assert said == []
    assert {path: path.stat().st_ctime_ns for path in fetched.prefix.glob("criu-*")} == trees


def test_find_uses_the_probe_cache(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find.find(None, fetched.prefix)
    assert found is not None

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert find.find(None, fetched.prefix) == found


def test_doctor_accepts_the_fetched_criu(fetched: Fetched) -> None:
    settings = config.load(flags={"state_dir": str(fetched.prefix.parent)}, environ={})
    found = {check.name: check for check in doctor.diagnose(settings)}
    assert found["criu"].level == "ok"
    assert found["cgroup2"].level == "ok" or found["cgroup2"].fix
    assert rules_doctor.usable(list(found.values())) is not any(check.fatal for check in found.values())


@pytest.mark.parametrize("moment", ["state/lists/*InRelease", "tree/usr"])
def test_killed_fetch_leaves_no_criu_and_the_next_one_cleans_up(tmp_path: Path, moment: str, fetched: Fetched) -> None:
    prefix = tmp_path / "criu"
    child = subprocess.Popen(
        [sys.executable, "-c", FETCH, str(prefix)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + bound(120)
        while not list(prefix.glob(f"work-*/*/{moment}")):
            assert child.poll() is None, "the fetch ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert list(prefix.glob("work-*"))
    assert not list(prefix.glob("criu-*"))
    left = find.find(None, prefix)
    assert left is None or left.source == "system"
    # With a whole tree put there, the next fetch has nothing to do but sweep.
    (tree,) = fetched.prefix.glob("criu-*")
    shutil.copytree(tree, prefix / tree.name, symlinks=True)
    assert fetch.fetch(prefix, lambda _: None).version == fetched.criu.version
    assert not list(prefix.glob("work-*"))


def test_two_simultaneous_fetches_install_one_criu(tmp_path: Path, fetched: Fetched) -> None:
    (tree,) = fetched.prefix.glob("criu-*")
    prefix = tmp_path / "criu"
    prefix.mkdir()
    said: list[str] = []
    results: list[find.Criu] = []
    with open(prefix / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: results.append(fetch.fetch(prefix, said.append)), daemon=True)
        second.start()
        second.join(0.3)
        assert second.is_alive() and said == ["waiting for another fetch of CRIU to end"]
        shutil.copytree(tree, prefix / tree.name, symlinks=True)
    second.join(60)
    assert [each.version for each in results] == [fetched.criu.version]
    assert len(said) == 1


@contextmanager
def mirror(answers: dict[str, bytes], asked: list[str]) -> Iterator[str]:
    """Run an HTTP proxy on loopback in place of every mirror."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = next((body for name, body in answers.items() if self.path.endswith(name)), None)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", ["InRelease", "Release"])
def test_an_unsigned_archive_is_refused_and_the_proxy_of_apt_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked: list[str] = []
    body = b"Origin: Debian\nSuite: sid\nCodename: sid\nComponents: main\nDate: Sat, 01 Jan 2022 00:00:00 UTC\n"
    with mirror({f"/dists/sid/{name}": body}, asked) as proxy:
        lax = tmp_path / "lax.conf"
        lax.write_text(
            f'Acquire::http::Proxy "{proxy}";\nAcquire::AllowInsecureRepositories "true";\n'
            'APT::Get::AllowUnauthenticated "true";\n'
        )
        monkeypatch.setenv("APT_CONFIG", str(lax))
        archive = apt.Archive("debian", "http://archive.invalid/debian", "bookworm", ("main",), None)
        work = tmp_path / "work"
        work.mkdir()
        with pytest.raises(Unreachable, match=r"sign|NOSPLIT|NODATA"):
            apt.PrivateApt(archive, "sid", work).update()
    assert "http://archive.invalid/debian/dists/sid/InRelease" in asked
