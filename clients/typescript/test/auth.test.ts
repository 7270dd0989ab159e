import assert from "node:assert/strict";
import { createHmac } from "node:crypto";
import { test } from "node:test";
import { Stampede } from "stampede-client";
import { createSale, faulty, jwtSecret, jwtUrl, newUser, problem, url } from "./shop.js";

function token(user: string, expiresInSeconds: number): string {
  const encode = (part: object) => Buffer.from(JSON.stringify(part)).toString("base64url");
  const signed =
    encode({ alg: "HS256", typ: "JWT" }) +
    "." +
    encode({ sub: user, exp: Math.floor(Date.now() / 1000) + expiresInSeconds });
  return `${signed}.${createHmac("sha256", jwtSecret).update(signed).digest("base64url")}`;
}

test("a buyer with a token buys and watches, and the shop reports the money", async () => {
  const sale = await createSale({ payment_window_seconds: 600 });
  const user = newUser();
  const ann = new Stampede({ baseUrl: jwtUrl + "/", token: token(user, 600) });
  const { order } = await ann.buy(sale.id);
  const confirmed = await ann.waitForConfirmation(order);
  assert.deepEqual([confirmed.status, confirmed.user_id], ["confirmed", user]);
  await assert.rejects(ann.pay(order.order_id, "pi_1"), { slug: "not-found" });
  const { cashier } = await faulty([]);
  await cashier.reportPayment({ order_id: order.order_id, reference: `pi_${order.order_id}` });
  const states: string[] = [];
  for await (const state of ann.watchOrder(order.order_id, { after: 2 })) states.push(state.status);
  assert.deepEqual(states, ["paid"]);
});

test("a wrong token is refused at once", async () => {
  const { client, seen } = await faulty([problem(401, "unauthorized")], { token: "wrong" });
  await assert.rejects(client.buy("any"), { slug: "unauthorized", status: 401 });
  assert.equal((await seen()).length, 1);
  const stranger = new Stampede({ baseUrl: jwtUrl, token: "wrong" });
  await assert.rejects(stranger.orders().next(), { slug: "unauthorized", status: 401 });
  await assert.rejects(new Stampede({ baseUrl: url }).orders().next(), { slug: "unauthorized", status: 401 });
});

test("a token that has expired is refreshed once", async () => {
  const sale = await createSale();
  const user = newUser();
  const expired = token(user, -3600);
  const asked: (string | undefined)[] = [];
  const provider = async (refused?: string) => {
    asked.push(refused);
    return refused === undefined ? expired : token(user, 600);
  };
  const ann = new Stampede({ baseUrl: jwtUrl, token: provider });
  const { order } = await ann.buy(sale.id, { waitSeconds: 10 });
  assert.equal(order.status, "confirmed");
  assert.deepEqual(asked, [undefined, expired]);
  for await (const state of ann.watchOrder(order.order_id)) assert.equal(state.user_id, user);
  // Two connections: the order as it is, and that nothing follows.
  assert.equal(asked.length, 6);

  let calls = 0;
  const stubborn = new Stampede({ baseUrl: jwtUrl, token: () => `wrong-${++calls}` });
  await assert.rejects(stubborn.buy(sale.id), { slug: "unauthorized" });
  assert.equal(calls, 2);
});

test("a ticket opens a stream without a header", async () => {
  const sale = await createSale();
  const ann = new Stampede({ baseUrl: jwtUrl, token: token(newUser(), 600) });
  const { order } = await ann.buy(sale.id, { waitSeconds: 10 });
  for (const [{ events_url }, event] of [
    [await ann.orderTicket(order.order_id), "event: confirmed\n"],
    [await ann.saleTicket(sale.id), "event: sale\n"],
  ] as const) {
    const stream = await fetch(jwtUrl + events_url);
    assert.equal(stream.status, 200);
    let text = "";
    for await (const part of stream.body?.pipeThrough(new TextDecoderStream()) ?? []) {
      if ((text += part).includes(event)) break;
    }
    assert.ok(text.includes(event), text);
  }
});

test("an error of the token provider is the caller's, and is not repeated", async () => {
  let calls = 0;
  const token = () => {
    calls++;
    throw new RangeError("no session");
  };
  await assert.rejects(new Stampede({ baseUrl: url, token }).buy("any"), RangeError);
  assert.equal(calls, 1);
});
