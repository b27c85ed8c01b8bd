"""Who may come in: challenge, proof, signature, list. What is refused says why only to who has proven who it is."""

from __future__ import annotations

import os

from cmdop_migrate import clock
from cmdop_migrate.errors import NotAdmitted, Unreachable
from cmdop_migrate.relay.credentials import NONCE_SIZE, Claims, b64, verify_hello, verify_presented
from cmdop_migrate.relay.frames import Frame, FrameError, Kind, decode, with_table
from cmdop_migrate.relay.lease_lookup import Truth


class Refusal(Exception):
    """Not admitted. `why` goes over the wire; `who` only into the log."""

    def __init__(self, code: str, why: str, who: str = "") -> None:
        super().__init__(why)
        self.code, self.why, self.who = code, why, who


def challenge() -> tuple[bytes, Frame]:
    nonce = os.urandom(NONCE_SIZE)
    return nonce, with_table(Kind.CHALLENGE, {"nonce": b64(nonce)})


def examine(fleet: bytes, nonce: bytes, message: str | bytes) -> Claims:
    """The claims of who answered the challenge rightly. Refusal. Pure."""
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
        found = verify_presented(fleet, claims, signature)
        verify_hello(found, nonce, proof)
    except NotAdmitted as error:
        raise Refusal("not_admitted", "no good credential of this fleet", error.message) from error
    return found


async def listed(truth: Truth, claims: Claims) -> None:
    """That the credential was made, is not revoked and not over. Refusal."""
    who = f"{claims.kind} {claims.name}, credential {claims.id}"
    try:
        issue = await truth.issue(claims.id)
    except Unreachable as error:
        raise Refusal("unavailable", "the lease store does not answer; try again", who) from error
    if issue is None or issue.claims != claims:
        raise Refusal("not_admitted", "the credential is not listed", who)
    why = issue.why_not(clock.walltime())
    if why:
        raise Refusal("not_admitted", f"the credential is {why}", who)
