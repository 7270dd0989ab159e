// What the client says is what the server and the pages say.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readFile, writeFile } from "node:fs/promises";
import { test } from "node:test";
import { promisify } from "node:util";
import { problemSlugs } from "stampede-client";
import { Webhook } from "standardwebhooks";
import { adminToken, createSale, url } from "./shop.js";

const client = new URL("..", import.meta.url);

test("the slugs are those of the server", async () => {
  const { components } = (await (await fetch(`${url}/openapi.json`)).json()) as Description;
  const slugs = components.schemas.ProblemType.enum.map((type) => type.replace("/problems/", ""));
  assert.deepEqual(slugs.sort(), [...problemSlugs].sort());
});

interface Description {
  components: { schemas: { ProblemType: { enum: string[] } } };
}

test("the examples of the README run", async () => {
  const page = await readFile(new URL("README.md", client), "utf8");
  const [buy, report, webhook, ...others] = [...page.matchAll(/```js\n(.*?)```/gs)].map(([, code = ""]) => code);
  assert.ok(buy !== undefined && report !== undefined && webhook !== undefined && others.length === 0);

  const sale = await createSale({ payment_window_seconds: 600 });
  const file = new URL("build/readme-buy.mjs", client);
  await writeFile(file, buy.replace("http://localhost:8080", url));
  const env = { ...process.env, SALE: sale.id };
  const { stdout } = await promisify(execFile)(process.execPath, [file.pathname], { env });
  assert.match(stdout, /^\S+ confirmed until \S+ { replayed: false }\n3 paid\n(\S+ paid\n)+/);

  const reporter = new URL("build/readme-report.mjs", client);
  const call = "\nawait moneyArrived(undefined, 'readme-js', 100);";
  await writeFile(reporter, report.replace("http://localhost:8080", url) + call);
  const reported = await promisify(execFile)(process.execPath, [reporter.pathname], {
    env: { ...process.env, CASHIER_TOKEN: adminToken },
  });
  assert.equal(reported.stdout, "readme-js refund_due order-not-found\n");

  const handler = new URL("build/readme-webhook.mjs", client);
  await writeFile(handler, webhook);
  const { handle } = (await import(handler.href)) as { handle: (request: Request) => Promise<Response> };
  process.env["WEBHOOK_SECRET"] = "whsec_" + Buffer.alloc(32, 1).toString("base64");
  const now = new Date();
  const headers = {
    "webhook-id": "o.3",
    "webhook-timestamp": String(Math.floor(now.getTime() / 1000)),
    "webhook-signature": new Webhook(process.env["WEBHOOK_SECRET"]).sign("o.3", now, '{"id":"o.3"}'),
  };
  const deliver = (body: string) => handle(new Request("http://shop/", { method: "POST", headers, body }));
  assert.equal((await deliver('{"id":"o.3"}')).status, 204);
  assert.equal((await deliver('{"id":"o.4"}')).status, 400);
});
