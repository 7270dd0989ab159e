export { Cashier, type PaymentOptions } from "./cashier.js";
export { type BuyOptions, newKey, type OrderOptions, Stampede, type WatchOptions } from "./client.js";
export { NetworkError, OutcomeUnknownError, ProblemError } from "./errors.js";
export type { CallOptions, ClientOptions } from "./transport.js";
export * from "./types.js";
export { paymentOf, verifyWebhook, WebhookError, type WebhookEvent } from "./webhook.js";
