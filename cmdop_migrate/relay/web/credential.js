// A credential: what the relay admits, and the fleet key to trust (docs/internals/relay-protocol.md). Only claims, their signature
// and proofs made with the seed leave the browser.

import sodium from "./vendor/libsodium-wrappers.mjs";
import { concat } from "./frames.js";

const PREFIX = "cmr1_";
const TEXT_MAX = 8192;
const words = (text) => new TextEncoder().encode(text);
const ISSUED = words("cmdop-migrate relay credential 1\0");
const HELLO = words("cmdop-migrate relay hello 1\0");

// The text is not a credential, or a damaged one. The message is for people, and quotes nothing of it.
export class CredentialError extends Error {}

export const b64 = (bytes) => sodium.to_base64(bytes, sodium.base64_variants.URLSAFE_NO_PADDING);

export function unb64(text, size) {
  const bytes = sodium.from_base64(text, sodium.base64_variants.URLSAFE_NO_PADDING);
  if (size !== undefined && bytes.length !== size) throw new Error("wrong size");
  return bytes;
}

export class Credential {
  #secret;

  // Parse a credential. Throw CredentialError if it is invalid. libsodium must be ready.
  constructor(text) {
    const trimmed = text.trim();
    if (!trimmed.startsWith(PREFIX) || trimmed.length > TEXT_MAX) {
      throw new CredentialError(`This is not a credential: a credential begins with ${PREFIX}`);
    }
    let keys, claims;
    try {
      const table = JSON.parse(sodium.to_string(unb64(trimmed.slice(PREFIX.length))));
      claims = unb64(table.claims);
      this.presented = { claims: table.claims, signature: table.signature };
      this.fleet = unb64(table.fleet, 32);
      this.relay = table.relay ?? null;
      keys = sodium.crypto_sign_seed_keypair(unb64(table.seed, 32));
      const signed = sodium.crypto_sign_verify_detached(
        unb64(table.signature, 64), concat(ISSUED, claims), this.fleet);
      if (!signed) throw new Error("not signed");
      this.claims = JSON.parse(sodium.to_string(claims));
      if (!sodium.memcmp(unb64(this.claims.key, 32), keys.publicKey)) throw new Error("keys do not match");
    } catch {
      throw new CredentialError("The credential is damaged: copy the whole of it, or ask for another.");
    }
    if (this.claims.kind !== "client") throw new CredentialError("This is a host's credential, not a person's.");
    if (this.claims.expires !== null && Date.now() / 1000 >= this.claims.expires) {
      throw new CredentialError("The credential has expired: ask for another.");
    }
    this.#secret = keys.privateKey;
  }

  sign(bytes) {
    return sodium.crypto_sign_detached(bytes, this.#secret);
  }

  // Return the payload of HELLO, the answer to a CHALLENGE.
  hello(nonce) {
    return { ...this.presented, proof: b64(this.sign(concat(HELLO, unb64(nonce, 32)))) };
  }
}
