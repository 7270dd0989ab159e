import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { test } from "node:test";
import { ProblemError } from "stampede-client";
import { adminToken, buyer, createSale, until, url } from "./shop.js";

const isProblem = (slug: string) => (error: unknown) => error instanceof ProblemError && error.slug === slug;

async function post(path: string, body: unknown): Promise<void> {
  const headers = { Authorization: `Bearer ${adminToken}`, "Content-Type": "application/json" };
  const response = await fetch(`${url}${path}`, { method: "POST", headers, body: JSON.stringify(body) });
  assert.ok(response.ok, await response.text());
}

test("an entrant is offered a unit and pays", async () => {
  const goods = await createSale({ stock: 1, payment_window_seconds: 600 });
  const entries = await createSale({ stock: 100, closes_at: new Date(Date.now() + 3000).toISOString() });
  await assert.rejects(buyer().draw(goods.id), isProblem("draw-not-found"));
  const secret = randomBytes(32);
  const commitment = createHash("sha256").update(secret).digest("hex");
  const path = `/v1/sales/${goods.id}/draw`;
  await post(path, { entries_sale_id: entries.id, parties: [{ name: "ann", commitment }] });
  assert.equal((await buyer().sale(goods.id)).offers_only, true);
  await assert.rejects(buyer().buy(goods.id), isProblem("offers-only"));

  const entering = await buyer().draw(goods.id);
  assert.equal(entering.state, "entering");
  const clients = [buyer(), buyer(), buyer()];
  const entered = await Promise.all(clients.map((client) => client.buy(entering.entries_sale_id)));
  const receipts = entered.map(({ order }) => order.receipt);
  await assert.rejects(buyer().drawProof(goods.id, receipts[0]!), isProblem("draw-not-frozen"));
  const isAt = async (state: string) => (await buyer().draw(goods.id)).state === state;
  await until(() => isAt("frozen"));
  assert.equal((await buyer().drawProof(goods.id, receipts[0]!)).outcome, "waiting");
  await post(`${path}/reveal`, { party: "ann", secret: secret.toString("hex") });
  const drawn = await until(async () => {
    const draw = await buyer().draw(goods.id);
    return draw.offered === 1 && draw;
  });
  assert.deepEqual([drawn.entries, drawn.last_rank], [3, 0]);
  const proofs = await Promise.all(receipts.map((receipt) => buyer().drawProof(goods.id, receipt)));
  assert.deepEqual(proofs.map((proof) => proof.rank).sort(), [0, 1, 2]);
  for (const [n, proof] of proofs.entries()) {
    assert.equal(proof.outcome, proof.rank === 0 ? "offered" : "waiting");
    if (proof.order_id === undefined) continue;
    assert.equal((await clients[n]!.pay(proof.order_id, `pi-${goods.id}`)).status, "paid");
  }
});
