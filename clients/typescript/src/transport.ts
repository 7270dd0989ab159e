// One request and its answer, and the rules by which requests are repeated.

import { NetworkError, OutcomeUnknownError, ProblemError } from "./errors.js";
import { pauseBefore, sleep, Timeout, unlessAborted } from "./time.js";

export interface ClientOptions {
  /** Where the API is, without `/v1`; "" in a page of the same origin. */
  baseUrl: string;
  /**
   * The buyer's token (JWT), or a cashier's, or a function that returns it. When the server refuses a token, the function
   * is called once more with that token and should return a fresh one.
   */
  token?: string | ((refused?: string) => string | Promise<string>);
  /** The buyer's id, for a server that identifies buyers by a header; `dev` does. */
  user?: string;
  /** Name of that header, `X-User-ID` by default. */
  userHeader?: string;
  /** A fetch to use in place of the global one. */
  fetch?: typeof fetch;
  /** How long one request may take, 15,000 ms by default; time that the server was asked to wait is added. */
  timeoutMs?: number;
  /** How often a call is tried, 8 by default. */
  tries?: number;
  /** How long a call may take with all its tries and pauses, 60,000 ms by default. */
  deadlineMs?: number;
}

export interface CallOptions {
  signal?: AbortSignal;
  tries?: number;
  deadlineMs?: number;
}

export interface Request {
  method: "GET" | "POST";
  /** Below the base URL, with its query. */
  path: string;
  headers?: Record<string, string>;
  body?: unknown;
}

export interface Answer {
  status: number;
  headers: Headers;
  json: object;
}

/** How to repeat a call. */
export interface Repeats extends CallOptions {
  /**
   * The call changes something, and its answer has this member: after a try without an answer of Stampede, its outcome
   * is unknown.
   */
  changes?: "order_id" | "state";
  key?: string;
  /** A problem that is worth a repeat in this call, beside those of `isTemporary`. */
  alsoRepeat?: string;
  /** Wait for the opening of the sale; tries and deadline count from then on. */
  waitForOpening?: boolean;
}

/** No answer, or one that asks for a repeat of the same request. All other problems are final. */
export function isTemporary(error: unknown): error is ProblemError | NetworkError {
  if (error instanceof ProblemError) return [429, 502, 503, 504].includes(error.status);
  return error instanceof NetworkError;
}

/**
 * The request may have had its effect: no answer of Stampede came back, or one that says so. 502 and 504 are a proxy's,
 * whatever they say.
 */
function mayHaveHappened(error: unknown): boolean {
  if (!(error instanceof ProblemError)) return error instanceof NetworkError;
  return [502, 504].includes(error.status) || error.slug === "" || error.slug === "outcome-unknown";
}

/** The answer knows of earlier tries of the same request; a refused token, for example, does not. */
function isDecision(error: unknown): boolean {
  return error instanceof ProblemError && error.slug !== "" && [404, 409, 410, 422].includes(error.status);
}

export class Transport {
  readonly #options: ClientOptions;

  constructor(options: ClientOptions) {
    this.#options = { ...options, baseUrl: options.baseUrl.replace(/\/+$/, "") };
  }

