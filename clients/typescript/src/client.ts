import { NetworkError, ProblemError } from "./errors.js";
import { readEvents } from "./events.js";
import { pauseBefore, sleep, Timeout } from "./time.js";
import {
  type CallOptions,
  type ClientOptions,
  isTemporary,
  type Repeats,
  type Request,
  Transport,
} from "./transport.js";
import type {
  AcceptedOrder,
  ConfirmedOrder,
  Draw,
  DrawProof,
  Order,
  OrderStatus,
  Purchase,
  Sale,
  SaleUpdate,
  StreamTicket,
  WaitlistEntry,
  WaitlistPlace,
} from "./types.js";

export interface BuyOptions extends CallOptions {
  /** Units, 1 by default. */
  quantity?: number;
  /** The units by the code of the item, in place of `quantity`, in a sale with items: all of them or none. */
  items?: Readonly<Record<string, number>>;
  /** The idempotency key, `newKey()` by default. To survive a reload, store your own before the call. */
  key?: string;
  /** How many seconds the server may wait for the confirmation, at most 30; none by default. */
  waitSeconds?: number;
  /** If the sale is not open yet, wait until it is. Tries and deadline count from the opening. */
  waitForOpening?: boolean;
}

export interface WatchOptions {
  signal?: AbortSignal;
  /** How many failed connections in a row end the watch with their error; no bound by default. */
  tries?: number;
  /** Silence after which a connection counts as dead; 40,000 ms by default. The server speaks every 15 seconds. */
  silenceMs?: number;
}

export interface OrderOptions extends CallOptions {
  /** The receipt of the purchase: also shows an order that was lost with Redis. */
  receipt?: string;
}

// After these nothing follows. A confirmed order may be final too: then the server answers 204.
const finalStatuses: readonly OrderStatus[] = ["paid", "cancelled", "expired", "rejected", "voided"];

/** Makes an idempotency key. */
export function newKey(): string {
  // Not randomUUID, which browsers have on secure origins only.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
}

/** Talks to a Stampede as one buyer. */
export class Stampede {
  readonly #transport: Transport;

  constructor(options: ClientOptions) {
    this.#transport = new Transport(options);
  }

