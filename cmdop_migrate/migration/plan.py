"""Plan a move: gather facts of the session and of both hosts, and derive findings. Nothing is frozen or changed."""

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
from cmdop_migrate.migration import gather_facts, peers
from cmdop_migrate.preflight import plan as preflight_plan
from cmdop_migrate.preflight.facts.host import HostFacts, HostQuery
from cmdop_migrate.preflight.facts.session import Carry, Estimate, Move, SessionFacts, estimate
from cmdop_migrate.preflight.findings import Finding
from cmdop_migrate.remote.peer import Peer
from cmdop_migrate.util.faults import TEST_FACTS

FACTS_TIMEOUT = 120.0


class FactsSource(Protocol):
    """Describe a host that can be asked for its facts."""

    def facts(self, ask: HostQuery) -> HostFacts:
        """Return the facts, gathered on that host. Raises the errors of reaching it."""


class LocalFacts:
    """Gather the facts of the host this command runs on."""

    def __init__(self, this_host: Host) -> None:
        self._this_host = this_host

    def facts(self, ask: HostQuery) -> HostFacts:
        return gather_facts.gather_host(self._this_host, ask)


class RemoteFacts:
    """Ask another host through its own command line. A different store, lease store or key there is a finding, not an
    error."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def facts(self, ask: HostQuery) -> HostFacts:
        given = json.dumps(ask.to_json()).encode()
        try:
            data = self._peer.call("facts", "--for", "-", stdin=given, timeout=FACTS_TIMEOUT)
        except Usage as error:
            raise PeerDiffers(
                f"{self._peer.name}: its cmdop-migrate does not understand the question: {error.message}",
                f"Install {__version__} there too.",
            ) from error
        return read_facts(self._peer.name, data)


@contextmanager
def host(this_host: Host, name: str | None) -> Iterator[FactsSource]:
    """Yield the host of this name, connected until the end of the block. None, or this host's own name, is this
    host."""
    if name is None or name == this_host.config.host:
        yield LocalFacts(this_host)
        return
    target = peers.inventory(this_host.config).find(name)
    with peers.pool(this_host.config) as pool:
        yield RemoteFacts(Peer(target, pool))


@dataclass(frozen=True)
class PlanResult:
    """Hold the findings about a move, and the expected cost if there are earlier checkpoints to estimate from."""

    session: SessionFacts
    source: str
    target: str
    findings: tuple[Finding, ...]
    expected: Estimate | None

    @property
    def ok(self) -> bool:
        """Return whether no finding blocks the move."""
        return not self.blockers

    @property
    def blockers(self) -> tuple[Finding, ...]:
        """Return the findings that block the move."""
        return tuple(finding for finding in self.findings if finding.level == "block")

    def to_json(self) -> dict[str, Any]:
        """Return what `plan --json` prints."""
        expected = self.expected
        return {
            "ok": self.ok,
            "findings": [finding.to_json() for finding in self.findings],
            "session": self.session.session,
            "name": self.session.name,
            "from": self.source,
            "to": self.target,
            "bytes": {"memory": self.session.memory, "files": self.session.files},
            "expected": expected
            and {"frozen_s": expected.frozen_s, "new": expected.new, "upload_s": expected.upload_s},
        }


def plan(
    this_host: Host,
    reference: str,
    target: FactsSource,
    carry: Carry = "mapped",
    accept: Collection[str] = (),
) -> PlanResult:
    """Return the findings about moving a session to `target`; if that is this host, about a checkpoint and a restore
    here. The blockers of the checks in `accept` become warnings."""
    check_names(accept)
    session = gather_facts.gather_session(this_host, reference)
    ask = session.ask()
    source = gather_facts.gather_host(this_host, ask)
    there = _laid_over(source if isinstance(target, LocalFacts) else target.facts(ask))
    if there.instance == source.instance and not isinstance(target, LocalFacts):
        raise Usage(f"{there.host} is this host itself", "Name another one; see: cmdop-migrate hosts ls")
    findings = tuple(
        _accepted(finding) if finding.check in accept else finding
        for finding in preflight_plan.find(Move(session, source, there, carry))
    )
    expected = estimate(session.memory, session.files, session.measured, session.session)
    return PlanResult(session, source.host, there.host, findings, expected)


def _accepted(finding: Finding) -> Finding:
    return replace(finding, level="warn") if finding.level == "block" else finding


def check_names(names: Collection[str]) -> None:
    """Raise Usage if a name is not that of a check."""
    known = [check.name for check in preflight_plan.checks()]
    for name in names:
        if name not in known:
            raise Usage(f"no such check: {name!r}", f"Checks: {', '.join(known)}.")


def read_facts(host: str, data: Any) -> HostFacts:
    """Parse another host's facts. Raises PeerDiffers if they are invalid."""
    try:
        return HostFacts.from_json(data)
    except ValueError as error:
        raise PeerDiffers(f"{host} sent facts that this version cannot read: {error}", "Update both hosts.") from error


def _laid_over(facts: HostFacts) -> HostFacts:
    path = os.environ.get(TEST_FACTS)
    if not path:
        return facts
    changed = facts.to_json()
    for name, value in json.loads(Path(path).read_text(encoding="utf-8")).items():
        changed[name] = {**changed[name], **value} if isinstance(value, dict) else value
    return read_facts(facts.host, changed)
