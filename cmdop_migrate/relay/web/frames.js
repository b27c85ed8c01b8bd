// Frames between relay and client: one binary WebSocket message each (docs/internals/relay-protocol.md). Pure.

export const VERSION = 1;
export const HEADER_SIZE = 34;
export const PAYLOAD_MAX = 64 << 10;
export const Kind = Object.freeze({
  CHALLENGE: 1, HELLO: 2, WELCOME: 3, REFUSED: 4, REGISTER: 5, REGISTERED: 6, LEAVE: 7, LIST: 8, LISTING: 9,
  OPEN: 10, DATA: 11, CREDIT: 12, CLOSE: 13, STATUS: 14, BEAT: 15, MOVED: 16,
});
const LAST_KIND = Math.max(...Object.values(Kind));
const EMPTY = new Uint8Array(0);

// A message is not a valid frame: the peer does not speak this protocol.
export class FrameError extends Error {}

// Return the bytes of a frame. `session`: 24 hex digits, or empty for none.
export function encode({ kind, session = "", token = 0, seq = 0, channel = 0, payload = EMPTY }) {
  if (payload.length > PAYLOAD_MAX) throw new FrameError(`a payload of ${payload.length} bytes`);
  const data = new Uint8Array(HEADER_SIZE + payload.length);
  const view = new DataView(data.buffer);
  view.setUint8(0, VERSION);
  view.setUint8(1, kind);
  view.setUint32(2, channel);
  if (session) data.set(sessionBytes(session), 6);
  view.setBigUint64(18, BigInt(token));
  view.setBigUint64(26, BigInt(seq));
  data.set(payload, HEADER_SIZE);
  return data;
}

export function decode(data) {
  if (data.length < HEADER_SIZE || data.length > HEADER_SIZE + PAYLOAD_MAX) {
    throw new FrameError(`a message of ${data.length} bytes`);
  }
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  if (view.getUint8(0) !== VERSION) throw new FrameError(`version ${view.getUint8(0)}`);
  const kind = view.getUint8(1);
  if (kind < 1 || kind > LAST_KIND) throw new FrameError(`unknown kind ${kind}`);
  const session = hex(data.subarray(6, 18));
  return {
    kind,
    session: /^0*$/.test(session) ? "" : session,
    token: number(view.getBigUint64(18)),
    seq: number(view.getBigUint64(26)),
    channel: view.getUint32(2),
    payload: data.subarray(HEADER_SIZE),
  };
}

// Return the payload as a JSON object; an empty payload is an empty object.
export function table(frame) {
  if (!frame.payload.length) return {};
  let found = null;
  try {
    found = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(frame.payload));
  } catch {
    throw new FrameError("the payload is not JSON");
  }
  if (typeof found !== "object" || found === null || Array.isArray(found)) throw new FrameError("not a JSON object");
  return found;
}

export function withTable(kind, fields, more = {}) {
  return { kind, ...more, payload: new TextEncoder().encode(JSON.stringify(fields)) };
}

export function withCredit(channel, count, session, token) {
  const payload = new Uint8Array(4);
  new DataView(payload.buffer).setUint32(0, count);
  return { kind: Kind.CREDIT, channel, session, token, payload };
}

export function credit(frame) {
  if (frame.payload.length !== 4) throw new FrameError("a credit is four bytes");
  return new DataView(frame.payload.buffer, frame.payload.byteOffset, 4).getUint32(0);
}

export function sessionBytes(session) {
  if (!/^[0-9a-f]{24}$/.test(session)) throw new FrameError("not a session id");
  return Uint8Array.from(session.match(/../g), (pair) => parseInt(pair, 16));
}

export function hex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function concat(...parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

// Numbers of this protocol grow by one each time and stay far below 2^53.
function number(value) {
  if (value > BigInt(Number.MAX_SAFE_INTEGER)) throw new FrameError("a number out of range");
  return Number(value);
}
