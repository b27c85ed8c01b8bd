"""Run one spec: build it, plan, park, restore, compare, use. Every way in which that can go wrong is a Defect."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

from tests.random_programs.generator import Spec
from tests.random_programs.subject import Refused, Subject
from tests.support import session_diff
from tests.support.host import Host
from tests.support.patience import bound

# Documented in docs/reference/limits.md: an accepted unix connection loses its name.
ALLOWED = (r"unix type 0001 state 03",)
TIMEOUT = 180.0
SETTLE = 20.0  # a half-closed TCP connection sends its end again, after a time-out of TCP's
# What a restore may change without harm: how CRIU named a deleted file, the kernel's number of a namespace, flags that
# mattered to open() alone (O_DIRECTORY, O_TMPFILE), the number under which a closed descriptor was put into an epoll set.
SAME = (
    (re.compile(r"\.cr_link \(deleted\)"), " (deleted)"),
    (re.compile(r"^(mnt|net|uts|ipc):\[\d+\]"), r"\1"),
    (re.compile(r"watches \d+ "), "watches "),
)
OPEN_ONLY = 0o20200000
# A stopped process has a stop signal pending once CRIU has let go of it: SIGCONT discards that, too. SIGWINCH comes from
# the new terminal, which has been given its size.
MAY_PEND = sum(1 << number - 1 for number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGWINCH))


class Defect(AssertionError):
    """Report what a spec showed. `kind` is one of:

    lost      parked, and cannot be restored
    ended     a checkpoint that failed, or was refused, ended or changed the session
    plan      the plan's answer and what then happened do not agree
    changed   restored, and its state is another
    broken    restored, and what it holds does not work
    build     the worker could not build it: a defect of the generator, or of the sandbox
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class Clock:
    """Note how long each step of a run takes."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self._last = time.monotonic()

    def reach(self, step: str) -> None:
        """End the step of this name, which began where the one before it ended."""
        now = time.monotonic()
        self.steps[step] = self.steps.get(step, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{step} {seconds:.1f}" for step, seconds in self.steps.items())


def run(host: Host, spec: Spec, name: str = "rand") -> Clock:
    """Run a spec to its end; return how long its steps took. Raises Defect."""
    clock = Clock()
    with Subject(host, spec, name) as subject:
        try:
            subject.built()
            subject.take_positions()
            reports = subject.ask_all("report")
            orders = subject.stop()
        except AssertionError as error:
            raise Defect("build", str(error)) from error
        facts = subject.program.look()
        clock.reach("build")
        for _ in range(spec.rounds):
            _round(subject, facts, clock)
            if different := _differences(subject, facts):
                raise Defect("changed", different)
            clock.reach("compare")
        try:
            subject.resume(orders)
            _same_reports(reports, subject.ask_all("report"))
            subject.ask_all("use")
            subject.ask_all("check")
        except Refused as error:
            raise Defect("broken", str(error)) from error
        except AssertionError as error:
            raise error if isinstance(error, Defect) else Defect("broken", str(error)) from error
        clock.reach("use")
    return clock


def _command(subject: Subject, *args: str) -> tuple[int, dict[str, Any], str]:
    done = subject.host.cm("--json", *args, timeout=TIMEOUT)
    text = done.stdout.decode()
    return done.returncode, json.loads(text) if text.strip() else {}, done.stderr.decode()


def _round(subject: Subject, facts: session_diff.Facts, clock: Clock) -> None:
    """Plan and park; restore what was parked. What the plan refuses must run on, unchanged."""
    name, wanted = subject.program.name, subject.spec.blockers()
    status, plan, said = _command(subject, "plan", name)
    findings = [f"{one['check']}: {one['message']}" for one in plan.get("findings", ()) if one["level"] == "block"]
    if plan.get("ok") == bool(wanted):
        exit_status, answer, _ = _command(subject, "checkpoint", name)
        then = f"checkpoint then: exit {exit_status} {answer.get('error', '')}"
        raise Defect(
            "plan", f"ok={plan.get('ok')} {findings}, but the session holds {wanted or 'nothing exotic'}; {then}"
        )
    clock.reach("plan")
    frozen_before = _frozen_us(subject)
    status, answer, said = _command(subject, "checkpoint", name)
    if status != 0:
        _unharmed(subject, facts, f"checkpoint: exit {status} {answer.get('error')}")
        if not wanted:
            raise Defect("plan", f"the plan found nothing, checkpoint: exit {status} {answer['error']['message']}")
        if status != 4:
            raise Defect("plan", f"the plan is {findings}, checkpoint: exit {status} {answer['error']['message']}")
        if _frozen_us(subject) != frozen_before:
            raise Defect("plan", f"the checkpoint was refused only after the session had been frozen: {findings}")
        clock.reach("refused")
        return
    if wanted:
        raise Defect("plan", f"the plan is {findings}, but checkpoint succeeded")
    if answer["proved"] is not True:
        raise Defect("plan", f"parked without a proof: {answer['skipped']}")
    clock.reach("park")
    for attempt in range(2):
        status, restored, said = _command(subject, "restore", name)
        if status == 0:
            clock.reach("restore")
            return
        first = f"restore {attempt}: exit {status} {restored.get('error')}\n{said}"
    raise Defect("lost", first)


def _frozen_us(subject: Subject) -> int:
    """Return for how long the session's cgroup has been frozen since it was made; -1: the kernel does not count it."""
    try:
        text = Path(subject.host.group(subject.session), "cgroup.stat.local").read_text()
    except FileNotFoundError:
        return -1
    return int(dict(line.split() for line in text.splitlines())["frozen_usec"])


