// The client's end of the sealed channel: what we and the link on the host say, and the relay between cannot read or
// change (docs/internals/relay-protocol.md). Pure: bytes in, bytes out. libsodium must be ready.

import sodium from "./vendor/libsodium-wrappers.mjs";
import { concat, sessionBytes } from "./frames.js";

const KEY = 32;
const SIGNATURE = 64;
const HEADER = 24;
export const OVERHEAD = 17;
export const PIECE = 32 << 10; // bytes of the stream in one sealed message, at most
const words = (text) => new TextEncoder().encode(text);
const HOST = words("cmdop-migrate relay host 1\0");
const CLIENT = words("cmdop-migrate relay client 1\0");

// What came is not from whom it should be, or not what they said. The channel is over.
export class SealError extends Error {}

export class ClientSide {
  #session; #fleet; #sign; #lowest; #keys; #push; #pull;

  // `fleet`: whom to believe; `sign`: with the credential's key; `lowest`: the highest token seen of this session.
  constructor(session, fleet, sign, lowest, keys = sodium.crypto_kx_keypair()) {
    this.#session = sessionBytes(session);
    this.#fleet = fleet;
    this.#sign = sign;
    this.#lowest = lowest;
    this.#keys = keys;
    this.handshake = keys.publicKey;
    this.host = "";
  }

  // The link's first DATA, under `token` -> ours. SealError: it is not a host of this fleet that speaks, not of this
  // session, or an incarnation that is over.
  answer(first, token) {
    const { host, name, key, signature, header } = parted(first);
    if (token < this.#lowest) throw new SealError(`token ${token} is over: ${this.#lowest} has been seen`);
    const number = new Uint8Array(8);
    new DataView(number.buffer).setBigUint64(0, BigInt(token));
    const said = concat(HOST, this.#session, number, Uint8Array.of(name.length), name, this.handshake, key);
    if (!sodium.crypto_sign_verify_detached(signature, said, this.#fleet)) {
      throw new SealError("not signed by the fleet for this session");
    }
    let session;
    try {
      session = sodium.crypto_kx_client_session_keys(this.handshake, this.#keys.privateKey, key);
    } catch {
      throw new SealError("a key that is none");
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

  // SealError unless this is the next message, as it was sealed.
  open(data) {
    const found = data.length >= OVERHEAD && sodium.crypto_secretstream_xchacha20poly1305_pull(this.#pull, data);
    if (!found) throw new SealError("a message was altered, repeated, left out or moved");
    return found.message;
  }
}

function parted(first) {
  const length = first.length ? first[0] : 0;
  if (!length || first.length !== 1 + length + KEY + SIGNATURE + HEADER) throw new SealError("not how a link begins");
  const name = first.subarray(1, 1 + length);
  let at = 1 + length;
  const take = (size) => first.slice(at, (at += size));
  let host;
  try {
    host = new TextDecoder("utf-8", { fatal: true }).decode(name);
  } catch {
    throw new SealError("not how a link begins");
  }
  return { host, name, key: take(KEY), signature: take(SIGNATURE), header: take(HEADER) };
}
