// What Stampede answers, with the names of its JSON (docs/http-api.md). Times are RFC 3339 in UTC.
// Task generate:clients makes api.ts of the description of the API.

import { type AcceptedOrder, type ConfirmedOrder, type ProblemType, problemTypeValues } from "./api.js";

export type {
  AcceptedOrder,
  ConfirmedOrder,
  Draw,
  DrawGoods,
  DrawParty,
  DrawProof,
  DrawState,
  Item,
  ItemUpdate,
  Order,
  OrderKind,
  OrderStatus,
  Payment,
  PaymentEvent,
  PaymentReason,
  PaymentState,
  Sale,
  SaleState,
  SaleUpdate,
  StreamTicket,
  WaitlistEntry,
  WaitlistPlace,
} from "./api.js";

/** An accepted purchase. `order.status` tells its two shapes apart. */
export interface Purchase {
  order: AcceptedOrder | ConfirmedOrder;
  /** The idempotency key: the same purchase with this key cannot buy twice. */
  key: string;
  /** The server recognised the key: an earlier try had made the order. */
  replayed: boolean;
}

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

export type ProblemSlug = ProblemType extends `/problems/${infer Slug}` ? Slug : never;

/** All slugs of problems that the server knows: the last part of a problem's `type`. */
export const problemSlugs: readonly ProblemSlug[] =
  problemTypeValues.map((type) => type.slice("/problems/".length) as ProblemSlug);
