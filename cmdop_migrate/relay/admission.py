"""Admit connections: challenge, proof, signature, list of credentials. A refusal gives its reason only to a peer that
has proven its identity."""

from __future__ import annotations

import os

from cmdop_migrate import clock
from cmdop_migrate.errors import NotAdmitted, Unreachable
from cmdop_migrate.relay.credentials import NONCE_SIZE, Claims, b64, verify_hello, verify_presented
from cmdop_migrate.relay.frames import Frame, FrameError, Kind, decode, with_table
from cmdop_migrate.relay.lease_lookup import LeaseLookup


class Refusal(Exception):
    """Report that a connection is not admitted. `why` goes over the wire; `who` only into the log."""

    def __init__(self, code: str, why: str, who: str = "") -> None:
        super().__init__(why)
        self.code, self.why, self.who = code, why, who


def challenge() -> tuple[bytes, Frame]:
    """Return a fresh nonce, and the frame that carries it."""
    nonce = os.urandom(NONCE_SIZE)
    return nonce, with_table(Kind.CHALLENGE, {"nonce": b64(nonce)})


def examine(fleet: bytes, nonce: bytes, message: str | bytes) -> Claims:
    """Return the claims of the peer that answered the challenge. Raise Refusal if the answer is invalid. Pure."""
    if isinstance(message, str):
        raise Refusal("protocol", "a text message")
    try:
        frame = decode(message)
        if frame.kind is not Kind.HELLO:
            raise FrameError("HELLO must come first")
        claims, signature, proof = frame.text("claims"), frame.text("signature"), frame.text("proof")
    except FrameError as error:
        raise Refusal("protocol", str(error)) from error
    try:
        verified = verify_presented(fleet, claims, signature)
        verify_hello(verified, nonce, proof)
    except NotAdmitted as error:
        raise Refusal("not_admitted", "no valid credential of this fleet", error.message) from error
    return verified


async def check_listed(lookup: LeaseLookup, claims: Claims) -> None:
    """Raise Refusal unless the credential is listed, not revoked and not expired."""
    who = f"{claims.kind} {claims.name}, credential {claims.id}"
    try:
        issued = await lookup.credential(claims.id)
    except Unreachable as error:
        raise Refusal("unavailable", "the lease store does not answer; try again", who) from error
    if issued is None or issued.claims != claims:
        raise Refusal("not_admitted", "the credential is not listed", who)
    why = issued.invalid_because(clock.walltime())
    if why:
        raise Refusal("not_admitted", f"the credential is {why}", who)
