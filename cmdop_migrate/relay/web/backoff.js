// How long to wait before the next try: grows with every failure, and is spread.

export class Backoff {
  #first; #most; #next;

  constructor(first = 50, most = 5000) {
    this.#first = this.#next = first;
    this.#most = most;
  }

  // Milliseconds to wait now.
  failed() {
    const now = this.#next;
    this.#next = Math.min(this.#most, now * 2);
    return now / 2 + (Math.random() * now) / 2;
  }

  worked() {
    this.#next = this.#first;
  }
}
