// The connection to the relay, made again whenever it is lost, and the channels on it.
//
// Events (addEventListener): "up"; "down"; "listing" with detail = sessions; "refused" with detail = {code, why}: the
// relay does not admit this credential, and no other attempt is made.

import { Backoff } from "./backoff.js";
import { decode, encode, Kind, table, withTable } from "./frames.js";

const SILENT_BEATS = 3;
const DIAL_TIMEOUT = 10_000;

export class Relay extends EventTarget {
  #url; #socket = null; #channels = new Map(); #last = 0; #listing = [];
  #backoff = new Backoff(); #retry = 0; #heard = 0; #said = 0; #watch = 0; #over = false;

  constructor(url, credential) {
    super();
    this.#url = url;
    this.credential = credential;
    this.welcome = null;
  }

  get isUp() {
    return this.welcome !== null;
  }

  start() {
    // After a suspend, or when the network is back, do not wait for a timer.
    addEventListener("online", this.#look);
    document.addEventListener("visibilitychange", this.#look);
    this.#watch = setInterval(this.#look, 1000);
    this.#dial();
  }

  stop() {
    this.#over = true;
    removeEventListener("online", this.#look);
    document.removeEventListener("visibilitychange", this.#look);
    clearInterval(this.#watch);
    clearTimeout(this.#retry);
    this.#drop();
  }

  list() {
    if (this.isUp) this.send({ kind: Kind.LIST });
  }

  // Return a number for a channel; `heard` gets its frames, and null when the connection is lost.
  join(heard) {
    do this.#last = (this.#last % 0xffffffff) + 1; while (this.#channels.has(this.#last));
    this.#channels.set(this.#last, heard);
    return this.#last;
  }

  leave(number) {
    this.#channels.delete(number);
  }

  send(frame) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return;
    this.#said = Date.now();
    this.#socket.send(encode(frame));
  }

  #dial() {
    const socket = new WebSocket(this.#url);
    socket.binaryType = "arraybuffer";
    this.#socket = socket;
    this.#heard = Date.now();
    socket.onmessage = (event) => this.#socket === socket && this.#take(event.data);
    socket.onclose = () => this.#socket === socket && this.#lost();
  }

  #take(data) {
    this.#heard = Date.now();
    try {
      if (typeof data === "string") throw new Error("a text message: this is not a relay");
      this.#receive(decode(new Uint8Array(data)));
    } catch (error) {
      console.warn("relay:", error);
      this.#lost();
    }
  }

  #receive(frame) {
    const heard = this.#channels.get(frame.channel);
    if (frame.kind === Kind.CHALLENGE) {
      this.send(withTable(Kind.HELLO, this.credential.hello(table(frame).nonce)));
    } else if (frame.kind === Kind.WELCOME) {
      const welcome = table(frame);
      if (!(welcome.window >= 1024) || !(welcome.beat > 0)) throw new Error("invalid window or heartbeat interval");
      this.welcome = welcome;
      this.#backoff.worked();
      this.dispatchEvent(new Event("up"));
    } else if (frame.kind === Kind.REFUSED && frame.channel === 0) {
      this.#refused(table(frame));
    } else if (frame.kind === Kind.LISTING) {
      this.#listed(table(frame));
    } else if (heard !== undefined) {
      heard(frame);
    }
    // Send the heartbeat on receipt, not by a timer: timers of a page in the background are slow, messages are not.
    if (this.isUp && Date.now() - this.#said > this.welcome.beat * 500) this.send({ kind: Kind.BEAT });
  }

  #listed({ sessions = [], more = false }) {
    this.#listing.push(...sessions);
    if (more) return;
    const detail = this.#listing;
    this.#listing = [];
    this.dispatchEvent(new CustomEvent("listing", { detail }));
  }

  // The connection has ended. Dial again, except after an invalid credential.
  #refused({ code, why }) {
    if (code !== "not_admitted") {
      this.#lost();
      return;
    }
    this.stop();
    this.dispatchEvent(new CustomEvent("refused", { detail: { code, why } }));
  }

  #look = () => {
    if (this.#over) return;
    const limit = this.isUp ? this.welcome.beat * SILENT_BEATS * 1000 : DIAL_TIMEOUT;
    if (this.#socket !== null && Date.now() - this.#heard > limit) this.#lost();
    else if (this.isUp && Date.now() - this.#said > this.welcome.beat * 500) this.send({ kind: Kind.BEAT });
  };

  #lost() {
    const wasUp = this.isUp;
    this.#drop();
    if (this.#over) return;
    this.#retry = setTimeout(() => this.#dial(), this.#backoff.failed());
    if (wasUp) this.dispatchEvent(new Event("down"));
  }

  #drop() {
    const socket = this.#socket;
    this.#socket = null;
    this.welcome = null;
    this.#listing = [];
    socket?.close();
    const heard = [...this.#channels.values()];
    this.#channels.clear();
    for (const receive of heard) receive(null);
  }
}