  /**
   * Buys units of a sale, once, however often it has to be tried: all tries have the same key. Throws ProblemError if
   * the server refuses (`sold-out`, `already-purchased`, …), and OutcomeUnknownError if the order may exist and no
   * answer came in time.
   */
  async buy(saleId: string, options: BuyOptions = {}): Promise<Purchase> {
    const { key = newKey(), items, quantity = items ? undefined : 1, waitSeconds } = options;
    const headers: Record<string, string> = { "Idempotency-Key": key };
    if (waitSeconds !== undefined) headers["Prefer"] = `wait=${waitSeconds}`;
    const answer = await this.#transport.call(
      { method: "POST", path: `/v1/sales/${encodeURIComponent(saleId)}/orders`, headers, body: { quantity, items } },
      { ...options, changes: "order_id", key },
      (waitSeconds ?? 0) * 1000,
    );
    return {
      order: answer.json as AcceptedOrder | ConfirmedOrder,
      key,
      replayed: answer.headers.get("Idempotency-Replayed") === "true",
    };
  }

  /**
   * Waits until an accepted order is in the database, and returns it: `confirmed`, or what became of it instead
   * (`rejected`, `voided`, …). It reads the order's events, and asks for the order where events do not arrive.
   */
  async waitForConfirmation(
    accepted: Pick<AcceptedOrder, "order_id" | "receipt">,
    options: CallOptions = {},
  ): Promise<Order> {
    const { deadlineMs = 60_000 } = options;
    const over = new Timeout(options.signal, deadlineMs, "no confirmation");
    const { order_id: id, receipt } = accepted;
    try {
      for (let failures = 1; ; failures++) {
        try {
          // The first event comes at once. Some proxies hold events back: look at the order after 5 seconds.
          const events = this.watchOrder(id, { receipt, signal: over.signal, tries: 1, silenceMs: 5_000 });
          for await (const order of events) if (order.status !== "reserved") return order;
        } catch (error) {
          if (!isTemporary(error)) throw error;
        }
        const order = await this.order(id, { receipt, deadlineMs, signal: over.signal });
        if (order.status !== "reserved") return order;
        await sleep(pauseBefore(failures), over.signal);
      }
    } finally {
      over.end();
    }
  }

  /** The order. */
  async order(orderId: string, options: OrderOptions = {}): Promise<Order> {
    const answer = await this.#transport.call(
      { method: "GET", path: orderPath(orderId, "", options.receipt) },
      options,
    );
    return answer.json as Order;
  }

  /** The buyer's orders that are in the database, newest first. It asks for a page when the last one is used up. */
  orders(options: CallOptions & { saleId?: string; pageSize?: number } = {}): AsyncGenerator<Order, void, undefined> {
    const query = { sale_id: options.saleId, limit: options.pageSize };
    return this.#transport.list("/v1/orders", "orders", query, options);
  }

  /**
   * Marks a confirmed order as paid, where the server lets buyers do so (STAMPEDE_BUYER_PAY). Otherwise the shop's server
   * reports the money (`Cashier`). Waits for the confirmation if the order is still on its way.
   */
  async pay(orderId: string, reference: string, options: CallOptions = {}): Promise<Order> {
    return this.#change(orderId, "pay", { reference }, { ...options, alsoRepeat: "order-not-confirmed" });
  }

  /** Cancels a confirmed order that is not paid. Waits for the confirmation if the order is still on its way. */
  async cancel(orderId: string, options: CallOptions = {}): Promise<Order> {
    return this.#change(orderId, "cancel", {}, { ...options, alsoRepeat: "order-not-confirmed" });
  }

  /**
   * Waits for a unit of a sale that is sold out, or of an item. A repeat keeps the place. Throws ProblemError, as
   * `not-sold-out`.
   */
  async joinWaitlist(
    saleId: string,
    options: CallOptions & { item?: string; key?: string } = {},
  ): Promise<WaitlistEntry> {
    const { item, key = newKey(), ...repeats } = options;
    const headers = { "Idempotency-Key": key };
    const body = item === undefined ? {} : { item };
    const request: Request = { method: "POST", path: waitlistPath(saleId), headers, body };
    return (await this.#transport.call(request, { ...repeats, changes: "state", key })).json as WaitlistEntry;
  }

  /** The own place in the waiting list of a sale, with the order when a unit was offered. */
  async waitlistPlace(saleId: string, options: CallOptions = {}): Promise<WaitlistPlace> {
    return (await this.#transport.call({ method: "GET", path: waitlistPath(saleId) }, options)).json as WaitlistPlace;
  }

  /** Gives the own place up. An order that was offered stays as it is. */
  async leaveWaitlist(saleId: string, options: CallOptions = {}): Promise<WaitlistPlace> {
    const request: Request = { method: "POST", path: `${waitlistPath(saleId)}/leave`, body: {} };
    const repeats: Repeats = { ...options, changes: "state", alsoRepeat: "order-not-confirmed" };
    return (await this.#transport.call(request, repeats)).json as WaitlistPlace;
  }

  /** The sale. */
  async sale(saleId: string, options: CallOptions = {}): Promise<Sale> {
    const path = `/v1/sales/${encodeURIComponent(saleId)}`;
    return (await this.#transport.call({ method: "GET", path }, options)).json as Sale;
  }

  /** All sales, newest first. */
  sales(options: CallOptions & { pageSize?: number } = {}): AsyncGenerator<Sale, void, undefined> {
    return this.#transport.list("/v1/sales", "sales", { limit: options.pageSize }, options);
  }

  /** The draw of the units of the sale. To enter, `buy` a unit of its `entries_sale_id`, and keep the receipt. */
  async draw(saleId: string, options: CallOptions = {}): Promise<Draw> {
    const path = `/v1/sales/${encodeURIComponent(saleId)}/draw`;
    return (await this.#transport.call({ method: "GET", path }, options)).json as Draw;
  }

  /** The part of an entry in the draw of the sale, by the receipt of the entry, once the list is frozen. */
  async drawProof(saleId: string, receipt: string, options: CallOptions = {}): Promise<DrawProof> {
    const path = `/v1/sales/${encodeURIComponent(saleId)}/draw/proof?${new URLSearchParams({ receipt })}`;
    return (await this.#transport.call({ method: "GET", path }, options)).json as DrawProof;
  }

  /**
   * The order as it is, and then every change, until the last one. It reconnects when a connection ends or is silent,
   * and never goes back to a lower version. Give the version that you know as `after` to get later ones only.
   */
  async *watchOrder(
    orderId: string,
    options: WatchOptions & { receipt?: string; after?: number } = {},
  ): AsyncGenerator<Order, void, undefined> {
    const { after = 0, receipt } = options;
    const path = orderPath(orderId, "/events", receipt);
    let seen = after;
    for await (const data of this.#events(path, () => seen, options)) {
      const order = JSON.parse(data) as Order;
      if (order.version <= seen) continue;
      seen = order.version;
      yield order;
      if (finalStatuses.includes(order.status)) return;
    }
  }

  /** The sale's numbers as they are, and then every change, until the caller stops. */
  async *watchSale(saleId: string, options: WatchOptions = {}): AsyncGenerator<SaleUpdate, void, undefined> {
    const path = `/v1/sales/${encodeURIComponent(saleId)}/events`;
    for await (const data of this.#events(path, () => 0, options)) yield JSON.parse(data) as SaleUpdate;
  }

  /** A ticket for the events of an order. `watchOrder` needs none. */
  async orderTicket(orderId: string, options: CallOptions = {}): Promise<StreamTicket> {
    const request: Request = { method: "POST", path: orderPath(orderId, "/events/ticket") };
    return (await this.#transport.call(request, options)).json as StreamTicket;
  }

  /** A ticket for the events of a sale. `watchSale` needs none. */
  async saleTicket(saleId: string, options: CallOptions = {}): Promise<StreamTicket> {
    const request: Request = { method: "POST", path: `/v1/sales/${encodeURIComponent(saleId)}/events/ticket` };
    return (await this.#transport.call(request, options)).json as StreamTicket;
  }

  async #change(orderId: string, change: string, body: unknown, repeats: Repeats): Promise<Order> {
    const request: Request = { method: "POST", path: orderPath(orderId, `/${change}`), body };
    return (await this.#transport.call(request, { ...repeats, changes: "order_id" })).json as Order;
  }

  /** The data of a stream's events, from as many connections as it takes, until the server says that none follow. */
  async *#events(path: string, lastId: () => number, options: WatchOptions): AsyncGenerator<string, void, undefined> {
    const { signal, tries = Infinity, silenceMs = 40_000 } = options;
    let leastMs = 0;
    const retry = (ms: number) => (leastMs = ms);
    for (let failures = 1; ; failures++) {
      const silence = new Timeout(signal, silenceMs, "no event or heartbeat");
      let error: unknown;
      try {
        const headers: Record<string, string> = { Accept: "text/event-stream" };
        if (lastId() > 0) headers["Last-Event-ID"] = String(lastId());
        const response = await this.#transport.open({ method: "GET", path, headers }, silence.signal);
        if (response.status === 204 || response.body === null) return;
        const events = readEvents(response.body, silence.signal, () => silence.restart(), retry);
        for await (const data of events) {
          failures = 1;
          yield data;
        }
        error = new NetworkError("the stream ended");
      } catch (e) {
        error = e;
      } finally {
        silence.end();
      }
      signal?.throwIfAborted();
      if (!isTemporary(error) || failures >= tries) throw error;
      const retryAfter = error instanceof ProblemError ? error.retryAfter : undefined;
      await sleep(pauseBefore(failures, retryAfter, leastMs), signal);
    }
  }
}

function waitlistPath(saleId: string): string {
  return `/v1/sales/${encodeURIComponent(saleId)}/waitlist`;
}

function orderPath(orderId: string, below: string, receipt?: string): string {
  const query = receipt === undefined ? "" : `?${new URLSearchParams({ receipt })}`;
  return `/v1/orders/${encodeURIComponent(orderId)}${below}${query}`;
}
