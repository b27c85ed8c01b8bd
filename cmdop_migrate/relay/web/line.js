// A client's view of one session, which lasts through moves, lost connections and restarts of the relay. Output is
// numbered and is shown once and in order; input is numbered, too, and kept until it is applied (docs/internals/relay-protocol.md).

import { Backoff } from "./backoff.js";
import { Channel } from "./channel.js";
import { concat, hex } from "./frames.js";
import { control, CONTROL, Decoder, latin1, OUTPUT, parseControl, parseOutput } from "./wire.js";

const UNAPPLIED_MAX = 64 << 10; // bytes sent that are not applied yet
const PENDING_MAX = 1 << 20; // together with those not sent yet: a large paste
const STEP = 4096; // bytes of input in one message: JSON may make six of one
// Codes after which no other attempt is made, and the message for the person.
const FINAL = {
  no_session: () => "No such session for this credential.",
  exited: () => "The session has ended.",
  not_admitted: (why) => `Not admitted: ${why}.`,
  sealed: (why) =>
    `What came over the relay is not from a host of this fleet (${why}). Someone on the way, or the relay, has replaced it.`,
};

export class Line {
  #relay; #session; #view; #size; #readOnly; #channel = null; #decoder = null; #closed = false;
  #backoff = new Backoff(); #retry = 0;
  #next = null; #lowest = 0; #isNew = false; #attached = false;
  #stream = hex(crypto.getRandomValues(new Uint8Array(8))); #applied = 0; #sent = 0; #pending = new Uint8Array(0);

  // `view`: {replay(end, modes): output up to that number is old; output(seq, data) -> promise when it is shown;
  // state(facts), note(words), turn(facts), ended(words)}.
  constructor(relay, session, view, size, readOnly) {
    this.#relay = relay;
    this.#session = session;
    this.#view = view;
    this.#size = size;
    this.#readOnly = readOnly;
    this.#state("connecting");
    relay.addEventListener("up", this.#open);
    this.#open();
  }

  close() {
    this.#closed = true;
    this.#relay.removeEventListener("up", this.#open);
    clearTimeout(this.#retry);
    this.#channel?.close();
    this.#channel = null;
  }

  // Return the number of typed bytes that are not applied yet.
  get pending() {
    return this.#pending.length;
  }

  // Take typed bytes. Return false if there is no room; then nothing was taken.
  type(bytes) {
    if (this.#readOnly || this.#closed || this.#pending.length + bytes.length > PENDING_MAX) return false;
    this.#pending = concat(this.#pending, bytes);
    this.#flush();
    return true;
  }

  resize(rows, cols) {
    this.#size = { rows, cols };
    if (this.#attached && !this.#readOnly) this.#ask({ op: "resize", rows, cols });
  }

  // Change the window size and back: a full-screen program repaints itself then.
  repaint() {
    const { rows, cols } = this.#size;
    if (rows > 1) this.#ask({ op: "resize", rows: rows - 1, cols });
    this.#ask({ op: "resize", rows, cols });
  }

  turn(what, more = {}) {
    if (this.#attached) this.#ask({ op: "turn", do: what, ...more });
  }

  #state(state, more = {}) {
    this.#view.state({ state, ...more });
  }

  #ask(message) {
    if (this.#channel?.isOpen) this.#channel.say(control(message));
  }

  #open = () => {
    clearTimeout(this.#retry);
    if (this.#closed || this.#channel !== null || !this.#relay.isUp) return;
    this.#decoder = new Decoder();
    this.#channel = new Channel(this.#relay, this.#session, this.#lowest, {
      status: (facts) => facts.state !== "routed" && this.#state(facts.state, facts),
      opened: (host, token) => this.#opened(host, token),
      data: (bytes) => this.#data(bytes),
      closed: (code, why) => this.#lost(code, why),
    });
  };

  #opened(host, token) {
    this.#isNew = token !== this.#lowest && this.#lowest !== 0;
    this.#lowest = token;
    this.host = host;
    this.#attach();
  }

  #attach() {
    const typing = this.#readOnly ? { read_only: true } : { stream: this.#stream, ...this.#size };
    this.#ask({ op: "attach", from: this.#next, terminal: true, actor: "", ...typing });
  }

  #lost(code, why) {
    const worked = this.#attached;
    this.#channel = null;
    this.#attached = false;
    if (this.#closed) return;
    if (code in FINAL) {
      this.#end(FINAL[code](why));
      return;
    }
    if (!this.#relay.isUp) {
      this.#state("reconnecting");
      return; // "up" opens the next channel
    }
    this.#state(code === "moved" ? "moving" : "reconnecting", { why });
    this.#retry = setTimeout(this.#open, worked ? 0 : this.#backoff.failed());
  }

  #end(words) {
    this.close();
    this.#view.ended(words);
  }

