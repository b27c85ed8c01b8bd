"""A target killed, or left alone, while it brings packs of an upload that is still under way: by S3, for only there it does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.crash.test_migrate_killed import kill, restorers, settled
from tests.crash.witness import LARGE, Witness
from tests.support.host import CM, until
from tests.support.host_pair import World, two
from tests.support.servers import seaweed

SLOW = "6MiB"  # a second: the upload lasts for several


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("gather")
    with seaweed(folder) as s3:
        places = {"CMDOP_MIGRATE_STORE": s3.url(s3.new_bucket())} | s3.environ()
        with two(folder, ttl="4s", environ=places) as made:
            yield made


@pytest.mark.parametrize("victim", ["the restore on host-b", "the command"])
def test_target_killed_while_it_prefetches(world: World, victim: str) -> None:
    """The session was never handed over: it keeps running on the source, and no prefetched pack is left."""
    a, b = world.a, world.b
    one = Witness.start(a, "w", size=LARGE)
    packs = b.state / "ahead" / one.session / "packs"
    cli = subprocess.Popen(
        [*CM, "--json", "migrate", one.session, "--to", "host-b"],
        env=a.env(CMDOP_MIGRATE_BANDWIDTH=SLOW),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    )
    try:
        until(lambda: packs.is_dir() and os.listdir(packs), 60, "the target has a pack")
        assert cli.poll() is None, "its upload is over: nothing is shown"
        kill(*([cli.pid] if victim == "the command" else [found.pid for found in restorers(one.session)]))
        out, err = cli.communicate(timeout=120)
    finally:
        cli.kill()
        cli.communicate()
    assert b"Traceback" not in out + err, (out + err).decode()
    assert settled(a)[one.session] == "on_source"
    assert world.where(one.session) == ["host-a"]
    one.assert_counts()
    until(lambda: not restorers(one.session), 30, "no process waits for it there any more")
    b.sessions()  # clears up what killed commands have left
    assert not packs.parent.exists()
    assert a.cm_json("migrate", one.session, "--to", "host-b", timeout=120)["token"] == 2
    Witness(b, "w", one.session).assert_counts()
    b.ok("kill", one.session, "--signal", "KILL")
