import assert from "node:assert/strict";
import { test } from "node:test";
import { newKey, OutcomeUnknownError, type Sale } from "stampede-client";
import { buyer, createSale, faulty, problem } from "./shop.js";

const withPayment = () => createSale({ payment_window_seconds: 600 });

test("a payment may be repeated, and another one is refused", async () => {
  const sale = await withPayment();
  const { client, seen } = await faulty([{ on: "POST /pay", do: "drop" }]);
  const { order } = await client.buy(sale.id, { waitSeconds: 10 });
  const paid = await client.pay(order.order_id, "pi_1");
  assert.deepEqual([paid.status, paid.payment_reference, paid.version], ["paid", "pi_1", 3]);
  assert.ok(paid.paid_at !== undefined && paid.paid_at === paid.updated_at);
  assert.equal((await seen()).length, 3);
  assert.equal((await client.pay(order.order_id, "pi_1")).version, 3);
  const other = { slug: "already-paid", status: 409, paymentReference: "pi_1" };
  await assert.rejects(client.pay(order.order_id, "pi_2"), other);
  await assert.rejects(client.cancel(order.order_id), { slug: "illegal-transition" });
});

test("a payment waits for the confirmation", async () => {
  const sale = await withPayment();
  const { client } = await faulty([
    { on: "POST /pay", ...problem(409, "order-not-confirmed", { "Retry-After": "1" }) },
  ]);
  const { order } = await client.buy(sale.id);
  assert.equal((await client.pay(order.order_id, "pi_1")).status, "paid");
});

test("the outcome of a payment is unknown when its answers are lost", async () => {
  const sale = await withPayment();
  const { client } = await faulty([{ on: "POST /pay", do: "drop" }]);
  const { order } = await client.buy(sale.id, { waitSeconds: 10 });
  const lost = (e: unknown) => e instanceof OutcomeUnknownError && e.key === undefined;
  await assert.rejects(client.pay(order.order_id, "pi_1", { tries: 1 }), lost);
  assert.equal((await client.order(order.order_id)).status, "paid");
});

test("a cancelled order gives its units back, and another key buys again", async () => {
  const sale = await createSale({ stock: 1, payment_window_seconds: 600 });
  const ann = buyer();
  const { order } = await ann.buy(sale.id, { waitSeconds: 10 });
  assert.equal((await ann.cancel(order.order_id)).status, "cancelled");
  assert.equal((await ann.cancel(order.order_id)).status, "cancelled");
  await assert.rejects(ann.pay(order.order_id, "pi_1"), { slug: "illegal-transition" });
  for await (const now of ann.watchSale(sale.id)) if (now.available === 1) break;
  // One second passes before units that come back to an empty sale are sold.
  const again = await buyAgain(sale);
  assert.notEqual(again.order.order_id, order.order_id);

  async function buyAgain(sale: Sale) {
    for (const key = newKey(); ;) {
      try {
        return await ann.buy(sale.id, { key });
      } catch (error) {
        assert.match(String(error), /sold-out|already-purchased/);
        await new Promise((resolve) => setTimeout(resolve, 50));
      }
    }
  }
});

test("a buyer waits, is offered a unit, and leaves", async () => {
  const sale = await createSale({ stock: 1, payment_window_seconds: 600, waitlist: true });
  const [ann, bob, cid] = [buyer(), buyer(), buyer()];
  await assert.rejects(bob.joinWaitlist(sale.id), { slug: "not-sold-out" });
  const { order } = await ann.buy(sale.id, { waitSeconds: 10 });
  const first = await bob.joinWaitlist(sale.id);
  assert.deepEqual([first.place, first.state, first.sale_id], [1, "waiting", sale.id]);
  assert.deepEqual(await bob.joinWaitlist(sale.id), first);
  await cid.joinWaitlist(sale.id);
  assert.equal((await cid.leaveWaitlist(sale.id)).state, "left");
  await ann.cancel(order.order_id);
  for (const end = Date.now() + 20_000; (await bob.waitlistPlace(sale.id)).state !== "offered"; ) {
    assert.ok(Date.now() < end);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  const again = await bob.joinWaitlist(sale.id);
  assert.deepEqual([again.state, again.entry_order_id], ["offered", first.entry_order_id]);
  assert.equal((await bob.order(again.order_id ?? "")).sale_id, sale.id);
});

test("a buyer waits for an item", async () => {
  const items = ["m", "l"].map((code) => ({ code, name: code, stock: 1 }));
  const sale = await createSale({ items, waitlist: true });
  const [ann, bob] = [buyer(), buyer()];
  await ann.buy(sale.id, { items: { m: 1 } });
  await assert.rejects(bob.joinWaitlist(sale.id, { item: "l" }), { slug: "not-sold-out" });
  await assert.rejects(bob.joinWaitlist(sale.id, { item: "xl" }), { slug: "unknown-item" });
  const joined = await bob.joinWaitlist(sale.id, { item: "m" });
  assert.deepEqual([joined.item, (await bob.waitlistPlace(sale.id)).item], ["m", "m"]);
});

test("orders and sales are listed over their pages", async () => {
  const { client, seen } = await faulty([]);
  const bought: string[] = [];
  for (let i = 0; i < 7; i++) {
    const { order } = await client.buy((await createSale()).id, { waitSeconds: 10 });
    bought.unshift(order.order_id);
  }
  const before = (await seen()).length;
  const listed: string[] = [];
  for await (const order of client.orders({ pageSize: 3 })) listed.push(order.order_id);
  assert.deepEqual(listed, bought);
  assert.equal((await seen()).length - before, 3);
  const [newest] = bought;
  const { sale_id: saleId } = await client.order(newest ?? "");
  const ofSale: string[] = [];
  for await (const order of client.orders({ saleId })) ofSale.push(order.order_id);
  assert.deepEqual(ofSale, [newest]);

  const sales: string[] = [];
  for await (const sale of client.sales({ pageSize: 3 })) if (sales.push(sale.id) === 7) break;
  assert.equal(new Set(sales).size, 7);
  for await (const order of buyer().orders()) assert.fail(order.order_id);
});

test("an order is shown to its buyer, and with its receipt", async () => {
  const sale = await createSale();
  const ann = buyer();
  const { order } = await ann.buy(sale.id, { waitSeconds: 10 });
  const { receipt } = order;
  assert.equal((await ann.order(order.order_id)).status, "confirmed");
  assert.equal((await ann.order(order.order_id, { receipt })).status, "confirmed");
  await assert.rejects(ann.order(order.order_id, { receipt: receipt + "x" }), { slug: "invalid-request", status: 400 });
  await assert.rejects(buyer().order(order.order_id), { slug: "order-not-found", status: 404 });
  await assert.rejects(buyer().order(order.order_id, { receipt }), { slug: "order-not-found", status: 404 });
  await assert.rejects(ann.order("../sales"), { slug: "order-not-found" });
});

test("a sale is shown", async () => {
  const sale = await createSale({ name: "Front row", opens_at: "2099-01-01T00:00:00.000Z" });
  assert.deepEqual(await buyer().sale(sale.id), sale);
  assert.equal(sale.state, "scheduled");
});
