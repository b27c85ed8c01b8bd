"""What both hosts must share for a move: the lease, the store, the key, the relay. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cmdop_migrate.preflight.findings import Rule, Said
from cmdop_migrate.preflight.hostfacts import Service
from cmdop_migrate.preflight.move import Move


def _state(move: Move) -> Iterable[Said]:
    if move.session.state != "running":
        yield Said("block", f"session {move.session.name!r} is {move.session.state}, not running")


def _lease(move: Move) -> Iterable[Said]:
    source, session = move.source, move.session
    if source.lease.trouble:
        yield Said("block", f"the lease store does not answer {source.host}: {source.lease.trouble}")
        return
    standing = source.standing
    if standing is None:
        yield Said("block", f"the lease store knows nothing of session {session.name!r}")
    elif (standing.state, standing.instance, standing.token) != ("held", source.instance, session.token):
        yield Said(
            "block",
            f"{source.host} does not hold the lease of {session.name!r}: it is {standing.state}, by {standing.host},"
            f" token {standing.token} (here {session.token})",
        )


def _lease_there(move: Move) -> Iterable[Said]:
    if move.stays:
        return
    target = move.target
    if target.lease.trouble:
        yield Said("block", f"the lease store does not answer {target.host}: {target.lease.trouble}")
    elif move.source.standing is not None and not _same_lease(move):
        yield Said(
            "block",
            f"{target.host} has another lease store ({target.lease.url}), which does not know that"
            f" {move.source.host} runs this session",
        )


def _same_lease(move: Move) -> bool:
    here, there = move.source.standing, move.target.standing
    return here is not None and there is not None and (here.instance, here.token) == (there.instance, there.token)


def _store(move: Move) -> Iterable[Said]:
    if move.source.store.trouble:
        yield Said("block", f"the store does not answer {move.source.host}: {move.source.store.trouble}")


def _store_there(move: Move) -> Iterable[Said]:
    source, target = move.source, move.target
    if move.stays:
        return
    if target.store.trouble:
        yield Said("block", f"the store does not answer {target.host}: {target.store.trouble}")
    elif target.has_mark or _same_place(source.store, target.store):
        return
    elif target.has_mark is None and source.store.url == target.store.url and not source.store.trouble:
        yield Said(
            "warn",
            f"both hosts use {source.store.url}; whether that is one directory, on a shared file system, is not known",
        )
    else:
        yield Said("block", f"{target.host} has another store: {target.store.url}, not {source.store.url}")


def _same_place(here: Service, there: Service) -> bool:
    """A bucket is what its address says; a directory is one only where it is the same on the same machine."""
    return here.url == there.url and here.place == there.place and (here.place is not None or "file:" not in here.url)


def _key(move: Move) -> Iterable[Said]:
    key = move.source.key
    if key is not None and key not in move.target.keys:
        yield Said(
            "block", f"{move.target.host} does not have the key {key[:16]}, which seals what {move.source.host} saves"
        )


def _relay(move: Move) -> Iterable[Said]:
    here, there = move.source.relay, move.target.relay
    if here is None or move.stays:
        return
    if there is None:
        yield Said(
            "warn", f"{move.target.host} has no relay set: clients that come through {here.url} will not find it"
        )
    elif there.trouble:
        yield Said("warn", f"the relay does not answer {move.target.host}: {there.trouble}")
    elif there.url != here.url:
        yield Said("warn", f"{move.target.host} uses another relay: {there.url}, not {here.url}")


_SHARE_STORE = "Set the same `store` on both hosts, one that both reach (s3://…)."
_SHARE_LEASE = "Set the same `lease` on both hosts, one that both reach (s3://… or etcd://…)."
RULES: tuple[Rule[Move], ...] = (
    Rule("state", ("block",), "whether the session runs", "See: cmdop-migrate ls", _state),
    Rule("lease", ("block",), "who holds the session's lease", "See: cmdop-migrate lease show SESSION", _lease),
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
        ("block", "warn"),
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