  // Resolve when all of it was used: the credit for more is given then.
  async #data(bytes) {
    const used = [];
    for (const [kind, payload] of this.#decoder.feed(bytes)) {
      if (kind === OUTPUT) used.push(this.#output(...parseOutput(payload)));
      else if (kind === CONTROL) this.#heard(parseControl(payload));
    }
    await Promise.all(used);
  }

  #output(seq, data) {
    if (!this.#attached) return undefined; // from an attach that will be repeated
    const fresh = data.subarray(Math.max(0, Math.min(data.length, this.#next - seq)));
    this.#next = seq + data.length;
    return fresh.length ? this.#view.output(this.#next - fresh.length, fresh) : undefined;
  }

  #heard(message) {
    if (message.re === "attach") this.#onAttach(message);
    else if (message.re === "turn" || message.event === "turn") this.#view.turn(message);
    else if (message.event === "applied") this.#onApplied(message.at);
    else if (message.event === "refused") this.#onRefused(message);
    else if (message.event === "lost") this.#onLost(message);
    else if (message.event === "moving") this.#state("moving", { to: message.to });
    else if (message.event === "stays") this.#live();
    else if (message.event === "fenced" || message.event === "unfenced") {
      this.#view.note(`the session ${message.event === "fenced" ? "is frozen" : "resumes"}: ${message.why}`);
    } else if (message.event === "exit") {
      this.#onExit(message);
    } else if (message.error === "not_admitted" && message.re !== "turn") {
      this.#view.note("this credential may not do that");
    }
  }

  #onAttach({ error, start, end, since = 0, applied = 0, modes = [] }) {
    const kept = error === "range" ? end : since;
    if (this.#next !== null && (error === "range" || this.#isNew) && kept < this.#next) {
      // The session was restored from a state before the output we have seen, and has printed other bytes since.
      this.#view.note(`${this.#next - kept} bytes of its output were undone with the host that died`);
      this.#next = kept;
      this.#isNew = false;
      this.#attach();
      return;
    }
    if (error !== undefined) {
      this.#end(`Not admitted: ${error}.`);
      return;
    }
    if (this.#next === null) {
      this.#next = start;
      this.#view.replay(end, modes);
    }
    this.#undone(applied);
    this.#attached = true;
    this.#isNew = false;
    this.#backoff.worked();
    this.#sent = 0;
    this.#view.turn({ holder: null }); // an event with its holder follows, if it is taken
    this.#live();
    this.#onApplied(applied);
  }

  // Number the kept bytes from `applied`: the session has less input than it reported as applied.
  #undone(applied) {
    if (applied >= this.#applied) return;
    this.#view.note(`${this.#applied - applied} bytes you typed were undone with the host that died`);
    this.#applied = applied;
  }

  #live() {
    this.#state("live", { host: this.host, token: this.#lowest });
  }

  #onLost({ from, bytes }) {
    if (!this.#attached) return;
    this.#next = from + bytes;
    this.#view.note(`${bytes} bytes of output were too much to keep`);
  }

  // The session has ended; or only this incarnation, and it continues on another host or from the store.
  #onExit({ code, reason, checkpoint }) {
    if (checkpoint != null) this.#state("parked");
    else if (code === null || reason.startsWith("superseded")) this.#state("moving");
    else this.#end(`The session has ended: ${reason}.`);
  }

  #onApplied(at) {
    this.#pending = this.#pending.slice(Math.max(0, at - this.#applied));
    this.#applied = Math.max(this.#applied, at);
    this.#sent = Math.max(this.#sent, this.#applied);
    this.#flush();
  }

  #onRefused({ why, at, bytes, holder, reason }) {
    if (why === "gap") {
      this.#undone(at);
      this.#sent = at;
      this.#flush();
    } else if (why === "turn") {
      this.#view.note(`${holder} has the write turn: what you typed went nowhere`);
    } else {
      this.#view.note(reason ?? `${bytes} bytes you typed went nowhere${why ? `: ${why}` : ""}`);
    }
  }

  #flush() {
    if (!this.#attached) return;
    const end = this.#applied + Math.min(this.#pending.length, UNAPPLIED_MAX);
    while (this.#sent < end) {
      const at = this.#sent - this.#applied;
      const piece = this.#pending.subarray(at, Math.min(at + STEP, end - this.#applied));
      this.#ask({ op: "type", at: this.#sent, data: latin1(piece) });
      this.#sent += piece.length;
    }
  }
}