def _normal(facts: session_diff.Facts) -> session_diff.Facts:
    found = {}
    for key, value in facts.items():
        text = re.sub(r"flags ([0-7]+)", lambda flags: f"flags {int(flags[1], 8) & ~OPEN_ONLY:o}", value)
        for pattern, replacement in SAME:
            text = pattern.sub(replacement, text)
        if key.endswith(" ShdPnd"):
            text = f"{int(text, 16) & ~MAY_PEND:x}"
        found[key] = text
    return found


def _differences(subject: Subject, facts: session_diff.Facts) -> str:
    """Compare what can be seen from outside with `facts`, until it is the same or has had time to become so."""
    end = time.monotonic() + bound(SETTLE)
    while True:
        before, after = _normal(facts), _normal(subject.program.look())
        for key, value in before.items():  # docs/reference/limits.md: the same terminal, under its other name
            if value.startswith("/dev/tty ("):
                after[key] = re.sub(r"^/dev/pts/\d+ ", "/dev/tty ", after.get(key, ""))
        lost, appeared = session_diff.differences(before, after, ALLOWED)
        if not lost and not appeared:
            return ""
        if time.monotonic() > end:
            lines = [*(f"  lost      {one}" for one in lost), *(f"  appeared  {one}" for one in appeared)]
            # Of a process that is not there all facts are lost: its maps are many, and say nothing more.
            short = [
                f"{line:.300}" for line in lines if not re.search(r"pid \d+ (map|thread|limits|env|Cap|Sig)", line)
            ]
            return "\n".join(["", *(short or lines)[:40]])
        time.sleep(0.2)


def _unharmed(subject: Subject, facts: session_diff.Facts, after: str) -> None:
    if not subject.host.pids(subject.session):
        raise Defect("ended", f"no process of the session is left after {after}")
    if different := _differences(subject, facts):
        raise Defect("ended", f"after {after}: {different}")


def _same_reports(before: dict[int, Any], after: dict[int, Any]) -> None:
    wrong = []
    for process, report in before.items():
        for label, value in report.items():
            now = after[process].get(label)
            if now != value:
                wrong.append(f"process {process} {label}: {now!r:.300} instead of {value!r:.300}")
    if wrong:
        raise Defect("changed", "\n".join(wrong))
