"""Compute the times of a lease. Pure; all other modules take them from here.

Terms: *real* time is any one reference clock; a host's clock runs at a rate
between 1 - RHO and 1 + RHO of it. Clocks need not agree on what time it is,
and nothing here compares two clocks.

A lease of `ttl` is dead at most `ttl` *real* seconds after its last successful
renewal began. Holder and contender each keep to their side of that line:

1. The holder begins a renewal at S, on its own clock. It may run until
   S + fresh_for(ttl), and needs at most freeze_allowance(ttl) more to be
   frozen. By its clock that is ttl * (1 - RHO) after S; a clock that runs slow by
   RHO takes ttl * (1 - RHO) / (1 - RHO) = ttl real seconds for it. So
   the session is frozen at S + ttl, real.
2. The renewal takes effect in the store at E >= S. A contender that sees it has
   its answer at O >= E, and counts from O. It asks for the lease when its
   clock shows contender_wait(ttl) = ttl * (1 + RHO) more; a clock that runs fast
   by RHO takes ttl * (1 + RHO) / (1 + RHO) = ttl real seconds for it. So
   it asks at O + ttl >= S + ttl, real, or later.
3. Its request is a compare-and-swap on what it saw at O. Had the holder renewed
   once more in between, with effect before the swap, the swap fails. Had it
   renewed with effect after the swap, the holder's own swap fails, and it
   may still count only from S.

Delays of requests and answers move E, O and the swap later, never earlier, so
they cost waiting, not safety. The margins below are therefore only for clock
*rates* and for the freeze.
"""

from __future__ import annotations

import math

from cmdop_migrate.errors import Usage

RHO = 0.01
"""Maximum relative rate error of a host's clock. Crystals stay within 0.0001, NTP slews by at most 0.0005."""

FREEZE_MAX = 1.0
"""Maximum seconds the holder has for freezing its cgroup; a tenth of a short TTL."""

TTL_MIN = 0.2
TTL_MAX = 86400.0

RENEWALS_PER_TTL = 3
"""Renewals that a holder attempts per TTL: two of three may fail without a freeze."""


def freeze_allowance(ttl: float) -> float:
    """Return how long after its deadline a session may still run, on the holder's clock."""
    return min(FREEZE_MAX, ttl / 10)


def fresh_for(ttl: float) -> float:
    """Return how long after the START of its last successful renewal a holder may run, on its clock. Then it
    freezes."""
    return ttl * (1 - RHO) - freeze_allowance(ttl)


def contender_wait(ttl: float) -> float:
    """Return how long a contender must see a record unchanged, on its clock, before it may ask to take over."""
    return ttl * (1 + RHO)


def renew_every(ttl: float) -> float:
    """Return the interval between the starts of renewals."""
    return fresh_for(ttl) / RENEWALS_PER_TTL


def check_ttl(ttl: float) -> float:
    """Return the TTL if the margins work for it, else raise Usage."""
    if not (math.isfinite(ttl) and TTL_MIN <= ttl <= TTL_MAX):
        raise Usage(f"not a lease TTL: {ttl} s", f"Between {TTL_MIN} s and {TTL_MAX:.0f} s; 15s is usual.")
    return ttl
