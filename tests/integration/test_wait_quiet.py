"""`checkpoint --wait-quiet`: an obstacle that passes by itself is waited for, another is refused immediately."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from cmdop_migrate import config
from tests.support.host import Host, a_host, until
from tests.support.planting import Planted
from tests.support.program_session import Program

WITHIN = 60.0
SANDBOX = "unshare --pid --fork cat; echo over"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with a_host(tmp_path_factory.mktemp("quiet")) as one:
        yield one


def waiting(host: Host, session: str, *options: str) -> subprocess.Popen[bytes]:
    """A checkpoint that waits for something to pass."""
    log = config.load(environ=host.env()).log_file
    before = log.read_text().count("waiting:") if log.exists() else 0
    command = subprocess.Popen(
        host.argv("checkpoint", session, "--wait-quiet", "50s", *options),
        env=host.env(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    until(lambda: log.read_text().count("waiting:") > before, WITHIN, "it waits")
    return command


@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["park", "leave-running"])
def test_checkpoint_waits_until_a_sandboxed_command_has_ended(here: Host, options: tuple[str, ...]) -> None:
    with Program(here, "bash", "-c", f"{SANDBOX}; exec cat") as program:
        until(lambda: len(here.pids(program.session)) == 4, WITHIN, "init, bash, unshare and cat run")
        done = here.cm("checkpoint", program.name, *options)
        assert done.returncode == 4 and b"pid namespace" in done.stderr, done.stderr
        command = waiting(here, program.name, *options)
        program.type("\x04")
        program.see("over")
        _, said = command.communicate(timeout=WITHIN)
        assert command.returncode == 0, said
        if not options:
            program.back()
        program.type("still here\n")
        program.see("still here")


def test_checkpoint_waits_until_a_connection_is_accepted(here: Host) -> None:
    with Planted(here, "unix_unaccepted_with_data") as planted:
        command = waiting(here, planted.name)
        assert planted.still_works() == "ok"
        _, said = command.communicate(timeout=WITHIN)
        assert command.returncode == 0, said
        planted.back()


def test_checkpoint_tells_how_long_it_waited_in_vain(here: Host) -> None:
    with Planted(here, "pid_namespace") as planted:
        done = here.cm("checkpoint", planted.name, "--wait-quiet", "1s")
        assert done.returncode == 4, done.stderr
        assert b"pid namespace" in done.stderr and b"waited 1" in done.stderr, done.stderr
        assert planted.unfrozen is not None and not planted.unfrozen.changed(), "it was frozen"
        assert planted.still_works() == "ok"


def test_checkpoint_does_not_wait_for_what_stays(here: Host) -> None:
    with Planted(here, "memfd_program") as planted:
        began = time.monotonic()
        done = here.cm("checkpoint", planted.name, "--wait-quiet", "10m", timeout=WITHIN)
        assert done.returncode == 4 and b"memfd" in done.stderr and b"waited" not in done.stderr, done.stderr
        assert time.monotonic() < began + WITHIN
