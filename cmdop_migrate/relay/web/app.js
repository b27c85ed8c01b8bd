// The page: sign in and out, and select the view that is shown.

import sodium from "./vendor/libsodium-wrappers.mjs";
import { Credential, CredentialError } from "./credential.js";
import { List } from "./list.js";
import { Relay } from "./relay.js";
import { Session } from "./session.js";

const KEPT = "credential"; // in sessionStorage: belongs to this tab and is deleted with it
const VIEWS = ["sign-in", "list", "session"];
const $ = (id) => document.getElementById(id);

export async function start() {
  await sodium.ready;
  $("sign-in-form").addEventListener("submit", (event) => {
    event.preventDefault();
    signIn().catch((error) => complain(error.message));
  });
  $("file").addEventListener("change", () => complain(""));
  $("sign-out").addEventListener("click", signOut);
  const kept = sessionStorage.getItem(KEPT);
  if (kept === null) {
    show("sign-in");
    return;
  }
  try {
    new Page(new Credential(kept));
  } catch (error) {
    refuse(error instanceof CredentialError ? error.message : String(error));
  }
}

function show(view) {
  for (const id of VIEWS) $(id).hidden = id !== view;
}

function complain(message) {
  $("sign-in-error").textContent = message;
  $("sign-in-error").hidden = !message;
}

async function signIn() {
  complain("");
  const [file] = $("file").files;
  const text = $("credential").value.trim() || (file ? await file.text() : "");
  if (!text) throw new CredentialError("Paste a credential, or choose a file.");
  const credential = new Credential(text);
  $("credential").value = "";
  $("sign-in-form").reset();
  sessionStorage.setItem(KEPT, text);
  new Page(credential);
}

// Reload the page: the only sure way to drop everything it holds.
function signOut() {
  sessionStorage.removeItem(KEPT);
  location.replace(location.pathname);
}

function refuse(message) {
  sessionStorage.removeItem(KEPT);
  $("who").hidden = $("sign-out").hidden = true;
  $("link").textContent = "";
  show("sign-in");
  complain(message);
  $("credential").focus();
}

function address(credential) {
  const source = document.querySelector('meta[name="relay"]').content;
  if (source === "credential" && credential.relay) return new URL(credential.relay);
  const own = new URL("./", location.href);
  own.protocol = own.protocol === "https:" ? "wss:" : "ws:";
  own.hash = own.search = "";
  return own;
}

class Page {
  #relay; #list; #session = null;

  constructor(credential) {
    const url = address(credential);
    const { claims } = credential;
    $("where").textContent = url.host;
    $("who").textContent = `${claims.name} (${claims.role})`;
    $("who").hidden = $("sign-out").hidden = false;
    this.#relay = new Relay(url.href, credential);
    this.#list = new List(this.#relay);
    this.#say("connecting …");
    this.#relay.addEventListener("up", () => this.#say(""));
    this.#relay.addEventListener("down", () => this.#say("reconnecting …"));
    this.#relay.addEventListener("refused", ({ detail }) => this.#refused(detail.why));
    addEventListener("hashchange", this.#route);
    addEventListener("beforeunload", (event) => this.#session?.pending && event.preventDefault());
    this.#route();
    this.#relay.start();
  }

  #say(message) {
    $("link").textContent = message;
  }

  #refused(why) {
    removeEventListener("hashchange", this.#route);
    this.#session?.close();
    this.#list.hide();
    refuse(`The relay does not admit this credential: ${why}.`);
  }

  #route = () => {
    const from = this.#session;
    const match = /^#\/s\/([0-9a-f]{24})$/.exec(location.hash);
    this.#session?.close();
    this.#session = null;
    if (match) {
      this.#list.hide();
      show("session");
      this.#session = new Session(this.#relay, match[1], this.#list.nameOf(match[1]));
    } else {
      show("list");
      this.#list.show(from?.session);
    }
  };
}
