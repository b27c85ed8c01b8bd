"""Encrypt end to end between client and link: the relay between them can neither read nor change a message.

Pure: bytes in, bytes out. docs/internals/relay-protocol.md has the layout. Both ends make fresh keys for each channel
(crypto_kx); the fleet's key signs the link's, the bearer's key the client's, each over both keys and the session. Then
each direction is one secretstream: decryption fails for a message that was altered, repeated, omitted or reordered.
"""

from __future__ import annotations

from collections.abc import Callable

from nacl import bindings as sodium
from nacl.exceptions import CryptoError

from cmdop_migrate.relay import credentials

KEY = sodium.crypto_kx_PUBLIC_KEY_BYTES
HEADER = sodium.crypto_secretstream_xchacha20poly1305_HEADERBYTES
OVERHEAD = sodium.crypto_secretstream_xchacha20poly1305_ABYTES
SIGNATURE = 64
PIECE = 32 << 10  # bytes of the holder's stream in one encrypted message, at most
Sign = Callable[[bytes], bytes]


class SealError(Exception):
    """Report that a message is not from the expected peer, or was changed. The channel is unusable."""


class _Stream:
    """Represent both directions, once the keys are agreed."""

    def __init__(self) -> None:
        self._push = sodium.crypto_secretstream_xchacha20poly1305_state()
        self._pull = sodium.crypto_secretstream_xchacha20poly1305_state()
        self.is_open = False

    def seal(self, data: bytes) -> bytes:
        """Encrypt the next message."""
        assert self.is_open, "the handshake is not complete"
        return self._seal(data)

    def open(self, data: bytes) -> bytes:
        """Decrypt the next message. Raise SealError unless it is the next one, unaltered."""
        assert self.is_open, "the handshake is not complete"
        return self._open(data)

    def _seal(self, data: bytes) -> bytes:
        return sodium.crypto_secretstream_xchacha20poly1305_push(self._push, data)

    def _open(self, data: bytes) -> bytes:
        if len(data) < OVERHEAD:
            raise SealError("too short for an encrypted message")
        try:
            return sodium.crypto_secretstream_xchacha20poly1305_pull(self._pull, data)[0]
        except CryptoError:
            raise SealError("a message was altered, repeated, left out or moved") from None

    def _begin_push(self, key: bytes) -> bytes:
        return sodium.crypto_secretstream_xchacha20poly1305_init_push(self._push, key)

    def _begin_pull(self, header: bytes, key: bytes) -> None:
        try:
            sodium.crypto_secretstream_xchacha20poly1305_init_pull(self._pull, header, key)
        except CryptoError:
            raise SealError("invalid header of an encrypted stream") from None


class ClientSide(_Stream):
    """Keep the client's side. `fleet`: the key to trust; `sign`: signs with the credential's key; `lowest`: the highest
    fencing token seen of this session."""

    def __init__(self, session: str, fleet: bytes, sign: Sign, lowest: int = 0) -> None:
        super().__init__()
        self._session, self._fleet, self._sign, self._lowest = session, fleet, sign, lowest
        self.handshake, self._secret = sodium.crypto_kx_keypair()
        self.host = ""
        self.token = 0

    def answer(self, first: bytes, token: int) -> bytes:
        """Check the link's first DATA, under `token`, and return the client's. Raise SealError if it is not from a host
        of this fleet, not for this session, or from an incarnation that was superseded."""
        host, key, signature, header = _split(first)
        if token < self._lowest:
            raise SealError(f"token {token} is superseded: {self._lowest} has been seen")
        signed = credentials.host_words(self._session, token, host, self.handshake, key)
        if not credentials.check_signature(self._fleet, signed, signature):
            raise SealError("not signed by the fleet for this session")
        try:
            receiving, sending = sodium.crypto_kx_client_session_keys(self.handshake, self._secret, key)
        except CryptoError:
            raise SealError("an invalid key") from None
        self._begin_pull(header, receiving)
        ours = self._begin_push(sending)
        proof = self._seal(self._sign(credentials.client_words(self.handshake, key, self._session)))
        self.host, self.token, self.is_open = host, token, True
        return ours + proof


class HostSide(_Stream):
    """Keep the link's side. `sign`: signs with the fleet's key; `bearer`: the key in the verified claims."""

    def __init__(self, session: str, token: int, host: str, sign: Sign, bearer: bytes, handshake: bytes) -> None:
        super().__init__()
        if len(handshake) != KEY:
            raise SealError("not a key")
        self._session, self._bearer, self._theirs = session, bearer, handshake
        self._key, secret = sodium.crypto_kx_keypair()
        try:
            self._receiving, sending = sodium.crypto_kx_server_session_keys(self._key, secret, handshake)
        except CryptoError:
            raise SealError("an invalid key") from None
        name = host.encode()
        signature = sign(credentials.host_words(session, token, host, handshake, self._key))
        self.first = bytes([len(name)]) + name + self._key + signature + self._begin_push(sending)

    def accept(self, first: bytes) -> None:
        """Check the client's first DATA. Raise SealError if it is not from the bearer of the credential."""
        self._begin_pull(first[:HEADER].ljust(HEADER, b"\0"), self._receiving)
        signature = self._open(first[HEADER:])
        signed = credentials.client_words(self._theirs, self._key, self._session)
        if not credentials.check_signature(self._bearer, signed, signature):
            raise SealError("not the bearer of this credential")
        self.is_open = True


def _split(first: bytes) -> tuple[str, bytes, bytes, bytes]:
    """Split a link's first message into host name, key, signature and header. Raise SealError."""
    length = first[0] if first else 0
    if not length or len(first) != 1 + length + KEY + SIGNATURE + HEADER:
        raise SealError("invalid first message of a link")
    try:
        host = first[1 : 1 + length].decode()
    except UnicodeDecodeError:
        raise SealError("invalid first message of a link") from None
    rest = first[1 + length :]
    return host, rest[:KEY], rest[KEY : KEY + SIGNATURE], rest[KEY + SIGNATURE :]
