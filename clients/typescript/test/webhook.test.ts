import assert from "node:assert/strict";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { paymentOf, verifyWebhook, WebhookError, type WebhookEvent } from "stampede-client";
import { Webhook } from "standardwebhooks";
import { addRelayTarget, buyer, createSale, until } from "./shop.js";

const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const other = "whsec_" + Buffer.alloc(32, 7).toString("base64");
const body = JSON.stringify({ specversion: "1.0", id: "o.3", type: "stampede.order.paid", data: { reason: "ü €" } });

// Signatures are made by the reference implementation, not by this client.
function signed(at = new Date(), by = secret, id = "o.3"): Record<string, string> {
  return {
    "webhook-id": id,
    "webhook-timestamp": String(Math.floor(at.getTime() / 1000)),
    "webhook-signature": new Webhook(by).sign(id, at, body),
  };
}

test("a webhook is verified", async () => {
  const event = await verifyWebhook(secret, signed(), body);
  assert.deepEqual([event.id, event.type, event.data], ["o.3", "stampede.order.paid", { reason: "ü €" }]);
  assert.equal((await verifyWebhook(secret, new Headers(signed()), new TextEncoder().encode(body))).id, "o.3");
  // The vector of the specification's reference implementation.
  const vector = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": "1614265330",
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
  };
  await verifyWebhook(secret, vector, '{"test": 2432232314}', new Date(1614265330_000));
});

test("what the relay sends is verified, in order", { timeout: 60_000 }, async (t) => {
  const received: WebhookEvent[] = [];
  const failures: unknown[] = [];
  const shop = createServer(async (request, response) => {
    try {
      const parts: Buffer[] = [];
      for await (const part of request) parts.push(part as Buffer);
      received.push(await verifyWebhook([other, secret], request.headers, Buffer.concat(parts)));
      response.writeHead(204).end();
    } catch (error) {
      failures.push(error);
      response.writeHead(400).end();
    }
  });
  await new Promise<void>((resolve) => shop.listen(0, "127.0.0.1", resolve));
  t.after(() => shop.close());
  await addRelayTarget(`http://127.0.0.1:${(shop.address() as AddressInfo).port}/`, secret);

  const sale = await createSale({ payment_window_seconds: 600 });
  const ann = buyer();
  const { order_id: id } = (await ann.buy(sale.id, { waitSeconds: 10 })).order;
  await ann.pay(id, "pi_1");
  // The events of the order come in order, those of the sale and of the payment when they come.
  const of = (name: string) => received.filter((event) => event.type === `stampede.${name}`);
  const [payment] = await until(async () => {
    const payments = received.map(paymentOf).filter((payment) => payment?.order_id === id);
    const all = of("order.paid").some((e) => e.subject === id) && of("sale.created").some((e) => e.subject === sale.id);
    return all && payments.length > 0 && payments;
  });
  const events = received.filter((event) => event.subject === id);
  assert.deepEqual([...new Set(events.map((e) => e.id))], [`${id}.2`, `${id}.3`]);
  assert.deepEqual([...new Set(events.map((e) => e.type))], ["stampede.order.confirmed", "stampede.order.paid"]);
  assert.deepEqual([events.at(-1)?.data["sale_id"], events.at(-1)?.data["payment_reference"]], [sale.id, "pi_1"]);
  assert.deepEqual([payment?.state, payment?.sale_id, payment?.version], ["settled", sale.id, 2]);
  assert.deepEqual(failures, []);
});

test("secrets are rotated by several secrets or several signatures", async () => {
  await verifyWebhook([other, secret], signed(), body);
  const both = {
    ...signed(),
    "webhook-signature": `v2,xx v1,!! v1a,xx ${signed(new Date(), other)["webhook-signature"]} ${signed()["webhook-signature"]}`,
  };
  await verifyWebhook(secret, both, body);
});

test("what is not signed, or not now, is refused", async () => {
  const now = Date.now();
  const missing = { ...signed() };
  delete missing["webhook-id"];
  for (const [what, headers, text] of [
    ["changed body", signed(), body + " "],
    ["other secret", signed(new Date(), other), body],
    ["other id", { ...signed(), "webhook-id": "o.4" }, body],
    ["other time", { ...signed(), "webhook-timestamp": String(Math.floor(now / 1000) - 7) }, body],
    ["old", signed(new Date(now - 302_000)), body],
    ["from the future", signed(new Date(now + 302_000)), body],
    ["no number", { ...signed(), "webhook-timestamp": "now" }, body],
    ["missing header", missing, body],
    ["no signature", { ...signed(), "webhook-signature": "v1, v1" }, body],
    ["sent twice", { ...signed(), "webhook-id": ["o.3", "o.3"] }, body],
  ] as const) {
    await assert.rejects(verifyWebhook(secret, headers, text), WebhookError, what);
  }
  await verifyWebhook(secret, signed(new Date(now - 290_000)), body);
  await assert.rejects(verifyWebhook("whsec_", signed(), body), TypeError);
});
