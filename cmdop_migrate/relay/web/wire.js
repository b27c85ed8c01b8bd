// The holder's own frames, inside the sealed channel (holder/protocol.py): kind u8 | length u32 | payload. Pure.

import { concat } from "./frames.js";

export const CONTROL = 0;
export const OUTPUT = 1;
export const MAX_PAYLOAD = 1 << 20;
const HEADER = 5;

export class WireError extends Error {}

export function control(message) {
  const payload = new TextEncoder().encode(JSON.stringify(message));
  const frame = new Uint8Array(HEADER + payload.length);
  new DataView(frame.buffer).setUint32(1, payload.length);
  frame.set(payload, HEADER);
  return frame;
}

export function parseControl(payload) {
  return JSON.parse(new TextDecoder().decode(payload));
}

// Return [number of the first byte, what the session printed].
export function parseOutput(payload) {
  const seq = new DataView(payload.buffer, payload.byteOffset, 8).getBigUint64(0);
  return [Number(seq), payload.subarray(8)];
}

// Return bytes as the text in which JSON carries them to the holder.
export function latin1(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 4096) text += String.fromCharCode(...bytes.subarray(at, at + 4096));
  return text;
}

// Split a stream of bytes into whole frames.
export class Decoder {
  #rest = new Uint8Array(0);

  feed(data) {
    let left = this.#rest.length ? concat(this.#rest, data) : data;
    const found = [];
    while (left.length >= HEADER) {
      const length = new DataView(left.buffer, left.byteOffset, HEADER).getUint32(1);
      const kind = left[0];
      if (kind > 2 || length > MAX_PAYLOAD || (kind === OUTPUT && length < 8)) {
        throw new WireError(`frame of kind ${kind}, ${length} bytes`);
      }
      if (left.length < HEADER + length) break;
      found.push([kind, left.slice(HEADER, HEADER + length)]);
      left = left.subarray(HEADER + length);
    }
    this.#rest = left.slice();
    return found;
  }
}
