// The client's side of the end-to-end encryption with the link on the host: the relay between them can neither read nor
// change a message (docs/internals/relay-protocol.md). Pure: bytes in, bytes out. libsodium must be ready.

import sodium from "./vendor/libsodium-wrappers.mjs";
import { concat, sessionBytes } from "./frames.js";

const KEY = 32;
const SIGNATURE = 64;
const HEADER = 24;
export const OVERHEAD = 17;
export const PIECE = 32 << 10; // bytes of the stream in one encrypted message, at most
const words = (text) => new TextEncoder().encode(text);
const HOST = words("cmdop-migrate relay host 1\0");
const CLIENT = words("cmdop-migrate relay client 1\0");

// A message is not from the expected peer, or not as it was sent. The channel cannot be used any more.
export class SealError extends Error {}

export class ClientSide {
  #session; #fleet; #sign; #lowest; #keys; #push; #pull;

  // `fleet`: the key to trust; `sign`: signs with the credential's key; `lowest`: the highest fencing token seen.
  constructor(session, fleet, sign, lowest, keys = sodium.crypto_kx_keypair()) {
    this.#session = sessionBytes(session);
    this.#fleet = fleet;
    this.#sign = sign;
    this.#lowest = lowest;
    this.#keys = keys;
    this.handshake = keys.publicKey;
    this.host = "";
  }

  // Check the link's first DATA, under `token`, and return the client's. Throw SealError if it is not from a host of
  // this fleet, not for this session, or from an incarnation that was superseded.
  answer(first, token) {
    const { host, name, key, signature, header } = split(first);
    if (token < this.#lowest) throw new SealError(`token ${token} is superseded: ${this.#lowest} has been seen`);
    const number = new Uint8Array(8);
    new DataView(number.buffer).setBigUint64(0, BigInt(token));
    const signed = concat(HOST, this.#session, number, Uint8Array.of(name.length), name, this.handshake, key);
    if (!sodium.crypto_sign_verify_detached(signature, signed, this.#fleet)) {
      throw new SealError("not signed by the fleet for this session");
    }
    let session;
    try {
      session = sodium.crypto_kx_client_session_keys(this.handshake, this.#keys.privateKey, key);
    } catch {
      throw new SealError("an invalid key");
    }
    this.#pull = sodium.crypto_secretstream_xchacha20poly1305_init_pull(header, session.sharedRx);
    const ours = sodium.crypto_secretstream_xchacha20poly1305_init_push(session.sharedTx);
    this.#push = ours.state;
    this.host = host;
    return concat(ours.header, this.seal(this.#sign(concat(CLIENT, this.handshake, key, this.#session))));
  }

  seal(data) {
    return sodium.crypto_secretstream_xchacha20poly1305_push(
      this.#push, data, null, sodium.crypto_secretstream_xchacha20poly1305_TAG_MESSAGE);
  }

  // Decrypt the next message. Throw SealError unless it is the next one, unaltered.
  open(data) {
    const found = data.length >= OVERHEAD && sodium.crypto_secretstream_xchacha20poly1305_pull(this.#pull, data);
    if (!found) throw new SealError("a message was altered, repeated, left out or moved");
    return found.message;
  }
}

function split(first) {
  const length = first.length ? first[0] : 0;
  if (!length || first.length !== 1 + length + KEY + SIGNATURE + HEADER) throw new SealError("invalid first message of a link");
  const name = first.subarray(1, 1 + length);
  let at = 1 + length;
  const take = (size) => first.slice(at, (at += size));
  let host;
  try {
    host = new TextDecoder("utf-8", { fatal: true }).decode(name);
  } catch {
    throw new SealError("invalid first message of a link");
  }
  return { host, name, key: take(KEY), signature: take(SIGNATURE), header: take(HEADER) };
}
