// The delay before the next attempt: grows with every failure, and is spread at random.

export class Backoff {
  #first; #most; #next;

  constructor(first = 50, most = 5000) {
    this.#first = this.#next = first;
    this.#most = most;
  }

  // Count a failure, and return the milliseconds to wait.
  failed() {
    const now = this.#next;
    this.#next = Math.min(this.#most, now * 2);
    return now / 2 + (Math.random() * now) / 2;
  }

  worked() {
    this.#next = this.#first;
  }
}