  /** Sends a request, and repeats it by the rules until there is an answer. */
  async call(request: Request, repeats: Repeats, extraMs = 0): Promise<Answer> {
    const tries = repeats.tries ?? this.#options.tries ?? 8;
    const deadlineMs = repeats.deadlineMs ?? this.#options.deadlineMs ?? 60_000;
    const timeoutMs = (this.#options.timeoutMs ?? 15_000) + extraMs;
    const { signal, key } = repeats;
    let until = Date.now() + deadlineMs;
    let unknown = false;
    const failed = (error: unknown) =>
      unknown && repeats.changes !== undefined && !isDecision(error) ? new OutcomeUnknownError(key, error) : error;

    for (let failures = 1; ; failures++) {
      signal?.throwIfAborted();
      let error: unknown;
      try {
        const answer = await this.#tryOnce(request, signal, Math.min(timeoutMs, until - Date.now()));
        if (repeats.changes === undefined || repeats.changes in answer.json) return answer;
        error = new NetworkError("the answer is not Stampede's");
      } catch (e) {
        error = e;
      }
      const unsure = mayHaveHappened(error);
      unknown ||= unsure || signal?.aborted === true;
      const problem = error instanceof ProblemError ? error : undefined;
      let pause = pauseBefore(failures, problem?.retryAfter);
      if (problem?.slug === "sale-not-open" && repeats.waitForOpening) {
        // The server's seconds, not opens_at: the clock of this machine may be wrong.
        pause = (problem.retryAfter ?? 1) * 1000;
        until = Date.now() + pause + deadlineMs;
        failures = 0;
      } else if (
        !isTemporary(error) &&
        !(unsure && repeats.changes !== undefined) &&
        (problem === undefined || problem.slug !== repeats.alsoRepeat)
      ) {
        throw failed(error);
      }
      if (failures >= tries || Date.now() + pause >= until) throw failed(error);
      try {
        await sleep(pause, signal);
      } catch (aborted) {
        throw failed(aborted);
      }
    }
  }

  /** The members of a list, page after page. */
  async *list<Item>(
    path: string,
    name: string,
    query: Record<string, string | number | undefined>,
    options: CallOptions,
  ): AsyncGenerator<Item, void, undefined> {
    const parameters = new URLSearchParams();
    for (const [name, value] of Object.entries(query)) if (value !== undefined) parameters.set(name, String(value));
    for (;;) {
      const { json } = await this.call({ method: "GET", path: `${path}?${parameters}` }, options);
      yield* (json as Record<string, Item[]>)[name] ?? [];
      const { next_cursor: next } = json as { next_cursor?: string };
      if (next === undefined) return;
      parameters.set("cursor", next);
    }
  }

  /** Sends a request once. Throws ProblemError or NetworkError, or the reason of the aborted signal. */
  async #tryOnce(request: Request, signal: AbortSignal | undefined, timeoutMs: number): Promise<Answer> {
    const timeout = new Timeout(signal, timeoutMs, "no answer");
    try {
      const response = await this.open(request, timeout.signal);
      return { status: response.status, headers: response.headers, json: await readJSON(response, timeout.signal) };
    } catch (error) {
      signal?.throwIfAborted();
      throw error;
    } finally {
      timeout.end();
    }
  }

  /** Sends a request and returns its answer with an open body. Throws ProblemError or NetworkError. */
  async open(request: Request, signal: AbortSignal): Promise<Response> {
    const { token, user, userHeader = "X-User-ID" } = this.#options;
    let bearer = typeof token === "function" ? await token() : token;
    for (let refreshed = false; ; refreshed = true) {
      const headers: Record<string, string> = { Accept: "application/json", ...request.headers };
      if (bearer !== undefined) headers["Authorization"] = `Bearer ${bearer}`;
      if (user !== undefined) headers[userHeader] = user;
      if (request.body !== undefined) headers["Content-Type"] = "application/json";
      const init: RequestInit = { method: request.method, headers, signal, redirect: "error" };
      if (request.body !== undefined) init.body = JSON.stringify(request.body);
      const response = await unlessAborted(this.#fetch(request.path, init), signal);
      if (response.ok) return response;
      const problem = await readProblem(response, signal);
      // The answer 401 to a token means that it is not valid, or not any more. The request was not processed.
      if (problem.status !== 401 || typeof token !== "function" || refreshed) throw problem;
      bearer = await token(bearer);
    }
  }

  async #fetch(path: string, init: RequestInit): Promise<Response> {
    try {
      return await (this.#options.fetch ?? globalThis.fetch)(this.#options.baseUrl + path, init);
    } catch (error) {
      throw new NetworkError("no answer from the server", { cause: error });
    }
  }
}

async function readJSON(response: Response, signal: AbortSignal): Promise<object> {
  const json: unknown = await unlessAborted(response.json(), signal).catch((error: unknown) => {
    throw new NetworkError("the answer is incomplete, or not JSON", { cause: error });
  });
  if (typeof json === "object" && json !== null) return json;
  throw new NetworkError("the answer is not a JSON object");
}

async function readProblem(response: Response, signal: AbortSignal): Promise<ProblemError> {
  const members = await readJSON(response, signal).catch(() => ({}));
  const seconds = Number(response.headers.get("Retry-After") ?? NaN);
  return new ProblemError(
    response.status,
    members as Record<string, unknown>,
    Number.isFinite(seconds) && seconds >= 0 ? seconds : undefined,
  );
}
