"""scripts/test-vm: the end-to-end suite on real machines: two hosts with different kernels, and a store.

  scripts/test-vm                     the smoke part: one session from kernel 6.1 to 6.12, its client attached
  VM=full scripts/test-vm             all of tests/vm
  VM=none scripts/test-vm             nothing, and says so
  VM_SECONDS=1800 scripts/test-vm     within so many, or not at all
  scripts/test-vm --keep              and leave the machines up, to look at them
  scripts/test-vm up                  only the machines; they stay up
  scripts/test-vm ssh host-a          into one that is up
  scripts/test-vm virsh list          libvirt of these machines
  scripts/test-vm pytest WORDS…       tests on machines that are up
  scripts/test-vm down                end them; boxes and snapshots stay for the next time
  scripts/test-vm clean               … and remove everything of them

What is made is kept below .cache/vm by the content of what it is made from: boxes, booted machines, provisioned ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys

from scripts.vmlib import house, machines, prepare
from scripts.vmlib.model import CACHE, LOGS, PROJECT, RUN, SSH_CONFIG, CannotHere, VmTrouble, fleet
from scripts.vmlib.stages import Stages

PARTS = {"smoke": "tests/vm/test_smoke.py", "full": "tests/vm"}
LEAST = 900  # seconds
FAILED = 1  # pytest's word for it
VERBS = ("run", "gather", "up", "down", "clean", "ssh", "virsh", "pytest")


def main(argv: list[str]) -> int:
    asked = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if asked.verb == "run":
            return _run(asked.keep, asked.words)
        if asked.verb == "up":
            return _up()
        if asked.verb == "gather":  # for machines from public boxes: vagrant/gather
            prepare.gather(fleet())
            return 0
        if asked.verb == "ssh":
            words = ["ssh", "-t", "-F", str(SSH_CONFIG), "-o", "BatchMode=no", *asked.words]
            return subprocess.run(house.command(words), check=False).returncode
        if asked.verb == "virsh":
            return subprocess.run(
                house.command(["virsh", "-c", "qemu:///system", *asked.words]), check=False
            ).returncode
        if asked.verb == "pytest":
            return _pytest(asked.words or [PARTS["full"]])
        house.down()
        if asked.verb == "clean":
            shutil.rmtree(CACHE, ignore_errors=True)
    except CannotHere as reason:
        print(f"test-vm: SKIPPED: {reason}")
    except VmTrouble as trouble:
        print(f"test-vm: {trouble}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="scripts/test-vm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--keep", action="store_true", help="leave the machines up")
    top.add_argument("verb", nargs="?", default="run", choices=VERBS, help=argparse.SUPPRESS)
    top.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return top


def _run(keep: bool, words: list[str]) -> int:
    part = os.environ.get("VM") or "smoke"
    if part == "none":
        print("test-vm: SKIPPED: VM=none")
        return 0
    if part not in PARTS:
        raise VmTrouble(f"VM={part}? It is smoke, full or none.")
    _limit(int(os.environ.get("VM_SECONDS") or 0))
    stages = Stages()
    everything = fleet()
    with prepare.alone():  # whose machines they are, and who may end them
        try:
            try:
                prepare.prepare(everything, stages)
            except VmTrouble as trouble:
                print(f"test-vm: once more, from the start: {trouble}")
                house.down()
                prepare.prepare(everything, stages)
            with stages.stage(f"tests ({part})"):
                status = _pytest([PARTS[part], *words])
            if status != 0:
                with stages.stage("logs of the machines", str(LOGS)):
                    machines.gather_logs(everything)
            if status == FAILED:  # as scripts/test does it: who passes by itself is named, and to be looked at
                with stages.stage("those that failed once more"):
                    status = _pytest(["--last-failed", PARTS[part], *words])
                print(f"test-vm: {'failed again' if status else 'UNSTABLE: failed first, passed by themselves'}")
        finally:
            if not keep:
                house.down()
            print(stages.report(part))
    return status


def _limit(seconds: int) -> None:
    """Limit the run to `seconds` (scripts/test): report too little time, and end what takes longer."""
    if not seconds:
        return
    if seconds < LEAST:
        raise CannotHere(f"{seconds} s are left, and with a box to build it takes up to {LEAST} s")

    def over(*_: object) -> None:
        raise VmTrouble(f"not done within {seconds} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)


def _up() -> int:
    stages = Stages()
    with prepare.alone():
        prepare.prepare(fleet(), stages)
    print(stages.report("up"))
    print("They stay up: scripts/test-vm ssh host-a; scripts/test-vm pytest tests/vm -k NAME; scripts/test-vm down")
    return 0


def _pytest(words: list[str]) -> int:
    env = {**os.environ, "CMDOP_VM_RUN": str(RUN)}
    argv = house.command(
        [sys.executable, "-m", "pytest", "-o", f"cache_dir={RUN}/pytest", "-s", "--durations=0", *words], PROJECT
    )
    return subprocess.run(argv, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
