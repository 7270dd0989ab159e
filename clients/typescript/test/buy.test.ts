import assert from "node:assert/strict";
import { test } from "node:test";
import { newKey, OutcomeUnknownError, ProblemError } from "stampede-client";
import { buyer, createSale, type Fault, faulty, newUser, problem, taken, until } from "./shop.js";

const isProblem = (slug: string) => (error: unknown) => error instanceof ProblemError && error.slug === slug;

test("a purchase whose answer was lost buys once", async () => {
  const sale = await createSale();
  const { client, seen } = await faulty([{ do: "drop" }]);
  const purchase = await client.buy(sale.id, { quantity: 1 });
  assert.equal(purchase.replayed, true);
  const requests = await seen();
  assert.deepEqual(
    requests.map((r) => [r.fault, r.status]),
    [
      ["drop", 202],
      [undefined, 202],
    ],
  );
  assert.deepEqual(
    requests.map((r) => r.headers["idempotency-key"]),
    [purchase.key, purchase.key],
  );
  assert.equal(requests[0]?.body, requests[1]?.body);
  assert.equal(await until(async () => (await taken(sale)) > 0 && taken(sale)), 1);
});

// What no Stampede has answered. 502 and 504 are a proxy's, whatever they say.
const answersOfProxies: Fault[] = [
  ...[200, 302, 400, 403, 404, 408, 413, 429, 431, 500, 502, 503, 504].map(
    (status): Fault => ({ do: "answer", status, body: "<h1>A proxy</h1>" }),
  ),
  { do: "answer", status: 202, body: '{"order_id":"01a2027b-de9c-7adf-b6e6-5b26' },
  { do: "answer", status: 202, body: '{"status":"reserved"}' },
  { do: "answer", status: 200, body: "1" },
  { do: "answer", status: 409, body: '{"type":"https://x.example/errors/conflict"}' },
  problem(502, "sale-unavailable"),
  problem(504, "overloaded"),
];

test("temporary answers and those of proxies are repeated", async () => {
  const faults = [{ do: "refuse" } as Fault, problem(503, "overloaded"), problem(429, "rate-limited"), ...answersOfProxies];
  const sale = await createSale({ stock: faults.length });
  for (const fault of faults) {
    const { client, seen } = await faulty([fault]);
    assert.equal((await client.buy(sale.id)).replayed, false, JSON.stringify(fault));
    assert.equal(new Set((await seen()).map((r) => r.headers["idempotency-key"])).size, 1);
    assert.equal((await seen()).length, 2);
  }
});

test("a basket is bought as a whole or not at all", async () => {
  const sale = await createSale({
    items: [
      { code: "m", name: "M", stock: 3 },
      { code: "l", name: "L", stock: 1 },
    ],
    per_order_limit: 3,
  });
  assert.deepEqual(sale.items?.map((i) => [i.code, i.available]), [["m", 3], ["l", 1]]);
  const user = newUser();
  const { order } = await buyer(user).buy(sale.id, { items: { m: 1, l: 1 } });
  assert.deepEqual([order.items, order.quantity], [{ m: 1, l: 1 }, 2]);
  assert.deepEqual((await buyer(user).order(order.order_id)).items, { m: 1, l: 1 });
  const other = buyer();
  const refused = (items: Record<string, number>) => other.buy(sale.id, { items }).catch((error: unknown) => error);
  const short = await refused({ m: 1, l: 1 });
  assert.ok(short instanceof ProblemError);
  assert.deepEqual([short.slug, short.items, short.available], ["sold-out", ["l"], { m: 2, l: 0 }]);
  const unknown = await refused({ xl: 1 });
  assert.ok(unknown instanceof ProblemError);
  assert.deepEqual([unknown.slug, unknown.item], ["unknown-item", "xl"]);
  await other.buy(sale.id, { items: { m: 2 } });
});

test("Retry-After is obeyed", async () => {
  const sale = await createSale();
  const { client, seen } = await faulty([problem(503, "overloaded", { "Retry-After": "1" })]);
  await client.buy(sale.id);
  const [first, second] = await seen();
  assert.ok(first && second && second.at_ms - first.at_ms >= 1000);
});

test("a Retry-After beyond the deadline ends the call", async () => {
  const sale = await createSale();
  const { client, seen } = await faulty([problem(503, "overloaded", { "Retry-After": "100" })]);
  await assert.rejects(client.buy(sale.id, { deadlineMs: 5_000 }), isProblem("overloaded"));
  assert.equal((await seen()).length, 1);
});

test("sold out is not repeated", async () => {
  const sale = await createSale({ stock: 1 });
  await buyer().buy(sale.id);
  const { client, seen } = await faulty([]);
  await assert.rejects(client.buy(sale.id), isProblem("sold-out"));
  assert.equal((await seen()).length, 1);
});

test("the outcome is unknown when all tries are lost, and the key finds it out", async () => {
  const sale = await createSale();
  const { client } = await faulty([{ do: "drop" }, { do: "refuse" }]);
  const unknown = await client.buy(sale.id, { tries: 2 }).catch((error: unknown) => error);
  assert.ok(unknown instanceof OutcomeUnknownError && unknown.key !== undefined);
  const { key, order, replayed } = await client.buy(sale.id, { key: unknown.key });
  assert.deepEqual([key, replayed], [unknown.key, true]);
  await assert.rejects(client.buy(sale.id), { slug: "already-purchased", orderId: order.order_id });
});

