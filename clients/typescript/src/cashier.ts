import { type CallOptions, type ClientOptions, Transport } from "./transport.js";
import type { Payment, PaymentReport, PaymentState } from "./types.js";

export interface PaymentOptions extends CallOptions {
  state?: PaymentState;
  saleId?: string;
  orderId?: string;
  pageSize?: number;
}

/** Reports money to a Stampede, from the shop's server, with the token of a cashier. */
export class Cashier {
  readonly #transport: Transport;

  constructor(options: ClientOptions) {
    this.#transport = new Transport(options);
  }

  /**
   * Reports money, and tells what became of it: every state is an answer. Acknowledge the provider's webhook when this
   * returns. When it throws, refuse the webhook: the provider delivers it again.
   */
  async reportPayment(report: PaymentReport, options: CallOptions = {}): Promise<Payment> {
    return this.#post("/v1/payments", report, options);
  }

  /** The payments that match. Those with `refund_due` are what the shop has to pay back. */
  payments(options: PaymentOptions = {}): AsyncGenerator<Payment, void, undefined> {
    const { state, saleId: sale, orderId: order, pageSize: limit } = options;
    return this.#transport.list("/v1/admin/payments", "payments", { state, sale, order, limit }, options);
  }

  /** Notes that the provider has paid the money back. It may be repeated. It needs the token of an operator. */
  async markRefunded(reference: string, refundReference: string, options: CallOptions = {}): Promise<Payment> {
    const path = `/v1/admin/payments/${encodeURIComponent(reference)}/refunded`;
    return this.#post(path, { refund_reference: refundReference }, options);
  }

  /** Notes that nothing of an unclear payment has to go back. It may be repeated. It needs the token of an operator. */
  async dismiss(reference: string, reason: string, options: CallOptions = {}): Promise<Payment> {
    return this.#post(`/v1/admin/payments/${encodeURIComponent(reference)}/dismissed`, { reason }, options);
  }

  async #post(path: string, body: unknown, options: CallOptions): Promise<Payment> {
    const request = { method: "POST", path, body } as const;
    return (await this.#transport.call(request, { ...options, changes: "state" })).json as Payment;
  }
}
