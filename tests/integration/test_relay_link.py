"""The link dies, hangs, or loses its agent: clients resume, and leases are renewed all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmdop_migrate import config
from cmdop_migrate.gateway import client, host_link, link_main
from cmdop_migrate.holder import cgroup
from cmdop_migrate.host import resources
from cmdop_migrate.host.host import Host as LocalHost
from tests.support import fenced_sessions, typing_client
from tests.support.host import Host, until
from tests.support.relay_server import PLACE
from tests.support.relayed_hosts import Linked, linked


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as made:
        yield made


def link_of(host: Host) -> int | None:
    for pid in cgroup.pids(host.group("agent")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[-2:] == [b"link", b""]:
            return pid
    return None


def test_a_killed_link_is_restarted_and_clients_resume(world: Linked) -> None:
    file, a = world.credential(), world.a
    session = typing_client.start(a, "w")
    world.routed(session, file)
    with typing_client.typing(world.line(file, session)) as typist:
        typist.counts_on()
        first = link_of(a)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        typist.counts_on()
        second = until(lambda: link_of(a), 5)
        assert second != first
        a.kill_agent()
        until(lambda: link_of(a) is None, 5, "it goes with its agent")
        a.ok("ls")  # any command starts an agent, and the agent a link
        typist.counts_on()
        typist.finish()
        assert not [one for one in typist.events if one["event"] in ("lost", "undone", "refused")]
    assert fenced_sessions.lease(a, session)["token"] == 1


def test_a_hanging_link_does_not_delay_lease_renewal(world: Linked) -> None:
    file, a = world.credential(), world.a
    session = fenced_sessions.counter(a, "hang")
    world.routed(session, file)
    link = until(lambda: link_of(a), 5)
    assert link is not None
    os.kill(link, signal.SIGSTOP)
    try:
        before, until_ = fenced_sessions.lease(a, session)["renewals"], time.monotonic() + 4.0
        while time.monotonic() < until_:  # more than a TTL
            assert not cgroup.is_frozen(a.group(session))
            time.sleep(0.1)
        assert fenced_sessions.lease(a, session)["renewals"] > before
        fenced_sessions.counts_on(a, session)
    finally:
        os.kill(link, signal.SIGCONT)
    assert not [one for one in a.events(session) if one["event"] == "fenced"]
    a.kill_agent(signal.SIGTERM)
    until(lambda: link_of(a) is None, 5, "it goes with its agent")


def test_several_relays_behind_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host is at all of them, so a client may come to any; one that dies disturbs no client of another."""
    places = [PLACE, "127.0.0.2"]

    async def resolve(_: str) -> list[str]:
        return places  # what a name server would say

    monkeypatch.setattr(host_link, "addresses", resolve)
    with linked(tmp_path) as world, contextlib.ExitStack() as stack:
        first, port = world.relay, world.relay.port
        second = subprocess.Popen(
            first.at.argv("relay", "serve", "--json", "--listen", f"{places[1]}:{port}"),
            env=first.at.env(), stdout=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        stack.callback(second.wait, 10)
        stack.callback(second.kill)
        assert second.stdout is not None and b'"port"' in second.stdout.readline()
        mine = Path(world.a.extra.pop("CMDOP_MIGRATE_RELAY_CREDENTIAL"))
        del world.a.extra["CMDOP_MIGRATE_RELAY"]  # its agent starts no link: we are it
        session = world.a.start("bash", "--norc", name="both")["session"]
        stack.enter_context(linking(world, f"wss://relays.test:{port}", mine))
        files = [world.credential(url=f"wss://{place}:{port}") for place in places]
        for file in files:
            world.routed(session, file)
        with world.attach(files[1], "both") as pty:
            pty.expect(b"# ")
            world.client_json(files[0], "send", "both", "echo from-$((1+1))", "--enter")
            pty.expect(b"from-2")
            first.stop(signal.SIGKILL)
            pty.type("echo on-$((1+2))\r")
            pty.expect(b"on-3")
            first.start()
            world.routed(session, files[0])
            pty.type(b"\x1cd")
            assert pty.wait() == 0


@contextlib.contextmanager
def linking(world: Linked, url: str, credential: Path) -> Iterator[None]:
    """The link of host A, in a thread of ours."""
    records = LocalHost(config.load(environ=world.a.env()))
    signer = resources.open_keys(records.config).relay_signer
    loop = asyncio.new_event_loop()

    async def run() -> None:
        listed = link_main.CredentialCheck(records.config).invalid_because
        await host_link.Link(records, url, lambda: client.load(credential), signer.sign, listed).run()

    task = loop.create_task(run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        loop.close()


def relay_check(host: Host) -> dict[str, str] | None:
    """What `doctor` says of it."""
    found = json.loads(host.cm("--json", "doctor").stdout)["checks"]
    return next((one for one in found if one["name"] == "relay"), None)


def test_doctor_and_a_relay_that_was_set_after_the_agent_was_started(world: Linked) -> None:
    a = world.a
    a.kill_agent(signal.SIGTERM)
    url = a.extra.pop("CMDOP_MIGRATE_RELAY")
    session = fenced_sessions.counter(a, "late")
    try:
        assert relay_check(a) is None
    finally:
        a.extra["CMDOP_MIGRATE_RELAY"] = url
    agent = a.agent_pid()
    late = relay_check(a)
    assert late is not None and (late["level"], late["fatal"]) == ("degraded", False)
    assert "before `relay` was set" in late["message"] and f"kill {agent};" in late["fix"]
    again = ("relay", "token", "create", "--host", a.name, "--pin", world.relay.facts["pin"])
    made = a.cm(*again, "--out", str(world.dir / "again.credential"))
    assert made.returncode == 0 and f"kill {agent};" in made.stderr.decode()
    a.kill_agent(signal.SIGTERM)  # as it was told
    a.ok("ls")
    until(lambda: link_of(a), 10, "the link")
    good = relay_check(a)
    assert good is not None and good["level"] == "ok" and str(link_of(a)) in good["message"]
    made = a.cm(*again, "--out", str(world.dir / "more.credential"))
    assert made.returncode == 0 and "kill" not in made.stderr.decode()
    fenced_sessions.counts_on(a, session)
    a.ok("kill", session)


def test_doctor_and_a_relay_that_does_not_answer_or_does_not_admit(world: Linked) -> None:
    a, file = world.a, "CMDOP_MIGRATE_RELAY_CREDENTIAL"
    own = a.extra[file]
    ident = client.load(Path(own)).claims.id
    try:
        for other, word in (
            (world.dir / "none", "No such file"),
            (world.b.extra[file], "not the credential of host-a"),
        ):
            a.extra[file] = str(other)
            bad = relay_check(a)
            assert bad is not None and bad["level"] == "missing" and word in bad["message"] and bad["fix"]
        spare = world.dir / "spare.credential"
        a.ok("relay", "token", "create", "--host", a.name, "--pin", world.relay.facts["pin"], "--out", str(spare))
        assert client.load(spare).claims.id != ident
        a.ok("relay", "token", "revoke", client.load(spare).claims.id)
        a.extra[file] = str(spare)
        bad = relay_check(a)
        assert bad is not None and bad["level"] == "missing" and bad["fix"], bad
    finally:
        a.extra[file] = own
    world.relay.stop()
    try:
        away = relay_check(a)
        assert away is not None and away["level"] == "degraded" and "cannot be reached" in away["message"]
    finally:
        world.relay.start()
    good = relay_check(a)
    assert good is not None and good["level"] == "ok"


def test_doctor_and_a_link_that_is_not_connected(world: Linked) -> None:
    """Its process is there, and its relay admits this host: that it is connected is another matter."""
    a, key = world.a, "CMDOP_MIGRATE_RELAY_CREDENTIAL"
    a.kill_agent(signal.SIGTERM)
    own, given = Path(a.extra[key]), world.dir / "given.credential"
    given.write_text(own.read_text())
    given.chmod(0o600)
    bad = world.dir / "bad.credential"
    a.ok("relay", "token", "create", "--host", a.name, "--pin", world.relay.facts["pin"], "--out", str(bad))
    a.ok("relay", "token", "revoke", client.load(bad).claims.id)
    a.extra[key] = str(given)
    session = fenced_sessions.counter(a, "unlinked")
    try:
        a.extra[key] = str(own)
        good = relay_check(a)
        link = link_of(a)
        assert good is not None and good["level"] == "ok" and str(link) in good["message"], good
        given.write_text(bad.read_text())  # for the link alone
        world.relay.stop()
        world.relay.start()
        out = relay_check(a)
        assert link_of(a) == link
        assert out is not None and (out["level"], out["fatal"]) == ("degraded", False), out
        assert f"process {link}) is not connected" in out["message"] and "link.log" in out["fix"]
        given.write_text(own.read_text())
        again = relay_check(a)
        assert again is not None and again["level"] == "ok", again
        assert link is not None
        os.kill(link, signal.SIGSTOP)
        try:
            stopped = relay_check(a)
        finally:
            os.kill(link, signal.SIGCONT)
        assert stopped is not None and stopped["level"] == "degraded" and stopped["fix"] == f"kill -CONT {link}"
    finally:
        a.extra[key] = str(own)
        a.ok("kill", session)
        a.kill_agent(signal.SIGTERM)
