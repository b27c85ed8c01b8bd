"""The plan of a move: facts of the session and of both hosts, and what follows from them. Nothing is frozen for it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from cmdop_migrate import __version__
from cmdop_migrate.errors import PeerDiffers, Usage
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration import gather_host_facts, gather_session_facts, peers
from cmdop_migrate.preflight import plan as preflight_plan
from cmdop_migrate.preflight.facts.host import Ask, HostFacts
from cmdop_migrate.preflight.facts.session import Carry, Expected, SessionFacts, expect
from cmdop_migrate.preflight.findings import Finding
from cmdop_migrate.preflight.move import Move
from cmdop_migrate.remote.peer import Peer
from cmdop_migrate.util.faults import TEST_FACTS

FACTS_TIMEOUT = 120.0


class FactsSource(Protocol):
    """A host that can be asked about itself."""

    def facts(self, ask: Ask) -> HostFacts:
        """Its facts, gathered there; the errors of reaching it otherwise."""


class ThisHost:
    """The one this command runs on."""

    def __init__(self, this_host: Host) -> None:
        self._this_host = this_host

    def facts(self, ask: Ask) -> HostFacts:
        return gather_host_facts.gather(self._this_host, ask)


class OtherHost:
    """Asked through its own command line. Store, key or lease that differ there are findings, no errors."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def facts(self, ask: Ask) -> HostFacts:
        given = json.dumps(ask.to_json()).encode()
        try:
            data = self._peer.call("facts", "--for", "-", stdin=given, timeout=FACTS_TIMEOUT)
        except Usage as error:
            raise PeerDiffers(
                f"{self._peer.name}: its cmdop-migrate does not know what is asked of it: {error.message}",
                f"Install {__version__} there too.",
            ) from error
        return read_facts(self._peer.name, data)


@contextmanager
def host(this_host: Host, name: str | None) -> Iterator[FactsSource]:
    """The host of this name, connected until the end of the block; None, or this host's own name: this host."""
    if name is None or name == this_host.config.host:
        yield ThisHost(this_host)
        return
    target = peers.inventory(this_host.config).find(name)
    with peers.pool(this_host.config) as pool:
        yield OtherHost(Peer(target, pool))


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
    this_host: Host,
    reference: str,
    target: FactsSource,
    carry: Carry = "mapped",
    accept: Collection[str] = (),
) -> Answer:
    """The findings about moving a session to `target`; to this host: about a checkpoint and a restore here.

    `accept`: checks whose blockers are only to be warned of, by the word of who asks."""
    check_names(accept)
    session = gather_session_facts.gather(this_host, reference)
    ask = session.ask()
    source = gather_host_facts.gather(this_host, ask)
    there = _laid_over(source if isinstance(target, ThisHost) else target.facts(ask))
    if there.instance == source.instance and not isinstance(target, ThisHost):
        raise Usage(f"{there.host} is this host itself", "Name another one; see: cmdop-migrate hosts ls")
    found = preflight_plan.find(Move(session, source, there, carry))
    findings = tuple(_accepted(one) if one.check in accept else one for one in found)
    guess = expect(session.memory, session.files, session.measured, session.session)
    return Answer(session, source.host, there.host, findings, guess)


def _accepted(one: Finding) -> Finding:
    return replace(one, level="warn") if one.level == "block" else one


def check_names(names: Collection[str]) -> None:
    known = [one.name for one in preflight_plan.checks()]
    for name in names:
        if name not in known:
            raise Usage(f"no such check: {name!r}", f"Checks: {', '.join(known)}.")


def read_facts(host: str, data: Any) -> HostFacts:
    """Another host's answer, believed as far as it makes sense."""
    try:
        return HostFacts.from_json(data)
    except ValueError as error:
        raise PeerDiffers(
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
