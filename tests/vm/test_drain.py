"""Maintenance as it is done: cron empties host-a onto host-b, host-a is rebooted, and gets its sessions back."""

from __future__ import annotations

import pytest

from tests.support.host import until
from tests.vm.machines import STATE_DIR, Machines

pytestmark = pytest.mark.timeout(1800)
LOG = f"{STATE_DIR}/log/cron-drain-maintenance.log"


def test_cron_drains_reboot_undrain_brings_back(vms: Machines) -> None:
    a, b = vms.hosts
    sessions = [a.counter(name) for name in ("one", "two")]
    before = vms.boot_id(a)
    a.shell(f"rm -f {LOG}")
    a.write(
        "/etc/cron.d/vm-drain",
        "* * * * * root /usr/local/lib/cmdop-migrate/drain-maintenance --to host-b --deadline 12m\n",
    )
    until(lambda: a.shell(f"cat {LOG} 2> /dev/null || true"), 150, "cron has begun")
    a.shell("rm /etc/cron.d/vm-drain")
    until(lambda: "(exit " in a.shell(f"cat {LOG}"), 780, "the drain ends")
    log = a.shell(f"cat {LOG}")
    assert "(exit 0)" in log, log
    print("\n  " + "\n  ".join(line for line in log.splitlines() if "moved" in line))
    for session in sessions:
        b.counts_on(session)
    a.fails("run", "-d", "--", "true", status=4, code="blocked")
    vms.reboot(a)
    assert vms.boot_id(a) != before
    a.fails("run", "-d", "--", "true", status=4, code="blocked")
    there = {session: b.counts_on(session) for session in sessions}
    # Back to an older kernel: on the operator's word (docs/operations/plan.md), as UNDRAIN_OPTIONS may have it.
    a.shell("/usr/local/lib/cmdop-migrate/undrain-maintenance --bring-back --accept kernel", timeout=600)
    for session in sessions:
        assert a.counts_on(session) > there[session]
        assert not b.session_pids(session)
    assert a.start("sleep", "1000")["session"], "sessions begin here again"
