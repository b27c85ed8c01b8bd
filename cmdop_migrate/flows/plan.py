"""The plan of a move: facts of the session and of both hosts, and what follows from them. Nothing is frozen for it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from cmdop_migrate.errors import PeerFailed, Usage
from cmdop_migrate.flows import hostfacts, sessionfacts
from cmdop_migrate.preflight import moves
from cmdop_migrate.preflight.findings import Finding
from cmdop_migrate.preflight.hostfacts import Ask, HostFacts
from cmdop_migrate.preflight.move import Move
from cmdop_migrate.preflight.sessionfacts import Carry, Expected, SessionFacts, expect
from cmdop_migrate.session.records import Records

# For tests only: a file with a JSON object that is laid over the facts of the host a session is to go to, so that a
# test can plan for an older kernel, a processor that lacks something or a full disk.
TEST_FACTS = "CMDOP_MIGRATE_TEST_FACTS"


class FactsSource(Protocol):
    """A host that can be asked about itself."""

    def facts(self, ask: Ask) -> HostFacts:
        """Its facts, gathered there; the errors of reaching it otherwise."""


class ThisHost:
    def __init__(self, records: Records) -> None:
        self._records = records

    def facts(self, ask: Ask) -> HostFacts:
        return hostfacts.gather(self._records, ask)


@dataclass(frozen=True)
class Answer:
    session: SessionFacts
    source: str
    target: str
    findings: tuple[Finding, ...]
    expected: Expected | None

    @property
    def ok(self) -> bool:
        return not self.blockers

    @property
    def blockers(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.level == "block")

    def to_json(self) -> dict[str, Any]:
        guess = self.expected
        return {
            "ok": self.ok,
            "findings": [one.to_json() for one in self.findings],
            "session": self.session.session,
            "name": self.session.name,
            "from": self.source,
            "to": self.target,
            "bytes": {"memory": self.session.memory, "files": self.session.files},
            "expected": guess and {"frozen_s": guess.frozen_s, "new": guess.new, "upload_s": guess.upload_s},
        }


def plan(
    records: Records,
    reference: str,
    target: FactsSource | None = None,
    carry: Carry = "mapped",
    accept: Collection[str] = (),
) -> Answer:
    """The findings about moving a session to `target` (None: a checkpoint and a restore on this host).

    `accept`: checks whose blockers are only to be warned of, by the word of who asks."""
    check_names(accept)
    session = sessionfacts.gather(records, reference)
    ask = session.ask()
    source = hostfacts.gather(records, ask)
    there = _laid_over(source if target is None else target.facts(ask))
    found = moves.find(Move(session, source, there, carry))
    findings = tuple(
        replace(one, level="warn") if one.check in accept and one.level == "block" else one for one in found
    )
    guess = expect(session.memory, session.files, session.measured, session.session)
    return Answer(session, source.host, there.host, findings, guess)


def check_names(names: Collection[str]) -> None:
    known = [one.name for one in moves.checks()]
    for name in names:
        if name not in known:
            raise Usage(f"no such check: {name!r}", f"Checks: {', '.join(known)}.")


def read_facts(host: str, data: Any) -> HostFacts:
    """Another host's answer, believed as far as it makes sense."""
    try:
        return HostFacts.from_json(data)
    except ValueError as error:
        raise PeerFailed(
            f"{host} tells its facts in a way this version does not read: {error}", "Update both hosts."
        ) from error


def _laid_over(facts: HostFacts) -> HostFacts:
    path = os.environ.get(TEST_FACTS)
    if not path:
        return facts
    changed = facts.to_json()
    for name, value in json.loads(Path(path).read_text(encoding="utf-8")).items():
        changed[name] = {**changed[name], **value} if isinstance(value, dict) else value
    return read_facts(facts.host, changed)
