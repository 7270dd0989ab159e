// What the client says is what the pages say.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readFile, writeFile } from "node:fs/promises";
import { test } from "node:test";
import { promisify } from "node:util";
import { problemSlugs } from "stampede-client";
import { Webhook } from "standardwebhooks";
import { createSale, url } from "./shop.js";

const client = new URL("..", import.meta.url);

test("the slugs are those of the server's documentation", async () => {
  const page = await readFile(new URL("../../docs/http-api.md", client), "utf8");
  const [, problems = ""] = page.split("\n## Problems\n");
  const [table = ""] = problems.split("\n`Retry-After`");
  const slugs = [...table.matchAll(/`([a-z-]+)`/g)].map(([, slug]) => slug);
  assert.deepEqual(slugs.sort(), [...problemSlugs].sort());
});

test("the examples of the README run", async () => {
  const page = await readFile(new URL("README.md", client), "utf8");
  const [buy, webhook, ...others] = [...page.matchAll(/```js\n(.*?)```/gs)].map(([, code = ""]) => code);
  assert.ok(buy !== undefined && webhook !== undefined && others.length === 0);

  const sale = await createSale({ payment_window_seconds: 600 });
  const file = new URL("build/readme-buy.mjs", client);
  await writeFile(file, buy.replace("http://localhost:8080", url));
  const env = { ...process.env, SALE: sale.id };
  const { stdout } = await promisify(execFile)(process.execPath, [file.pathname], { env });
  assert.match(stdout, /^\S+ confirmed until \S+ { replayed: false }\n3 paid\n(\S+ paid\n)+/);

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
