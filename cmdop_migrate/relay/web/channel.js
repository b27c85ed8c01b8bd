// One encrypted channel to one incarnation of a session: credit, sequence numbers, encryption. It opens once and ends
// once.

import { b64 } from "./credential.js";
import { credit, Kind, table, withCredit, withTable } from "./frames.js";
import { ClientSide, OVERHEAD, PIECE, SealError } from "./sealed.js";

export class Channel {
  #relay; #session; #heard; #seal; #number; #window; #credit; #seq = 0; #owed = 0; #waiting = []; #open = false;
  #over = false;

  // `heard`: {status(facts), opened(host, token), data(bytes) -> promise when they are used, closed(code, why)}.
  // `lowest`: an incarnation with a lower fencing token is rejected. The relay must be up.
  constructor(relay, session, lowest, heard) {
    const { credential } = relay;
    this.#relay = relay;
    this.#session = session;
    this.#heard = heard;
    this.#window = this.#credit = relay.welcome.window;
    this.#seal = new ClientSide(session, credential.fleet, (words) => credential.sign(words), lowest);
    this.#number = relay.join((frame) => this.#receive(frame));
    const opening = { handshake: b64(this.#seal.handshake), ...credential.presented };
    relay.send(withTable(Kind.OPEN, opening, { session, channel: this.#number }));
  }

  get isOpen() {
    return this.#open && !this.#over;
  }

  // Send bytes of the holder's protocol, as credit allows.
  say(bytes) {
    for (let at = 0; at < bytes.length; at += PIECE) this.#waiting.push(bytes.subarray(at, at + PIECE));
    this.#flush();
  }

  close() {
    if (this.#over) return;
    const fields = { code: "closed", why: "" };
    this.#relay.send(withTable(Kind.CLOSE, fields, { session: this.#session, channel: this.#number }));
    this.#end();
  }

  #receive(frame) {
    try {
      this.#understand(frame);
    } catch (error) {
      if (!(error instanceof SealError)) throw error;
      this.close();
      this.#heard.closed("sealed", error.message);
    }
  }

  #understand(frame) {
    if (frame === null) this.#closed("lost", "the connection to the relay is lost");
    else if (frame.kind === Kind.DATA) this.#data(frame);
    else if (frame.kind === Kind.CREDIT) {
      this.#credit += credit(frame);
      this.#flush();
    } else if (frame.kind === Kind.STATUS) this.#heard.status(table(frame));
    else if (frame.kind === Kind.CLOSE || frame.kind === Kind.REFUSED) {
      const { code = "lost", why = "" } = table(frame);
      this.#closed(code, why);
    }
  }

  #data({ payload, token }) {
    if (!this.#open) {
      const answer = this.#seal.answer(payload, token);
      this.#open = true;
      this.#send(answer);
      this.#took(payload.length);
      this.#heard.opened(this.#seal.host, token);
      return;
    }
    this.#heard.data(this.#seal.open(payload)).then(() => this.#took(payload.length));
  }

  #took(count) {
    this.#owed += count;
    if (this.#over || this.#owed < this.#window / 4) return;
    this.#relay.send(withCredit(this.#number, this.#owed, this.#session, 0));
    this.#owed = 0;
  }

  #flush() {
    while (this.isOpen && this.#waiting.length && this.#waiting[0].length + OVERHEAD <= this.#credit) {
      this.#send(this.#seal.seal(this.#waiting.shift()));
    }
  }

  #send(payload) {
    this.#credit -= payload.length;
    const number = { session: this.#session, channel: this.#number, seq: this.#seq++ };
    this.#relay.send({ kind: Kind.DATA, ...number, payload });
  }

  #closed(code, why) {
    if (this.#over) return;
    this.#end();
    this.#heard.closed(code, why);
  }

  #end() {
    this.#over = true;
    this.#relay.leave(this.#number);
  }
}
