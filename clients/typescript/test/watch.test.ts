import assert from "node:assert/strict";
import { test } from "node:test";
import { NetworkError, type Order, ProblemError } from "stampede-client";
import { buyer, createSale, type Fault, faulty, newUser, taken, until } from "./shop.js";

const events = "GET /events";

test("a watch that is cut twice sees every state", async () => {
  const sale = await createSale({ payment_window_seconds: 600 });
  const { client, seen } = await faulty([
    { on: events, do: "refuse" },
    { on: events, do: "cut", events: 0 },
    { on: events, do: "cut", events: 1 },
  ]);
  const { order } = await client.buy(sale.id, { waitSeconds: 10 });
  const orders: Order[] = [];
  for await (const state of client.watchOrder(order.order_id)) {
    orders.push(state);
    if (state.status === "confirmed") await client.pay(order.order_id, "pi_1");
  }
  assert.deepEqual(
    orders.map((o) => [o.status, o.version]),
    [
      ["confirmed", 2],
      ["paid", 3],
    ],
  );
  const streams = (await seen()).filter((r) => r.path.endsWith("/events"));
  assert.deepEqual(
    streams.map((r) => [r.fault, r.headers["last-event-id"]]),
    [
      ["refuse", undefined],
      ["cut", undefined],
      ["cut", undefined],
      [undefined, "2"],
    ],
  );
});

test("a watch ends when nothing follows", async () => {
  const sale = await createSale();
  const { client, seen } = await faulty([]);
  const { order } = await client.buy(sale.id, { waitSeconds: 10 });
  const states: string[] = [];
  for await (const state of client.watchOrder(order.order_id)) states.push(state.status);
  assert.deepEqual(states, ["confirmed"]); // without a payment window that is final
  for await (const state of client.watchOrder(order.order_id, { after: 2 })) assert.fail(state.status);
  assert.equal((await seen()).at(-1)?.status, 204);
});

test("a silent connection is given up", async () => {
  const sale = await createSale({ payment_window_seconds: 600 });
  const { client, seen } = await faulty([{ on: events, do: "silence", events: 1 }]);
  const { order } = await client.buy(sale.id, { waitSeconds: 10 });
  const states: string[] = [];
  for await (const state of client.watchOrder(order.order_id, { silenceMs: 1_000 })) {
    states.push(state.status);
    if (state.status === "confirmed") await client.pay(order.order_id, "pi_1");
  }
  assert.deepEqual(states, ["confirmed", "paid"]);
  assert.ok((await seen()).filter((r) => r.path.endsWith("/events")).length >= 2);
});

// Node's fetch may lose the signal of a body to the garbage collector.
test("silent connections are given up while memory is collected", { timeout: 60_000 }, async (t) => {
  const sale = await createSale({ payment_window_seconds: 600 });
  assert.ok(gc, "run by npm test, which exposes the collector");
  const collector = setInterval(gc, 20);
  t.after(() => clearInterval(collector));
  const watches = Array.from({ length: 8 }, async () => {
    const { client } = await faulty([{ on: events, do: "silence", events: 1 }]);
    const { order } = await client.buy(sale.id, { waitSeconds: 10 });
    const watch = client.watchOrder(order.order_id, { silenceMs: 1_000 });
    assert.equal((await watch.next()).value?.status, "confirmed");
    await client.pay(order.order_id, "pi_1");
    assert.equal((await watch.next()).value?.status, "paid");
  });
  await Promise.all(watches);
});

test("a watch never goes back to a lower version", async () => {
  const event = (version: number, status: string) =>
    `event: ${status}\nid: ${version}\r\ndata: {"order_id":"x","version":${version},\ndata: "status":"${status}"}\r\n\r\n`;
  const stream = (body: string): Fault => ({
    on: events,
    do: "answer",
    status: 200,
    headers: { "Content-Type": "text/event-stream" },
    body,
  });
  const { client } = await faulty([
    stream(": \n\n" + event(2, "confirmed") + event(1, "reserved")),
    stream(event(1, "reserved") + event(2, "confirmed") + event(3, "paid") + event(4, "cancelled")),
  ]);
  const versions: number[] = [];
  for await (const order of client.watchOrder("x")) versions.push(order.version);
  assert.deepEqual(versions, [2, 3]);
});

