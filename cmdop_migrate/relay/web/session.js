// The view of one session: a terminal, a status line, and keys for devices without a keyboard.

import { FitAddon } from "./vendor/addon-fit.mjs";
import { Terminal } from "./vendor/xterm.mjs";
import { Keys } from "./keys.js";
import { Line } from "./line.js";
import { modeCodes, Replay } from "./replay.js";
import { follow } from "./theme.js";

const $ = (id) => document.getElementById(id);
const FULL_SCREEN = "alternate";
const TITLE = document.title;

export class Session {
  #terminal; #fit; #line; #keys; #replay; #claims; #facts = { state: "connecting" }; #over = new AbortController();

  constructor(relay, session, name) {
    const { signal } = this.#over;
    this.session = session;
    this.#claims = relay.credential.claims;
    const readOnly = this.#claims.role === "read";
    this.#call(name);
    // After a link or a reload the list has not been shown, and the name is not known.
    relay.addEventListener("listing", ({ detail }) => this.#call(detail.find((one) => one.session === session)?.name), { signal });
    relay.addEventListener("up", () => relay.list(), { signal });
    $("keys").hidden = readOnly;
    this.#terminal = new Terminal({
      cursorBlink: true, lineHeight: 1.1, scrollback: 10_000, disableStdin: readOnly, fontSize: innerWidth < 640 ? 12 : 14,
      fontFamily: 'ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace',
    });
    this.#fit = new FitAddon();
    this.#replay = new Replay(this.#terminal);
    follow(this.#terminal, signal);
    this.#terminal.loadAddon(this.#fit);
    this.#terminal.open($("terminal"));
    this.#fit.fit();
    this.#keys = new Keys(this.#terminal, $("keys"), (text) => this.#type(text), signal);
    const size = { rows: this.#terminal.rows, cols: this.#terminal.cols };
    $("turn-buttons").hidden = false;
    this.#turn({ holder: null });
    this.#line = new Line(relay, session, this, size, readOnly);
    this.#listen(signal);
    this.#terminal.focus();
  }

  get pending() {
    return this.#line.pending;
  }

  close() {
    document.title = TITLE;
    this.#line.close();
    this.#over.abort();
    this.#terminal.dispose();
    $("terminal").replaceChildren();
    $("status").textContent = "";
  }

  #call(name) {
    if (name === undefined) return;
    $("name").textContent = name;
    document.title = `${name} – ${TITLE}`;
  }

  #listen(signal) {
    const terminal = this.#terminal;
    terminal.onData((text) => this.#type(this.#keys.held(text)));
    terminal.onBinary((text) => this.#line.type(Uint8Array.from(text, (one) => one.charCodeAt(0))));
    terminal.onResize(({ rows, cols }) => this.#line.resize(rows, cols));
    terminal.attachCustomKeyEventHandler((event) => this.#shortcut(event));
    const observer = new ResizeObserver(() => this.#fit.fit());
    observer.observe($("terminal"));
    signal.addEventListener("abort", () => observer.disconnect());
    for (const button of document.querySelectorAll("[data-turn]")) {
      button.addEventListener("click", () => this.#line.turn(button.dataset.turn), { signal });
    }
  }

  #shortcut(event) {
    if (event.type !== "keydown" || !event.ctrlKey || !event.shiftKey) return true;
    if (event.code === "KeyL") {
      event.preventDefault();
      location.hash = "#/";
      return false;
    }
    if (event.code === "KeyC" && this.#terminal.hasSelection()) {
      event.preventDefault();
      navigator.clipboard?.writeText(this.#terminal.getSelection());
      return false;
    }
    return true;
  }

  #type(text) {
    if (this.#claims.role === "read" || this.#facts.state === "ended") return;
    if (!this.#line.type(new TextEncoder().encode(text))) this.note("too much input at once: nothing was sent");
  }

  // Callbacks of the line.

  replay(end, modes) {
    this.#replay.begin(end);
    this.#terminal.write(modeCodes(modes));
  }

  async output(seq, data) {
    const wasOld = this.#replay.isOld;
    await this.#replay.write(seq, data);
    const isLive = wasOld && !this.#replay.isOld;
    if (isLive && this.#terminal.buffer.active.type === FULL_SCREEN && this.#claims.role !== "read") this.#line.repaint();
  }

  state(facts) {
    if (facts.state === "moving" && !facts.to && this.#facts.to) facts = { ...facts, to: this.#facts.to };
    this.#facts = facts;
    $("status").dataset.state = facts.state;
    $("status").textContent = this.#words(facts);
  }

  note(words) {
    this.#terminal.write(`\r\n\x1b[0;7m[${printable(words)}]\x1b[0m\r\n`);
  }

  turn(facts) {
    if (facts.error) {
      this.note(facts.why ?? `the turn: ${facts.error}`);
      return;
    }
    this.#turn(facts);
  }

  ended(words) {
    this.state({ state: "ended", words });
    $("turn-buttons").hidden = true;
    this.#terminal.options.disableStdin = true;
    this.#terminal.options.cursorBlink = false;
  }

  #turn({ holder = null, frozen = false }) {
    const { name, role } = this.#claims;
    const who = holder === name ? "You have" : `${holder} has`;
    $("turn").textContent = holder === null ? "" : `${who} the turn${frozen ? "; the session is frozen" : ""}`;
    const shown = { request: holder !== name, release: holder === name, seize: role === "admin" && holder !== name };
    for (const button of document.querySelectorAll("[data-turn]")) {
      button.hidden = role === "read" || !shown[button.dataset.turn];
    }
  }

  #words({ state, host, token, to, words }) {
    const readOnly = this.#claims.role === "read" ? ", read-only" : "";
    const known = {
      connecting: "connecting …",
      reconnecting: "reconnecting … what you type is kept",
      waiting: "waiting for a host to restore it … what you type is kept",
      parked: "parked in the store until it is restored",
      moving: `moving${to ? ` to ${to}` : ""} … what you type is kept`,
      live: `on ${host}, token ${token}${readOnly}`,
      ended: words,
    };
    return known[state] ?? state;
  }
}

// Drop control characters: actors choose their names.
function printable(words) {
  return words.replace(/\p{C}/gu, "");
}
