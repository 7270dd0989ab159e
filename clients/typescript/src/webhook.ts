// Verifies what `stampede relay` sends to a shop (https://www.standardwebhooks.com).

import type { PaymentEvent } from "./types.js";

/** The request is not a webhook of the sender that knows the secret, or it is too old. Answer 400. */
export class WebhookError extends Error {
  override readonly name = "WebhookError";
}

/** An event (CloudEvents 1.0). `id` is the same at every delivery: process each id once. */
export interface WebhookEvent {
  specversion: "1.0";
  id: string;
  source: string;
  /** `stampede.order.paid` or `stampede.payment.refund_due`, for example. */
  type: string;
  /** The id of the order or sale, or the reference of the payment. */
  subject: string;
  time: string;
  data: Record<string, unknown>;
  [extension: string]: unknown;
}

const toleranceSeconds = 300;

/**
 * Verifies a webhook and returns its event. The body must be the bytes or the text as they came, before any JSON
 * parser. While a secret is being replaced, give the old and the new one.
 */
export async function verifyWebhook(
  secret: string | readonly string[],
  headers: Headers | Readonly<Record<string, string | readonly string[] | undefined>>,
  body: string | Uint8Array,
  now: Date = new Date(),
): Promise<WebhookEvent> {
  const id = header(headers, "webhook-id");
  const timestamp = header(headers, "webhook-timestamp");
  const signatures = header(headers, "webhook-signature");
  const seconds = /^\d{1,12}$/.test(timestamp) ? Number(timestamp) : NaN;
  // A comparison with NaN is false.
  if (!(Math.abs(now.getTime() / 1000 - seconds) <= toleranceSeconds)) {
    throw new WebhookError("webhook-timestamp is more than 5 minutes from now, or not a time");
  }
  const encoder = new TextEncoder();
  const bytes = typeof body === "string" ? encoder.encode(body) : body;
  const head = encoder.encode(`${id}.${timestamp}.`);
  const signed = new Uint8Array(head.length + bytes.length);
  signed.set(head);
  signed.set(bytes, head.length);
  for (const one of typeof secret === "string" ? [secret] : secret) {
    const key = await crypto.subtle.importKey("raw", secretBytes(one), { name: "HMAC", hash: "SHA-256" }, false, [
      "verify",
    ]);
    for (const signature of signatures.split(" ")) {
      const [version, value = ""] = signature.split(",", 2);
      const candidate = version === "v1" ? decodeBase64(value) : undefined;
      // verify compares in constant time.
      if (candidate !== undefined && (await crypto.subtle.verify("HMAC", key, candidate, signed))) {
        return JSON.parse(new TextDecoder().decode(bytes)) as WebhookEvent;
      }
    }
  }
  throw new WebhookError("no signature in webhook-signature is valid");
}

/** The payment that an event is about, or undefined for an event of an order or sale. */
export function paymentOf(event: WebhookEvent): PaymentEvent | undefined {
  return event.type.startsWith("stampede.payment.") ? (event.data as unknown as PaymentEvent) : undefined;
}

function header(
  headers: Headers | Readonly<Record<string, string | readonly string[] | undefined>>,
  name: string,
): string {
  const value = headers instanceof Headers ? headers.get(name) : headers[name];
  if (typeof value !== "string" || value === "") throw new WebhookError(`${name} is missing, or there more than once`);
  return value;
}

function secretBytes(secret: string): Uint8Array<ArrayBuffer> {
  const bytes = decodeBase64(secret.replace(/^whsec_/, ""));
  if (bytes === undefined || bytes.length === 0) throw new TypeError("the secret is not whsec_ and base64");
  return bytes;
}

function decodeBase64(text: string): Uint8Array<ArrayBuffer> | undefined {
  try {
    return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  } catch {
    return undefined;
  }
}
