"""Run one spec: build it, plan, park, restore, compare, use. Every way in which that can go wrong is a Defect."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from tests import compare
from tests.hosts import Host
from tests.random_programs.generator import Spec
from tests.random_programs.subject import Refused, Subject

# Documented in docs/limits.md: an accepted unix connection loses its name.
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


def run(host: Host, spec: Spec, name: str = "rand") -> dict[str, float]:
    """Run a spec to its end; return the phases of its last checkpoint. Raises Defect."""
    with Subject(host, spec, name) as subject:
        try:
            subject.built()
            subject.take_positions()
        except AssertionError as error:
            raise Defect("build", str(error)) from error
        reports = subject.ask_all("report")
        orders = subject.stop()
        facts = subject.program.look()
        phases = {}
        for _ in range(spec.rounds):
            phases = _round(subject, facts)
        _compare(subject, facts)
        try:
            subject.resume(orders)
            _same_reports(reports, subject.ask_all("report"))
            subject.ask_all("use")
            subject.ask_all("check")
        except Refused as error:
            raise Defect("broken", str(error)) from error
        except AssertionError as error:
            raise error if isinstance(error, Defect) else Defect("broken", str(error)) from error
        return phases


def _command(subject: Subject, *args: str) -> tuple[int, dict[str, Any], str]:
    done = subject.host.cm("--json", *args, timeout=TIMEOUT)
    text = done.stdout.decode()
    return done.returncode, json.loads(text) if text.strip() else {}, done.stderr.decode()


def _round(subject: Subject, facts: compare.Facts) -> dict[str, float]:
    """Plan and park; restore what was parked. What the plan refuses must run on, unchanged."""
    name, wanted = subject.program.name, subject.spec.blockers()
    status, plan, said = _command(subject, "plan", name)
    findings = [f"{one['check']}: {one['message']}" for one in plan.get("findings", ()) if one["level"] == "block"]
    if plan.get("ok") == bool(wanted):
        exit_status, answer, _ = _command(subject, "checkpoint", name)
        then = f"checkpoint then: exit {exit_status} {answer.get('error', '')}"
        raise Defect("plan", f"ok={plan.get('ok')} {findings}, but the session holds {wanted or 'nothing exotic'}; {then}")
    status, answer, said = _command(subject, "checkpoint", name)
    if status != 0:
        _unharmed(subject, facts, f"checkpoint: exit {status} {answer.get('error')}")
        if not wanted:
            raise Defect("plan", f"the plan found nothing, checkpoint: exit {status} {answer['error']['message']}")
        if status != 4:
            raise Defect("plan", f"the plan is {findings}, checkpoint: exit {status} {answer['error']['message']}")
        return {}
    if wanted:
        raise Defect("plan", f"the plan is {findings}, but checkpoint succeeded")
    for attempt in range(2):
        status, restored, said = _command(subject, "restore", name)
        if status == 0:
            return dict(answer["phases"])
        first = f"restore {attempt}: exit {status} {restored.get('error')}\n{said}"
    raise Defect("lost", first)


def _normal(facts: compare.Facts) -> compare.Facts:
    found = {}
    for key, value in facts.items():
        text = re.sub(r"flags ([0-7]+)", lambda flags: f"flags {int(flags[1], 8) & ~OPEN_ONLY:o}", value)
        for pattern, replacement in SAME:
            text = pattern.sub(replacement, text)
        found[key] = text
    return found


def _differences(subject: Subject, facts: compare.Facts) -> str:
    """Compare what can be seen from outside with `facts`, until it is the same or has had time to become so."""
    end = time.monotonic() + SETTLE
    while True:
        lost, appeared = compare.differences(_normal(facts), _normal(subject.program.look()), ALLOWED)
        if not lost and not appeared:
            return ""
        if time.monotonic() > end:
            return "\n".join(["", *(f"  lost      {one}" for one in lost), *(f"  appeared  {one}" for one in appeared)])


def _unharmed(subject: Subject, facts: compare.Facts, after: str) -> None:
    if not subject.host.pids(subject.session):
        raise Defect("ended", f"no process of the session is left after {after}")
    if different := _differences(subject, facts):
        raise Defect("ended", f"after {after}: {different}")


def _compare(subject: Subject, facts: compare.Facts) -> None:
    if different := _differences(subject, facts):
        raise Defect("changed", different)


def _same_reports(before: dict[int, Any], after: dict[int, Any]) -> None:
    wrong = []
    for process, report in before.items():
        for label, value in report.items():
            now = after[process].get(label)
            if now != value:
                wrong.append(f"process {process} {label}: {now!r:.300} instead of {value!r:.300}")
    if wrong:
        raise Defect("changed", "\n".join(wrong))
