import assert from "node:assert/strict";
import { test } from "node:test";
import { OutcomeUnknownError } from "stampede-client";
import { createSale, faulty } from "./shop.js";

const terms = {
  per_order_limit: 2,
  payment_window_seconds: 600,
  payment_grace_seconds: 30,
  payments_per_second: 1,
  unit_price: 1290,
  currency: "EUR",
};

test("an order says what to pay and from when, and money settles it", async () => {
  const sale = await createSale(terms);
  const { payment_grace_seconds, payments_per_second, unit_price, currency } = sale;
  assert.deepEqual([payment_grace_seconds, payments_per_second, unit_price, currency], [30, 1, 1290, "EUR"]);
  const { client, cashier, seen } = await faulty([{ on: "POST /v1/payments", do: "drop" }]);
  const { order } = await client.buy(sale.id, { quantity: 2, waitSeconds: 10 });
  assert.equal(order.status, "confirmed");
  if (order.status !== "confirmed") return;
  assert.deepEqual([order.amount, order.currency], [2580, "EUR"]);
  const window = Date.parse(order.expires_at ?? "") - Date.parse(order.pay_from ?? "");
  assert.equal(window, 600_000);

  const report = { order_id: order.order_id, reference: `pi_${order.order_id}`, amount: 2580, currency: "EUR" };
  const settled = await cashier.reportPayment(report);
  assert.deepEqual([settled.state, settled.sale_id, settled.amount], ["settled", sale.id, 2580]);
  assert.equal((await seen()).filter((request) => request.path === "/v1/payments").length, 2);
  assert.deepEqual(await cashier.reportPayment(report), settled);
  const unclear = await cashier.reportPayment({ ...report, amount: 1 });
  assert.deepEqual([unclear.state, unclear.reason], ["unclear", "other-amount"]);
  const dismissed = await cashier.dismiss(unclear.reference, "Entered by hand.");
  assert.deepEqual([dismissed.state, dismissed.note], ["dismissed", "Entered by hand."]);
  await assert.rejects(cashier.dismiss(report.reference, "r"), { slug: "not-unclear" });
  assert.equal((await client.order(order.order_id)).payment_reference, report.reference);
  await assert.rejects(cashier.markRefunded(report.reference, "re_1"), { slug: "refund-not-due" });
});

test("money that settles nothing is due for refund until it is refunded", async () => {
  const sale = await createSale(terms);
  const { client, cashier } = await faulty([]);
  const { order_id } = (await client.buy(sale.id, { waitSeconds: 10 })).order;
  const references = ["less", "right", "again"].map((what) => `${what}/1 %2F?#${order_id}`);
  const [less = "", right = "", again = ""] = references;
  const report = (reference: string, amount: number) =>
    cashier.reportPayment({ order_id, reference, amount, currency: "EUR" });
  assert.equal((await report(less, 1289)).reason, "amount-mismatch");
  assert.equal((await report(right, 1290)).state, "settled");
  assert.equal((await report(again, 1290)).reason, "already-paid");
  const due: (string | undefined)[] = [];
  const filter = { state: "refund_due", saleId: sale.id, orderId: order_id, pageSize: 1 } as const;
  for await (const payment of cashier.payments(filter)) due.push(payment.reference);
  assert.deepEqual(due, [less, again]);
  const refunded = await cashier.markRefunded(less, "re/1");
  assert.deepEqual([refunded.state, refunded.refund_reference], ["refunded", "re/1"]);
  assert.deepEqual(await cashier.markRefunded(less, "re/1"), refunded);
  await assert.rejects(cashier.markRefunded(less, "re/2"), { slug: "already-refunded", refundReference: "re/1" });
  await assert.rejects(cashier.markRefunded("none", "re/1"), { slug: "payment-not-found" });
});

test("a report that is none is refused, and one without an answer is unknown", async () => {
  const { cashier } = await faulty([
    { on: "POST /v1/payments", do: "answer", status: 200, body: "{}" },
    { on: "POST /v1/payments", do: "drop" },
  ]);
  const report = { order_id: "none", reference: "pi_1" };
  await assert.rejects(cashier.reportPayment(report, { tries: 1 }), OutcomeUnknownError);
  await assert.rejects(cashier.reportPayment(report, { tries: 1 }), OutcomeUnknownError);
  await assert.rejects(cashier.reportPayment({ ...report, reference: "" }), { slug: "invalid-request" });
});
