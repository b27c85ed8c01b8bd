"""The sealed channel against a relay that does what it likes with what passes through it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from cmdop_migrate.relay.e2e import ClientSide, HostSide, SealError

SESSION, OTHER = "ab" * 12, "cd" * 12
FLEET = Ed25519PrivateKey.generate()
BEARER = Ed25519PrivateKey.generate()


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def a_client(session: str = SESSION, lowest: int = 0, bearer: Ed25519PrivateKey = BEARER) -> ClientSide:
    return ClientSide(session, public(FLEET), bearer.sign, lowest)


def a_host(handshake: bytes, session: str = SESSION, token: int = 3, fleet: Ed25519PrivateKey = FLEET) -> HostSide:
    return HostSide(session, token, "host-a", fleet.sign, public(BEARER), handshake)


def joined() -> tuple[ClientSide, HostSide]:
    client = a_client()
    host = a_host(client.handshake)
    host.accept(client.answer(host.first, 3))
    return client, host


def test_encryption_works_in_both_directions() -> None:
    client, host = joined()
    assert (client.host, client.token) == ("host-a", 3)
    for number in range(5):
        words = b"line %d" % number
        assert host.open(client.seal(words)) == words
        assert client.open(host.seal(words * 1000)) == words * 1000
    assert client.open(host.seal(b"")) == b""


def test_ciphertext_does_not_contain_the_plaintext() -> None:
    client, host = joined()
    assert b"secret" not in client.seal(b"secret") + host.seal(b"secret")


@pytest.mark.parametrize(
    "swap",
    [
        lambda key: a_host(key, fleet=Ed25519PrivateKey.generate()),
        lambda key: a_host(key, session=OTHER),
        lambda key: a_host(key, token=4),
        lambda key: a_host(a_client().handshake),
    ],
    ids=["host of another fleet", "another session", "another token", "answer to another client"],
)
def test_answer_of_another_host_or_session_is_refused(swap: Callable[[bytes], HostSide]) -> None:
    client = a_client()
    with pytest.raises(SealError, match="not signed"):
        client.answer(swap(client.handshake).first, 3)
    assert not client.is_open


def test_an_older_incarnation_is_refused() -> None:
    client = a_client(lowest=4)
    with pytest.raises(SealError, match="superseded"):
        client.answer(a_host(client.handshake, token=3).first, 3)


def test_only_the_bearer_of_the_claims_is_accepted() -> None:
    """Claims of another bearer do not help without their key."""
    thief = a_client(bearer=Ed25519PrivateKey.generate())
    host = a_host(thief.handshake)
    answer = thief.answer(host.first, 3)
    with pytest.raises(SealError, match="bearer"):
        host.accept(answer)
    assert not host.is_open


def test_bearer_signature_for_another_channel_is_refused() -> None:
    """A bearer's proof, taken from one channel into another."""
    client = a_client()
    first = a_host(client.handshake)
    proof = client.answer(first.first, 3)
    second = a_host(client.handshake)
    with pytest.raises(SealError):
        second.accept(proof)


def test_a_relay_in_the_middle() -> None:
    """It shows each side a key of its own: the host's side it cannot sign, the client's side it cannot prove."""
    client = a_client()
    relay = ClientSide(SESSION, public(FLEET), Ed25519PrivateKey.generate().sign)
    host = a_host(relay.handshake)
    with pytest.raises(SealError):
        host.accept(relay.answer(host.first, 3))
    forged = HostSide(SESSION, 3, "host-a", Ed25519PrivateKey.generate().sign, public(BEARER), client.handshake)
    with pytest.raises(SealError):
        client.answer(forged.first, 3)


@given(st.data())
def test_no_byte_can_be_changed(data: st.DataObject) -> None:
    client, host = joined()
    sealed = bytearray(client.seal(b"rm -rf ./build"))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SealError):
        host.open(bytes(sealed))


@given(st.data())
def test_no_byte_of_the_handshake_can_be_changed(data: st.DataObject) -> None:
    client = a_client()
    host = a_host(client.handshake)
    first = bytearray(host.first)
    first[data.draw(st.integers(0, len(first) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        client.answer(bytes(first), 3)
    except SealError:
        return
    # Of the stream's header nothing is signed: with another one nothing opens.
    with pytest.raises(SealError):
        client.open(host._seal(b"x"))


def test_messages_come_once_in_order_and_whole() -> None:
    for send in (
        lambda one, two: (one, one),  # repeated
        lambda one, two: (two, one),  # moved
        lambda one, two: (two,),  # left out
        lambda one, two: (one[:-1],),  # cut
        lambda one, two: (one, b""),
    ):
        client, host = joined()
        with pytest.raises(SealError):
            for message in send(client.seal(b"one"), client.seal(b"two")):
                host.open(message)


def test_the_two_directions_have_different_keys() -> None:
    client, _host = joined()
    with pytest.raises(SealError):
        client.open(client.seal(b"said by itself"))


@given(st.binary(max_size=300))
def test_garbage_is_refused_by_both_sides(data: bytes) -> None:
    client = a_client()
    host = a_host(client.handshake)
    with pytest.raises(SealError):
        client.answer(data, 3)
    with pytest.raises(SealError):
        host.accept(data)
    with pytest.raises(SealError):
        a_host(b"short")
