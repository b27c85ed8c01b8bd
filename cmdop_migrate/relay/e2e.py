"""The sealed channel: what client and link say to each other, and the relay between them cannot read or change.

Pure: bytes in, bytes out. docs/internals/relay-protocol.md has the layout. Both ends make fresh keys for each channel
(crypto_kx); the fleet's key signs the link's, the bearer's key the client's, each over both keys and the session. Then
each direction is one secretstream: a message that was altered, repeated, left out or moved does not open.
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
PIECE = 32 << 10  # bytes of the holder's stream in one sealed message, at most
Sign = Callable[[bytes], bytes]


class SealError(Exception):
    """What came is not from whom it should be, or not what they said. The channel is over."""


class _Stream:
    """Both directions, once the keys are agreed on."""

    def __init__(self) -> None:
        self._push = sodium.crypto_secretstream_xchacha20poly1305_state()
        self._pull = sodium.crypto_secretstream_xchacha20poly1305_state()
        self.is_open = False

    def seal(self, data: bytes) -> bytes:
        assert self.is_open, "nothing is said before the handshake is over"
        return self._seal(data)

    def open(self, data: bytes) -> bytes:
        """SealError unless this is the next message, as it was sealed."""
        assert self.is_open, "nothing is heard before the handshake is over"
        return self._open(data)

    def _seal(self, data: bytes) -> bytes:
        return sodium.crypto_secretstream_xchacha20poly1305_push(self._push, data)

    def _open(self, data: bytes) -> bytes:
        if len(data) < OVERHEAD:
            raise SealError("too short for a sealed message")
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
            raise SealError("no header of a sealed stream") from None


class ClientSide(_Stream):
    """`fleet`: whom to believe; `sign`: with the credential's key; `lowest`: the highest token seen of this session."""

    def __init__(self, session: str, fleet: bytes, sign: Sign, lowest: int = 0) -> None:
        super().__init__()
        self._session, self._fleet, self._sign, self._lowest = session, fleet, sign, lowest
        self.handshake, self._secret = sodium.crypto_kx_keypair()
        self.host = ""
        self.token = 0

    def answer(self, first: bytes, token: int) -> bytes:
        """The link's first DATA, under `token` -> ours. SealError: it is not a host of this fleet that speaks, not of
        this session, or an incarnation that is over."""
        host, key, signature, header = _parted(first)
        if token < self._lowest:
            raise SealError(f"token {token} is over: {self._lowest} has been seen")
        words = credentials.host_words(self._session, token, host, self.handshake, key)
        if not credentials.check_signature(self._fleet, words, signature):
            raise SealError("not signed by the fleet for this session")
        try:
            hear, say = sodium.crypto_kx_client_session_keys(self.handshake, self._secret, key)
        except CryptoError:
            raise SealError("a key that is none") from None
        self._begin_pull(header, hear)
        ours = self._begin_push(say)
        proof = self._seal(self._sign(credentials.client_words(self.handshake, key, self._session)))
        self.host, self.token, self.is_open = host, token, True
        return ours + proof


class HostSide(_Stream):
    """`sign`: with the fleet's key; `bearer`: the key that the client's claims name, once those were found good."""

    def __init__(self, session: str, token: int, host: str, sign: Sign, bearer: bytes, handshake: bytes) -> None:
        super().__init__()
        if len(handshake) != KEY:
            raise SealError("no key")
        self._session, self._bearer, self._theirs = session, bearer, handshake
        self._key, secret = sodium.crypto_kx_keypair()
        try:
            self._hear, say = sodium.crypto_kx_server_session_keys(self._key, secret, handshake)
        except CryptoError:
            raise SealError("a key that is none") from None
        name = host.encode()
        signature = sign(credentials.host_words(session, token, host, handshake, self._key))
        self.first = bytes([len(name)]) + name + self._key + signature + self._begin_push(say)

    def accept(self, first: bytes) -> None:
        """The client's first DATA. SealError: it is not the bearer who speaks."""
        self._begin_pull(first[:HEADER].ljust(HEADER, b"\0"), self._hear)
        signature = self._open(first[HEADER:])
        words = credentials.client_words(self._theirs, self._key, self._session)
        if not credentials.check_signature(self._bearer, words, signature):
            raise SealError("not the bearer of this credential")
        self.is_open = True


def _parted(first: bytes) -> tuple[str, bytes, bytes, bytes]:
    """Host name, key, signature, header."""
    length = first[0] if first else 0
    if not length or len(first) != 1 + length + KEY + SIGNATURE + HEADER:
        raise SealError("not how a link begins")
    try:
        host = first[1 : 1 + length].decode()
    except UnicodeDecodeError:
        raise SealError("not how a link begins") from None
    rest = first[1 + length :]
    return host, rest[:KEY], rest[KEY : KEY + SIGNATURE], rest[KEY + SIGNATURE :]
