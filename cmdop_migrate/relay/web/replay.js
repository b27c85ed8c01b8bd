// Replay old output without its queries: the terminal would answer them, and the answers would be typed into the
// session, which asked long ago.

// The modes of holder/output_ring.py: those that change what a terminal shows or sends.
const TRACKED = new Set([1, 5, 6, 7, 25, 47, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004]);
const AT_START = [7, 25];

// Return the codes that set the modes of a fresh terminal to those at the start of the replay.
export function modeCodes(on) {
  const codes = on.filter((mode) => TRACKED.has(mode) && !AT_START.includes(mode)).map((mode) => `\x1b[?${mode}h`);
  return [...codes, ...AT_START.filter((mode) => !on.includes(mode)).map((mode) => `\x1b[?${mode}l`)].join("");
}

export class Replay {
  #terminal; #end = 0; #shown = 0;

  constructor(terminal) {
    this.#terminal = terminal;
    const { parser } = terminal;
    const question = () => this.isOld; // true: handled, do not answer
    for (const prefix of ["", "?", ">", "="]) {
      for (const final of ["c", "n", "q", "u", "x"]) {
        if (final === "u" && prefix !== "?") continue;
        if (final === "q" && prefix !== ">") continue;
        if (final === "n" && prefix === ">") continue;
        parser.registerCsiHandler(prefix ? { prefix, final } : { final }, question);
      }
      if (prefix === "" || prefix === "?") {
        const asked = { intermediates: "$", final: "p" };
        parser.registerCsiHandler(prefix ? { prefix, ...asked } : asked, question);
      }
    }
    parser.registerCsiHandler({ final: "t" }, ([what]) => this.isOld && what >= 11 && what <= 21);
    parser.registerDcsHandler({ intermediates: "$", final: "q" }, question);
    parser.registerDcsHandler({ intermediates: "+", final: "q" }, question);
    for (const colour of [4, 10, 11, 12, 52]) {
      parser.registerOscHandler(colour, (text) => this.isOld && text.includes("?"));
    }
    parser.registerEscHandler({ final: "Z" }, question);
  }

  begin(end) {
    this.#end = end;
  }

  get isOld() {
    return this.#shown < this.#end;
  }

  // Resolve when the data is on the screen.
  async write(seq, data) {
    const cut = Math.max(0, Math.min(data.length, this.#end - seq));
    for (const piece of [data.subarray(0, cut), data.subarray(cut)]) {
      if (!piece.length) continue;
      await new Promise((done) => this.#terminal.write(piece, done));
      this.#shown = seq += piece.length;
    }
  }
}
