import { NetworkError } from "./errors.js";

/** Waits; rejects with the reason of the signal as soon as that is aborted. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const aborted = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", aborted);
      resolve();
    }, ms);
    signal?.addEventListener("abort", aborted, { once: true });
  });
}

/**
 * The promise, or the reason of the signal as soon as that is aborted. Node may forget to abort the body of an answer
 * whose head has arrived: its fetch holds the signal by a weak reference.
 */
export function unlessAborted<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const aborted = () => reject(signal.reason);
    if (signal.aborted) aborted();
    else signal.addEventListener("abort", aborted, { once: true });
    promise.then(resolve, reject).finally(() => signal.removeEventListener("abort", aborted));
  });
}

/** A signal that is aborted with another one, or when its time is over. */
export class Timeout {
  readonly #controller = new AbortController();
  readonly #outer: AbortSignal | undefined;
  readonly #ms: number;
  readonly #message: string;
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** When the time is over, the reason is a NetworkError with this message. */
  constructor(outer: AbortSignal | undefined, ms: number, message: string) {
    this.#outer = outer;
    this.#ms = ms;
    this.#message = message;
    if (outer?.aborted) this.#abort();
    else outer?.addEventListener("abort", this.#abort, { once: true });
    this.restart();
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** Starts the time again. */
  restart(): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#controller.abort(new NetworkError(`${this.#message} within ${this.#ms} ms`));
    }, this.#ms);
  }

  /** Ends what uses the signal, and the timer. */
  end(): void {
    clearTimeout(this.#timer);
    this.#outer?.removeEventListener("abort", this.#abort);
    this.#controller.abort();
  }

  readonly #abort = () => this.#controller.abort(this.#outer?.reason);
}

/**
 * How long to wait before a try, in ms: as the server asks, else longer each time, and at least `leastMs`. Random, so
 * that clients spread.
 */
export function pauseBefore(failures: number, retryAfter?: number, leastMs = 0): number {
  if (retryAfter !== undefined) {
    return retryAfter * 1000 + Math.random() * Math.min(retryAfter * 250, 1000);
  }
  const random = Math.random();
  return Math.max((0.5 + random / 2) * Math.min(500 * 2 ** (failures - 1), 10_000), leastMs * (1 + random / 4));
}
