"""Credentials: a good one is known everywhere, a changed one nowhere, and none prints its secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from cmdop_migrate.errors import NotAdmitted, Usage
from cmdop_migrate.images.format import keys
from cmdop_migrate.relay import credentials
from cmdop_migrate.relay.credentials import Claims, Credential, b64, issue, parse, unb64, verify, verify_hello

FLEET = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NONCE = bytes(32)


def one(**changed: object) -> Credential:
    words: dict[str, object] = {"kind": "client", "name": "alice", "role": "read", "sessions": "web-*", "expires": None}
    return issue(FLEET, **{**words, **changed})  # type: ignore[arg-type]


def test_credential_text_round_trip() -> None:
    made = issue(FLEET, "client", "alice", "admin", "web-*", 99, "wss://r:7443", "ab" * 32)
    again = parse(f"  {made.text()}\n")
    assert (again.claims, again.fleet, again.relay, again.pin) == (made.claims, made.fleet, made.relay, made.pin)
    assert again.seed.reveal() == made.seed.reveal()


def test_credential_proof_does_not_contain_the_secret() -> None:
    made = one()
    hello = made.hello(NONCE)
    assert b64(made.seed.reveal()) not in json.dumps(hello) and set(hello) == {"claims", "signature", "proof"}
    claims = credentials.verify_presented(made.fleet, hello["claims"], hello["signature"])
    verify_hello(claims, NONCE, hello["proof"])
    for nonce, proof in ((b"\1" * 32, hello["proof"]), (NONCE, one().hello(NONCE)["proof"]), (NONCE, "!"), (NONCE, "")):
        with pytest.raises(NotAdmitted):
            verify_hello(claims, nonce, proof)


def test_credential_repr_has_no_secret() -> None:
    made = one()
    assert b64(made.seed.reveal()) not in repr(made) and str(made.seed.reveal()) not in repr(made)


def test_credential_of_another_fleet_is_refused() -> None:
    other = issue(Ed25519PrivateKey.generate(), "client", "alice", "read", "*", None)
    with pytest.raises(NotAdmitted):
        verify(FLEET.public_key().public_bytes_raw(), other.claims.to_bytes(), other.signature)


def test_claims_changed_after_signing_are_refused() -> None:
    made = one()
    more = Claims(**{**_table(made.claims), "role": "admin"})
    with pytest.raises(NotAdmitted):
        verify(made.fleet, more.to_bytes(), made.signature)


@settings(max_examples=200)
@given(st.data())
def test_no_changed_character_passes(data: st.DataObject) -> None:
    """Either it is refused, or it is another credential's text that says and proves the same."""
    made = one()
    text = made.text()
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.characters(codec="ascii").filter(lambda char: char != text[at]))
    try:
        again = parse(text[:at] + new + text[at + 1 :])
    except NotAdmitted as error:
        assert text[5:] not in error.message + error.hint
        return
    assert again.claims == made.claims and again.seed.reveal() == made.seed.reveal()


@settings(max_examples=200)
@given(st.one_of(st.text(max_size=80), st.binary(max_size=80).map(lambda raw: credentials.PREFIX + b64(raw))))
def test_any_text_is_a_credential_or_refused(text: str) -> None:
    with pytest.raises(NotAdmitted):
        parse(text)


ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just([]) | st.just({"a": 1})
)


@given(st.sampled_from(["id", "kind", "name", "role", "sessions", "expires", "key", "v", "more"]), ANYTHING)
def test_claims_with_any_other_value_are_claims_or_refused(field: str, value: object) -> None:
    table = {**_table(one().claims), field: value}
    data = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    try:
        claims = credentials.parse_claims(data)
    except NotAdmitted:
        return
    assert claims.to_bytes() == data


def test_claims_have_one_form_only() -> None:
    data = one().claims.to_bytes()
    assert credentials.parse_claims(data).to_bytes() == data
    for other in (data.replace(b",", b", ", 1), data[:-1] + b',"more":1}', data.replace(b'"v":1', b'"v":true')):
        with pytest.raises(NotAdmitted):
            credentials.parse_claims(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "a" * 64},
        {"role": "host"},
        {"kind": "host"},
        {"sessions": ""},
        {"sessions": "a\n*"},
        {"expires": -1},
        {"expires": 2**60},
    ],
)
def test_invalid_credential_fields_are_not_signed(changed: dict[str, object]) -> None:
    with pytest.raises(Usage):
        one(**changed)


@pytest.mark.parametrize(
    ("glob", "name", "covered"),
    [
        ("*", None, True),
        ("web-*", "web-1", True),
        ("web-*", "db-1", False),
        ("web-*", None, False),
        ("5e5e*", None, True),
        ("5e" * 12, "x", True),
        ("WEB-*", "web-1", False),
        ("[a-c]?", "b1", True),
    ],
)
def test_globs(glob: str, name: str | None, covered: bool) -> None:
    assert one(sessions=glob).claims.covers("5e" * 12, name) is covered


def test_expiry_is_the_moment_itself() -> None:
    claims = one(expires=100).claims
    assert [claims.is_over(now) for now in (99.9, 100.0, 101.0)] == [False, True, True]
    assert not one(expires=None).claims.is_over(1e12)


@pytest.mark.parametrize("text", ["a", "YQ==", "YQ+", "YR", "ä", "YQ\n"])
def test_bytes_have_one_text_only(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        unb64(text)


def test_signed_bytes_depend_on_every_field() -> None:
    base = credentials.host_words("5e" * 12, 3, "host-a", b"c" * 32, b"h" * 32)
    others = [
        credentials.host_words("5f" * 12, 3, "host-a", b"c" * 32, b"h" * 32),
        credentials.host_words("5e" * 12, 4, "host-a", b"c" * 32, b"h" * 32),
        credentials.host_words("5e" * 12, 3, "host-b", b"c" * 32, b"h" * 32),
        credentials.host_words("5e" * 12, 3, "host-a", b"h" * 32, b"c" * 32),
        credentials.client_words(b"c" * 32, b"h" * 32, "5e" * 12),
    ]
    assert len({base, *others}) == 6


def test_the_fleets_identity_survives_rotation_and_import(tmp_path: Path) -> None:
    ring = keys.load_or_create(tmp_path / "keys")
    first = ring.relay_signer.public_key().public_bytes_raw()
    rotated = keys.rotate(tmp_path / "keys")
    elsewhere = keys.import_text(tmp_path / "other", keys.export_text(rotated))
    assert {one.relay_signer.public_key().public_bytes_raw() for one in (rotated, elsewhere)} == {first}
    assert first != ring.current.signer.public_key().public_bytes_raw()  # not the key that signs images


def _table(claims: Claims) -> dict[str, object]:
    found: dict[str, object] = json.loads(claims.to_bytes())
    return found
