// A row of keys for screens without a keyboard: Esc, Tab, Ctrl (held for the next key), arrows, paste.

const ARROWS = { up: "A", down: "B", right: "C", left: "D" };

export class Keys {
  #terminal; #ctrl; #isHeld = false;

  constructor(terminal, row, type, signal) {
    this.#terminal = terminal;
    this.#ctrl = row.querySelector('[data-key="ctrl"]');
    this.#hold(false);
    // The on-screen keyboard stays open only while the terminal keeps the focus.
    row.addEventListener("pointerdown", (event) => event.target.closest("button") && event.preventDefault(), { signal });
    row.addEventListener("click", (event) => this.#press(event.target.closest("button")?.dataset.key, type), { signal });
  }

  // Return what was typed, combined with Ctrl if it is held.
  held(text) {
    if (!this.#isHeld) return text;
    this.#hold(false);
    const code = text.toUpperCase().charCodeAt(0);
    if (text === " ") return "\0";
    return text.length === 1 && code >= 0x3f && code <= 0x5f ? String.fromCharCode((code === 0x3f ? 0x7f : code & 0x1f)) : text;
  }

  #hold(isHeld) {
    this.#isHeld = isHeld;
    this.#ctrl.setAttribute("aria-pressed", String(isHeld));
  }

  #press(key, type) {
    if (key === undefined) return;
    if (key === "ctrl") this.#hold(!this.#isHeld);
    else if (key === "esc") type("\x1b");
    else if (key === "tab") type("\t");
    else if (key === "paste") navigator.clipboard?.readText().then((text) => this.#terminal.paste(text), () => {});
    else type((this.#terminal.modes.applicationCursorKeysMode ? "\x1bO" : "\x1b[") + ARROWS[key]);
    this.#terminal.focus();
  }
}
