// What Stampede answers, with the names of its JSON (docs/http-api.md). Times are RFC 3339 in UTC.

export type OrderStatus = "reserved" | "confirmed" | "paid" | "cancelled" | "expired" | "rejected" | "voided";

/** An order, as every call but the purchase answers it. */
export interface Order {
  order_id: string;
  sale_id: string;
  user_id: string;
  quantity: number;
  /** The units by the code of the item, in a sale with items; `quantity` is their sum. */
  items?: Record<string, number>;
  status: OrderStatus;
  /** 1 when reserved, one more with each change. */
  version: number;
  reserved_at: string;
  /** Time of the last change. */
  updated_at?: string;
  /** From when to pay, in a sale with a pace; only while there is something to pay. */
  pay_from?: string;
  /** Until when to pay; only while there is something to pay. */
  expires_at?: string;
  /** What the order costs, in minor units of the currency (ISO 4217); only in a sale with a price. */
  amount?: number;
  currency?: string;
  paid_at?: string;
  payment_reference?: string;
  /** Why the order was rejected or voided. */
  reason?: string;
  /** What the order is; not before it is in the database. */
  kind?: OrderKind;
  /** The sale of which an entry of a draw, or a place in a waiting list, waits for units. There is nothing to pay. */
  entry_for?: string;
  /** The database could not be asked, and may know more. */
  may_be_behind?: true;
}

/** The answer 202: the units are reserved, and the order is on its way to the database. */
export interface AcceptedOrder {
  order_id: string;
  sale_id: string;
  status: "reserved";
  quantity: number;
  /** The units by the code of the item, in a sale with items; `quantity` is their sum. */
  items?: Record<string, number>;
  reserved_at: string;
  /** What the order costs, as in `Order`. */
  amount?: number;
  currency?: string;
  /** Proves the order if Redis is lost before it is in the database. Keep it. */
  receipt: string;
  may_be_behind?: true;
}

/** The answer 201: the order is in the database. */
export interface ConfirmedOrder extends Order {
  /** `paid` if a repeat of the purchase comes after the payment. */
  status: "confirmed" | "paid";
  receipt: string;
}

/** An accepted purchase. `order.status` tells its two shapes apart. */
export interface Purchase {
  order: AcceptedOrder | ConfirmedOrder;
  /** The idempotency key: the same purchase with this key cannot buy twice. */
  key: string;
  /** The server recognised the key: an earlier try had made the order. */
  replayed: boolean;
}

export type SaleState = "scheduled" | "open" | "paused" | "ended";

/** What is left of an item of a sale. */
export interface ItemUpdate {
  code: string;
  stock: number;
  available: number;
}

/** An item of a sale, such as a size. */
export interface Item extends ItemUpdate {
  name: string;
  unit_price?: number;
  /** Units of the item that one order may hold; without it, as many as of the sale. */
  per_order_limit?: number;
}

export interface Sale {
  id: string;
  name: string;
  state: SaleState;
  stock: number;
  /** Units that are not reserved. */
  available: number;
  /** Units of orders that are not final. */
  held: number;
  /** Units of orders that are final. */
  sold: number;
  per_order_limit: number;
  payment_window_seconds: number;
  /** How long after its deadline an order still takes money. Do not tell buyers. */
  payment_grace_seconds?: number;
  /** The pace: how many orders a second get their turn to pay. */
  payments_per_second?: number;
  /** In minor units of the currency (ISO 4217). */
  unit_price?: number;
  currency?: string;
  shards: number;
  /** What the sale sells, if it is more than one thing. */
  items?: Item[];
  created_at: string;
  opens_at?: string;
  closes_at?: string;
  /** The units are offered by a draw, to those who enter `entries_sale_id`. */
  offers_only?: true;
  entries_sale_id?: string;
  /** Units that return when none are left are offered to those who wait. */
  waitlist?: true;
  /** Nobody can join the waiting list any more. */
  waitlist_closed?: true;
  /** The sale whose units are offered to those who enter this one. */
  entry_for?: string;
  /** How many wait. */
  waiting?: number;
}

/** Units that somebody bought, or was offered by a draw or a waiting list; an entry of a draw, or a place in a list. */
export type OrderKind = "order" | "offer" | "entry" | "place";

export type DrawState = "entering" | "freezing" | "frozen" | "ranking" | "offering" | "over" | "open" | "void";

/** One of those who give the seed of a draw in place of a round of drand. */
export interface DrawParty {
  name: string;
  /** The SHA-256 of its secret, which is shown once it is revealed. */
  commitment: string;
  secret?: string;
}

/** The units that are drawn, when the list was frozen. */
export interface DrawGoods {
  /** That of the sale, as of which this is true. */
  revision: number;
  stock: number;
  /** Units of orders from before the draw. */
  sold?: number;
  items?: { code: string; stock: number; sold?: number }[];
  /** The places of the entrants who have such an order: only they can be skipped for one. */
  holders?: number[];
}

/** A draw of the units of a sale, as far as it is. */
export interface Draw {
  /** How a seed follows from parties, and what is public of the draw. */
  version: number;
  sale_id: string;
  /** The sale in which people enter: an order in it is an entry. */
  entries_sale_id: string;
  state: DrawState;
  created_at: string;
  /** When the entries close. */
  closes_at: string;
  freeze_seconds: number;
  /** The rounds of drand quicknet so far. The last one, `round`, gives the seed, from `round_at` on. */
  rounds?: number[];
  round?: number;
  round_at?: string;
  parties?: DrawParty[];
  reveal_by?: string;
  /** How many entries there are, once their list is frozen. */
  entries?: number;
  root?: string;
  frozen_at?: string;
  goods?: DrawGoods;
  signature?: string;
  seed?: string;
  seeded_at?: string;
  ranked_at?: string;
  /** Ranks that were offered a unit, and those that were skipped for a reason. */
  offered: number;
  skipped: number;
  /** The last rank that had its turn, in a sale without items. */
  last_rank?: number;
  /** What is left is sold to everybody when each rank had its turn. */
  opening?: true;
  void_reason?: string;
  voided_at?: string;
}

