"""The smoke part: one session crosses from kernel 6.1 to 6.12 while a user types into it from a third machine."""

from __future__ import annotations

import pytest
import testinfra

from scripts.vmlib.model import SSH_CONFIG
from tests.support import typing_client
from tests.support.host import until
from tests.vm.machines import Machines

pytestmark = pytest.mark.timeout(1200)


def test_machines_are_machines(vms: Machines) -> None:
    """Kernels, boots and clocks of their own, and the project installed from its wheel: no network leads out."""
    seen = {}
    for host in vms.hosts:
        over = testinfra.get_host(f"ssh://{host.name}", ssh_config=str(SSH_CONFIG))
        assert over.check_output("hostname") == host.name
        assert over.service("cmdop-migrate-agent").is_running
        assert over.file("/etc/cmdop-migrate/config.toml").contains(f'host = "{host.name}"')
        assert over.check_output("ip route show default") == ""
        seen[host.name] = (over.check_output("uname -r"), over.check_output("cat /proc/sys/kernel/random/boot_id"))
        doctor = host.cm_json("doctor")
        assert doctor["ok"], doctor
        tracking = next(one for one in doctor["checks"] if one["name"] == "dirty_tracking")
        print(
            f"\n  {host.name}: kernel {seen[host.name][0]}, python {over.check_output('python3 --version')}, {tracking}"
        )
    assert seen["host-a"][0].startswith("6.1.") and seen["host-b"][0].startswith("6.12.")
    assert seen["host-a"][1] != seen["host-b"][1]


def test_checkpoint_restore_there_and_the_client_stays(vms: Machines) -> None:
    """`checkpoint` on host-a, `restore --to host-b`: every byte of output comes once and in order, every line typed is applied
    once and in order, by a client that knows the relay and nothing else."""
    a, b = vms.hosts
    program = typing_client.PROGRAM.replace("0.02", "0.2")
    session = a.start("python3", "-c", program, name="w")["session"]
    credential = vms.credential()
    with typing_client.typing(vms.line(credential, session), every=0.5) as client:
        client.counts_on(3, within=120)
        saved = a.cm_json("checkpoint", "w")
        assert a.session_pids(session) == [], "parked: no process is left"
        restored = a.cm_json("restore", "w", "--to", "host-b")
        assert (restored["session"], restored["host"], restored["token"]) == (session, "host-b", saved["token"] + 1)
        client.counts_on(10, within=180)
        client.finish(within=180)
        told = {str(one.get("op") or one.get("event")) for one in client.events}
    print(f"\n  frozen {saved['frozen_s']:.2f} s; checkpoint {saved['phases']}; restore {restored['phases']}")
    print(
        f"  the client typed {client.typed} lines, saw {len(client.counted)} numbers, the longest silence {max(client.gaps):.0f} s, told {told}"
    )
    assert b.runs(session) and not a.runs(session)
    assert a.cm_json("lease", "show", session)["holder"] == "host-b"
    until(lambda: b.session_pids(session), 30, "its processes are there")
