"""Check what both hosts must share for a move: the lease store, the store, the key, the relay; no side effects."""

from __future__ import annotations

from collections.abc import Iterable

from cmdop_migrate.preflight.facts.host import HostFacts, Service
from cmdop_migrate.preflight.facts.session import Move
from cmdop_migrate.preflight.findings import Hit, Rule


def _version(move: Move) -> Iterable[Hit]:
    here, there = move.source, move.target
    if here.protocol != there.protocol:
        yield Hit(
            "block",
            f"{there.host} runs cmdop-migrate {there.version} (protocol {there.protocol}), {here.host} {here.version}"
            f" (protocol {here.protocol})",
        )


def _state(move: Move) -> Iterable[Hit]:
    if move.session.state != "running":
        yield Hit("block", f"session {move.session.name!r} is {move.session.state}, not running")


def _lease(move: Move) -> Iterable[Hit]:
    source, session = move.source, move.session
    if source.lease.trouble:
        yield Hit("block", f"the lease store does not answer {source.host}: {source.lease.trouble}")
        return
    lease = source.standing
    if lease is None:
        yield Hit("block", f"the lease store has no record of session {session.name!r}")
    elif (lease.state, lease.instance, lease.token) != ("held", source.instance, session.token):
        yield Hit(
            "block",
            f"{source.host} does not hold the lease of {session.name!r}: it is {lease.state}, by {lease.host},"
            f" token {lease.token} (here {session.token})",
        )


def _lease_there(move: Move) -> Iterable[Hit]:
    yield from _shared("lease store", move.source, move.target, move.source.lease, move.target.lease)


def _store(move: Move) -> Iterable[Hit]:
    if move.source.store.trouble:
        yield Hit("block", f"the store does not answer {move.source.host}: {move.source.store.trouble}")


def _store_there(move: Move) -> Iterable[Hit]:
    yield from _shared("store", move.source, move.target, move.source.store, move.target.store)


def _shared(what: str, source: HostFacts, target: HostFacts, here: Service, there: Service) -> Iterable[Hit]:
    if source.instance == target.instance or here.trouble:
        return  # a problem on this host is reported by its own rule
    if there.trouble:
        yield Hit("block", f"the {what} does not answer {target.host}: {there.trouble}")
    elif here.id != there.id:
        same = (
            " (the same address, but not the same {what})" if here.url == there.url else f", {source.host} {here.url}"
        )
        yield Hit("block", f"{target.host} has another {what}: {there.url}{same}")


def _key(move: Move) -> Iterable[Hit]:
    key, target = move.source.key, move.target
    if move.stays:
        return
    if key is None:
        yield Hit("block", f"{move.source.host} has no key yet; {target.host} could not read what it saves")
    elif key not in target.keys:
        yield Hit("block", f"{target.host} does not have the key {key[:16]}, which seals what {move.source.host} saves")


def _relay(move: Move) -> Iterable[Hit]:
    here, there = move.source.relay, move.target.relay
    if here is None or move.stays:
        return
    if there is None:
        yield Hit(
            "warn",
            f"{move.target.host} has no relay set: clients that connect through {here.url} will not find the session",
        )
    elif there.trouble:
        yield Hit("warn", f"the relay does not answer {move.target.host}: {there.trouble}")
    elif there.url != here.url:
        yield Hit("warn", f"{move.target.host} uses another relay: {there.url}, not {here.url}")


_SHARE_STORE = "Set the same `store` on both hosts, one that both reach (s3://…)."
_SHARE_LEASE = "Set the same `lease` on both hosts, one that both reach (s3://… or etcd://…)."
RULES: tuple[Rule[Move], ...] = (
    Rule(
        "version", ("block",), "the version of cmdop-migrate there", "Install the same version on both hosts.", _version
    ),
    Rule("state", ("block",), "the state of the session: it must be running", "See: cmdop-migrate ls", _state),
    Rule("lease", ("block",), "the holder of the session's lease", "See: cmdop-migrate lease show SESSION", _lease),
    Rule(
        "lease_there",
        ("block",),
        "the lease store, from the other host: it answers, and is the same",
        _SHARE_LEASE,
        _lease_there,
    ),
    Rule("store", ("block",), "the store, from this host", "See: cmdop-migrate checkpoints ls", _store),
    Rule(
        "store_there",
        ("block",),
        "the store, from the other host: it answers, and is the same",
        _SHARE_STORE,
        _store_there,
    ),
    Rule(
        "key",
        ("block",),
        "the key that seals checkpoints",
        "Here: cmdop-migrate key export. There: cmdop-migrate key import.",
        _key,
    ),
    Rule("relay", ("warn",), "the relay, from the other host", "Set the same `relay` on both hosts.", _relay),
)