/** The part of an entry in a draw. Places and ranks count from 0. */
export interface DrawProof {
  /** The place in the list. */
  place: number;
  record: string;
  leaf: string;
  /** With the leaf, the place and the number of entries it gives the root, by RFC 6962. */
  path: string[];
  entries: number;
  root: string;
  item?: string;
  /** The rank, among those with the same item, once the entries are ranked. */
  rank?: number;
  /** `waiting` until the rank has had its turn. */
  outcome: "waiting" | "offered" | "skipped";
  /** Why the rank was skipped. */
  reason?: "already-purchased" | "entry-cancelled";
  /** The order of the offer: it is the entrant's to pay. */
  order_id?: string;
}

/** A place in the waiting list of a sale, as it is given; again, with its `state`, to who has one. */
export interface WaitlistEntry extends Omit<WaitlistPlace, "before"> {
  sale_id: string;
  reserved_at: string;
  receipt: string;
}

/** The own place in the waiting list of a sale. */
export interface WaitlistPlace {
  /** The entry, which is an order of its own. */
  entry_order_id: string;
  place: number;
  /** The item, in a sale with items. */
  item?: string;
  state: "waiting" | "offered" | "skipped" | "left" | "over";
  /** How many wait before, if that is known. */
  before?: number;
  /** Why the turn was skipped. */
  reason?: "already-purchased";
  /** The order that was made of the offer. */
  order_id?: string;
}

/** The numbers of a sale, as its event stream sends them. */
export interface SaleUpdate extends Pick<Sale, "state" | "stock" | "available" | "held" | "sold"> {
  items?: ItemUpdate[];
}

/** Opens a stream of events without any header: for `EventSource`, which cannot send them. */
export interface StreamTicket {
  ticket: string;
  /** The stream has to be opened by then, within a minute. It may stay open longer. */
  expires_at: string;
  /** The path of the stream, with the ticket. */
  events_url: string;
}

export type PaymentState =
  | "waiting"
  | "settled"
  | "refund_due"
  | "refunded"
  | "unclear"
  | "dismissed"
  | "disputed"
  | "claimed";

export type PaymentReason =
  | "order-expired"
  | "order-cancelled"
  | "order-rejected"
  | "order-voided"
  | "order-not-found"
  | "already-paid"
  | "amount-mismatch"
  | "nothing-to-pay"
  | "refunded-outside"
  | "other-order"
  | "other-amount"
  | "unclear-order";

/** Money that the shop's server has received. */
export interface PaymentReport {
  /**
   * The payment provider's reference. A repeat changes nothing, and gets the first one's answer. What contradicts the
   * first report is a payment of its own, which is `unclear`.
   */
  reference: string;
  order_id: string;
  /** In minor units of the currency (ISO 4217). Both are required, and compared, in a sale with a price. */
  amount?: number;
  currency?: string;
}

/** Money that Stampede was told of, and what became of it. */
export interface Payment {
  reference: string;
  /** `waiting` until the order is in the database. Somebody has to look at what is `unclear` or `disputed`. */
  state: PaymentState;
  /** Why a refund is, or was, due, or why it is, or was, unclear. */
  reason?: PaymentReason;
  order_id?: string;
  sale_id?: string;
  amount?: number;
  currency?: string;
  /** What the report has in place of an order, an amount or a currency. */
  unreadable?: string;
  received_at: string;
  updated_at: string;
  refund_reference?: string;
  operator?: string;
  /** Why it was dismissed, or how much of a settled payment went back at the payment provider. */
  note?: string;
  /** The dispute's name at the payment provider. */
  dispute?: string;
}

/** The `data` of the events `stampede.payment.` and each state but `waiting`. */
export type PaymentEvent = Omit<Payment, "received_at" | "updated_at"> & { version: number; occurred_at: string };

/** All slugs of problems that the server knows: the last part of a problem's `type`. */
export const problemSlugs = [
  "already-paid",
  "already-purchased",
  "already-refunded",
  "body-too-large",
  "draw-not-found",
  "draw-not-frozen",
  "draw-void",
  "entry-not-found",
  "forbidden",
  "head-too-large",
  "idempotency-key-reused",
  "illegal-transition",
  "internal-error",
  "invalid-beacon",
  "invalid-request",
  "method-not-allowed",
  "not-found",
  "not-ready",
  "not-sold-out",
  "not-unclear",
  "offers-only",
  "order-archived",
  "order-ended",
  "order-expired",
  "order-not-confirmed",
  "order-not-found",
  "outcome-unknown",
  "overloaded",
  "payment-not-found",
  "precondition-failed",
  "quantity-over-limit",
  "rate-limited",
  "refund-not-due",
  "restock-withdrawn",
  "sale-ended",
  "sale-not-found",
  "sale-not-open",
  "sale-paused",
  "sale-unavailable",
  "sold-out",
  "unauthorized",
  "unknown-item",
  "unsupported-media-type",
  "waitlist-not-found",
] as const;

export type ProblemSlug = (typeof problemSlugs)[number];