test("a watch shows that an order expired, and the payment is refused", async () => {
  const sale = await createSale({ payment_window_seconds: 1 });
  const ann = buyer();
  const { order } = await ann.buy(sale.id);
  let last: Order | undefined;
  for await (last of ann.watchOrder(order.order_id));
  assert.equal(last?.status, "expired");
  await assert.rejects(ann.pay(order.order_id, "pi_1"), { slug: "order-expired", status: 410 });
});

test("a watch ends with the caller's signal, or after as many failures as the caller allows", async () => {
  const sale = await createSale({ payment_window_seconds: 600 });
  const { client } = await faulty([]);
  const { order } = await client.buy(sale.id, { waitSeconds: 10 });
  const abort = new AbortController();
  await assert.rejects(
    async () => {
      for await (const _ of client.watchOrder(order.order_id, { signal: abort.signal })) abort.abort();
    },
    { name: "AbortError" },
  );
  const refused = await faulty([{ do: "refuse" }, { do: "refuse" }, { do: "refuse" }]);
  const watch = refused.client.watchOrder(order.order_id, { tries: 2 });
  await assert.rejects(watch.next(), NetworkError);
  assert.equal((await refused.seen()).length, 2);
  await assert.rejects(buyer().watchOrder(order.order_id).next(), { slug: "order-not-found" });
});

test("the confirmation of an accepted order is waited for", async () => {
  const sale = await createSale({ payment_window_seconds: 600 });
  const ann = buyer();
  const { order } = await ann.buy(sale.id);
  assert.equal(order.status, "reserved");
  const confirmed = await ann.waitForConfirmation(order);
  assert.deepEqual([confirmed.status, confirmed.version, confirmed.order_id], ["confirmed", 2, order.order_id]);
});

test("the confirmation is found without events too", async () => {
  const sale = await createSale();
  const reserved = { status: "reserved", version: 1 };
  const { client, seen } = await faulty([
    { on: events, do: "answer", status: 502 },
    { on: "GET /v1/orders/", do: "answer", status: 200, body: JSON.stringify(reserved) },
    { on: events, do: "refuse" },
  ]);
  const { order } = await client.buy(sale.id);
  assert.equal((await client.waitForConfirmation(order)).status, "confirmed");
  const paths = (await seen()).slice(1).map((r) => r.path.split("?")[0]?.replace(order.order_id, "ID"));
  assert.deepEqual(paths.slice(0, 3), ["/v1/orders/ID/events", "/v1/orders/ID", "/v1/orders/ID/events"]);
});

test("the wait for a confirmation has a deadline", async () => {
  const still = 'event: reserved\nid: 1\ndata: {"status":"reserved","version":1}\n\n';
  const { client } = await faulty([
    { on: events, do: "answer", status: 200, body: still },
    { do: "answer", status: 200, body: '{"status":"reserved","version":1}' },
  ]);
  const order = { order_id: "x", receipt: "y" };
  await assert.rejects(client.waitForConfirmation(order, { deadlineMs: 200 }), NetworkError);
});

test("a watched sale shows purchases", async () => {
  const sale = await createSale({ stock: 3 });
  const { client, seen } = await faulty([{ on: events, do: "cut", events: 1 }]);
  const available: number[] = [];
  for await (const now of client.watchSale(sale.id)) {
    available.push(now.available);
    if (now.available === 0) break;
    // A stream may leave steps out, so each purchase waits to be seen.
    if (available.at(-2) !== now.available) await buyer(newUser()).buy(sale.id);
  }
  assert.deepEqual([...new Set(available)], [3, 2, 1, 0]);
  assert.ok((await seen()).length >= 2);
  assert.equal(await until(async () => (await taken(sale)) === 3 && 3), 3);
  await assert.rejects(
    client.watchSale("no-sale").next(),
    (e: unknown) => e instanceof ProblemError && e.status === 404,
  );
});