test("a refusal that does not know of the lost try leaves the outcome unknown", async () => {
  const sale = await createSale();
  const { client } = await faulty([{ do: "drop" }, problem(401, "unauthorized")]);
  const unknown = await client.buy(sale.id).catch((error: unknown) => error);
  assert.ok(unknown instanceof OutcomeUnknownError);
  assert.ok(isProblem("unauthorized")(unknown.cause));
});

test("answers of proxies leave the outcome unknown", async () => {
  const sale = await createSale();
  for (const fault of answersOfProxies) {
    const { client } = await faulty([fault]);
    await assert.rejects(client.buy(sale.id, { tries: 1 }), OutcomeUnknownError, JSON.stringify(fault));
  }
  const { client } = await faulty([{ do: "answer", status: 413 }]);
  await assert.rejects(client.cancel(sale.id, { tries: 1 }), OutcomeUnknownError);
});

test("a decision after a lost try is the outcome", async () => {
  const sale = await createSale({ stock: 1 });
  await buyer().buy(sale.id);
  const { client } = await faulty([{ do: "drop" }]);
  await assert.rejects(client.buy(sale.id), isProblem("sold-out"));
});

test("nothing has happened when all tries were refused", async () => {
  const sale = await createSale();
  const { client } = await faulty([problem(503, "overloaded"), problem(429, "rate-limited")]);
  await assert.rejects(client.buy(sale.id, { tries: 2 }), isProblem("rate-limited"));
  assert.equal(await taken(sale), 0);
});

test("a request that takes too long is repeated", async () => {
  const sale = await createSale();
  const { client, seen } = await faulty([{ do: "hold" }], { timeoutMs: 500 });
  assert.equal((await client.buy(sale.id)).replayed, true);
  assert.ok((await seen()).length >= 2);
});

test("an aborted purchase may have been made", async () => {
  const sale = await createSale();
  const { client, seen } = await faulty([{ do: "hold" }]);
  const abort = new AbortController();
  const key = newKey();
  const purchase = client.buy(sale.id, { key, signal: abort.signal });
  purchase.catch(() => undefined);
  await until(async () => (await seen())[0]?.status === 202);
  abort.abort();
  await assert.rejects(purchase, (error: unknown) => error instanceof OutcomeUnknownError && error.key === key);
  await assert.rejects(client.buy(sale.id, { signal: abort.signal }), { name: "AbortError" });
});

test("a sale that is not open yet can be waited for", async () => {
  const opens = new Date(Date.now() + 4_000);
  const sale = await createSale({ opens_at: opens.toISOString() });
  const refused = await buyer()
    .buy(sale.id)
    .catch((error: unknown) => error);
  assert.ok(refused instanceof ProblemError && refused.slug === "sale-not-open");
  assert.equal(refused.opensAt?.getTime(), opens.getTime());
  assert.ok(refused.retryAfter !== undefined && refused.retryAfter >= 1 && refused.retryAfter <= 4);
  // The deadline counts from the opening.
  const purchase = await buyer().buy(sale.id, { waitForOpening: true, deadlineMs: 3_000, tries: 1 });
  assert.ok(Date.parse(purchase.order.reserved_at) >= opens.getTime());
});

test("the server waits for the confirmation if it is asked to", async () => {
  const sale = await createSale({ payment_window_seconds: 600 });
  const { order, replayed } = await buyer().buy(sale.id, { waitSeconds: 10 });
  assert.equal(replayed, false);
  assert.ok(order.status === "confirmed");
  // The type knows now that this is the 201.
  assert.deepEqual([order.version, order.sale_id], [2, sale.id]);
  assert.ok(order.receipt && order.expires_at);
});

test("a key of one's own survives a reload", async () => {
  const sale = await createSale();
  const key = newKey();
  const user = newUser();
  const before = await buyer(user).buy(sale.id, { key });
  const after = await buyer(user).buy(sale.id, { key });
  assert.deepEqual([after.order.order_id, after.replayed], [before.order.order_id, true]);
});

test("problems have their members", async () => {
  const sale = await createSale({ per_order_limit: 2, payment_window_seconds: 600 });
  const ann = buyer();
  await assert.rejects(ann.buy(sale.id, { quantity: 3 }), { slug: "quantity-over-limit", status: 422, limit: 2 });
  const { order, key } = await ann.buy(sale.id, { quantity: 2, waitSeconds: 10 });
  await assert.rejects(ann.buy(sale.id, { key, quantity: 1 }), { slug: "idempotency-key-reused", status: 422 });
  await ann.cancel(order.order_id);
  const ended = { slug: "order-ended", status: 409, orderId: order.order_id, orderStatus: "cancelled" };
  await assert.rejects(ann.buy(sale.id, { key, quantity: 2 }), ended);
  await assert.rejects(ann.buy("01a2027b-de9c-7adf-b6e6-5b263e1fb250"), { slug: "sale-not-found", status: 404 });
});
