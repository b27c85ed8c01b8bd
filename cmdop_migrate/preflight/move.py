"""One session, the host it is on, and the host it is to go to."""

from __future__ import annotations

from dataclasses import dataclass

from cmdop_migrate.preflight.facts.host import HostFacts
from cmdop_migrate.preflight.facts.session import Carry, SessionFacts


@dataclass(frozen=True)
class Move:
    """`source` and `target` are one host when the session is to be restored where it is."""

    session: SessionFacts
    source: HostFacts
    target: HostFacts
    carry: Carry = "mapped"

    @property
    def stays(self) -> bool:
        return self.source.instance == self.target.instance
