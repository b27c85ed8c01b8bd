// The list of sessions that this credential covers.

import { chart } from "./chart.js";

const REFRESH_EVERY = 2000; // ms
const $ = (id) => document.getElementById(id);

export class List {
  #relay; #timer = 0; #rows = new Map(); #sessions = [];

  constructor(relay) {
    this.#relay = relay;
    relay.addEventListener("listing", ({ detail }) => this.#listed(detail));
    relay.addEventListener("up", () => this.#timer && relay.list());
    for (const one of ["filter", "ended"]) $(one).addEventListener("input", () => this.#filter());
  }

  // `from`: the session that was shown before; its row gets the focus.
  show(from) {
    this.hide();
    this.#rows.get(from)?.querySelector(".name").focus();
    this.#relay.list();
    this.#timer = setInterval(() => document.hidden || this.#relay.list(), REFRESH_EVERY);
  }

  hide() {
    clearInterval(this.#timer);
    this.#timer = 0;
  }

  nameOf(session) {
    return this.#sessions.find((one) => one.session === session)?.name ?? session.slice(0, 12);
  }

  #listed(sessions) {
    for (const one of sessions) one.name ??= one.session.slice(0, 12); // no host has registered it yet
    this.#sessions = sessions.sort((a, b) => a.name.localeCompare(b.name) || a.session.localeCompare(b.session));
    const seen = new Set(sessions.map((one) => one.session));
    for (const [session, row] of this.#rows) {
      if (!seen.has(session)) {
        row.remove();
        this.#rows.delete(session);
      }
    }
    // Existing rows stay the same elements: focus and open details are kept.
    let before = null;
    for (const one of this.#sessions) {
      const row = this.#row(one);
      const place = before ? before.nextSibling : $("sessions").firstChild;
      if (row !== place) $("sessions").insertBefore(row, place);
      before = row;
    }
    this.#filter();
  }

  #row(one) {
    let row = this.#rows.get(one.session);
    if (!row) {
      row = $("session-row").content.firstElementChild.cloneNode(true);
      row.querySelector(".name").href = `#/s/${one.session}`;
      this.#rows.set(one.session, row);
    }
    const known = JSON.stringify(one);
    if (row.known !== known) {
      row.known = known;
      fill(row, one);
    }
    return row;
  }

  #filter() {
    const filter = $("filter").value.trim().toLowerCase();
    const ended = $("ended").checked;
    const known = this.#sessions.filter((one) => ended || one.state !== "exited");
    let shown = 0;
    for (const one of this.#sessions) {
      const text = `${one.name} ${one.host ?? ""} ${one.state} ${one.session}`.toLowerCase();
      const row = this.#rows.get(one.session);
      row.hidden = !known.includes(one) || !text.includes(filter);
      shown += !row.hidden;
    }
    $("count").textContent = shown < known.length ? `${shown} of ${known.length}` : shown || "";
    $("nothing").hidden = shown > 0;
    $("nothing").textContent = known.length
      ? "No session matches." : "The relay knows no session that this credential covers.";
  }
}

function fill(row, one) {
  const put = (place, text) => (row.querySelector(place).textContent = text);
  put(".name", one.name);
  put(".state", one.state === "moving" && one.to ? `moving to ${one.to}` : one.state);
  row.querySelector(".state").dataset.state = one.routed ? "running" : one.state;
  put(".host", one.host ?? "–");
  put(".token", one.token);
  put(".clients", one.clients);
  const moved = row.querySelector(".moved");
  const open = moved.querySelector("details")?.open ?? false;
  moved.replaceChildren(...(one.moved ? [chart(one.moved, open)] : []));
}
