import type { OrderStatus, ProblemSlug } from "./types.js";

/** The server refused the request (RFC 9457). Compare `slug`; `message` and `detail` are for people. */
export class ProblemError extends Error {
  override readonly name = "ProblemError";
  readonly status: number;
  /** What kind of problem it is. A newer server may have more; "" if the answer was not made by Stampede. */
  readonly slug: ProblemSlug | "" | (string & {});
  readonly detail: string | undefined;
  /** How long the server asks the client to wait, in seconds. */
  readonly retryAfter: number | undefined;
  /** All members of the problem, with the names of the JSON. */
  readonly members: Readonly<Record<string, unknown>>;

  constructor(status: number, members: Record<string, unknown>, retryAfter?: number) {
    const slug = /^\/problems\/([a-z-]+)$/.exec(text(members["type"]) ?? "")?.[1] ?? "";
    super(`${status} ${slug || "without a problem"}: ${text(members["detail"]) ?? text(members["title"]) ?? ""}`);
    this.status = status;
    this.slug = slug;
    this.detail = text(members["detail"]);
    this.retryAfter = retryAfter;
    this.members = members;
  }

  /** With `sale-not-open`: when the sale opens. */
  get opensAt(): Date | undefined {
    const at = text(this.members["opens_at"]);
    return at === undefined ? undefined : new Date(at);
  }

  /** With `quantity-over-limit`: how many units one order may hold. */
  get limit(): number | undefined {
    const limit = this.members["limit"];
    return typeof limit === "number" ? limit : undefined;
  }

  /** With `unknown-item`: the code. With `quantity-over-limit`: the item whose limit it is; undefined for the sale's. */
  get item(): string | undefined {
    return text(this.members["item"]);
  }

  /** With `sold-out` in a sale with items: the codes of the items that fell short. */
  get items(): readonly string[] {
    return (this.members["items"] as string[] | undefined) ?? [];
  }

  /** With `sold-out` in a sale with items: what is left of each, by code, if that is known. */
  get available(): Readonly<Record<string, number>> | undefined {
    return this.members["available"] as Record<string, number> | undefined;
  }

  /** With `already-paid`: the payment that counts. */
  get paymentReference(): string | undefined {
    return text(this.members["payment_reference"]);
  }

  /** With `already-refunded`: the refund that was noted. */
  get refundReference(): string | undefined {
    return text(this.members["refund_reference"]);
  }

  /**
   * With `already-purchased`: the buyer's live order in this sale. With `order-ended`: the order that this purchase had
   * made; its status is `orderStatus`.
   */
  get orderId(): string | undefined {
    return text(this.members["order_id"]);
  }

  get orderStatus(): OrderStatus | undefined {
    return text(this.members["order_status"]) as OrderStatus | undefined;
  }

  /** With `internal-error`: names the fault in the server's log. */
  get requestId(): string | undefined {
    return text(this.members["request_id"]);
  }
}

/** No complete answer came: the connection failed, or time ran out. `cause` says why. */
export class NetworkError extends Error {
  override readonly name = "NetworkError";
}

/**
 * A purchase, payment or cancellation may have been made, and this client could not find out in time. Repeat it: a
 * purchase with the same sale, units and `key`, the others as they were. It cannot happen twice.
 */
export class OutcomeUnknownError extends Error {
  override readonly name = "OutcomeUnknownError";
  /** The idempotency key of the purchase; undefined for payments and cancellations, which need none. */
  readonly key: string | undefined;

  constructor(key: string | undefined, cause: unknown) {
    super("The outcome is unknown: repeat the call" + (key === undefined ? "" : ` with the key ${key}`), { cause });
    this.key = key;
  }
}

function text(value: unknown): string | undefined {
  return typeof value === "string" ? value : undefined;
}
