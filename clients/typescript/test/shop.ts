// What the tests share: the servers that `task test:clients` has started, sales, buyers, and faults on the way.
import { execFile } from "node:child_process";
import { randomUUID } from "node:crypto";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { Cashier, Stampede, type ClientOptions, type Item, type Sale } from "stampede-client";

function environment(name: string): string {
  const value = process.env[name];
  if (value === undefined) throw new Error(`${name} is not set: run the tests by task test:clients`);
  return value;
}

export const url = environment("STAMPEDE_TEST_URL");
export const jwtUrl = environment("STAMPEDE_TEST_JWT_URL");
export const jwtSecret = environment("STAMPEDE_TEST_JWT_SECRET");
export const adminToken = environment("STAMPEDE_TEST_ADMIN_TOKEN");
const faultsUrl = environment("STAMPEDE_TEST_FAULTS_URL");

export interface Fault {
  /** A method and a part of the path; every request if it is left out. */
  on?: string;
  do: "refuse" | "drop" | "hold" | "answer" | "cut" | "silence";
  status?: number;
  headers?: Record<string, string>;
  body?: string;
  events?: number;
}

export interface Seen {
  method: string;
  path: string;
  headers: Record<string, string>;
  body: string;
  at_ms: number;
  fault?: string;
  status?: number;
}

export const newUser = () => `ann-${randomUUID()}`;

type Terms = Partial<Omit<Sale, "items">> & { items?: Omit<Item, "available">[] };

export async function createSale(terms: Terms = {}): Promise<Sale> {
  const response = await fetch(`${url}/v1/sales`, {
    method: "POST",
    headers: {
      Authorization: `Bearer ${adminToken}`,
      "Content-Type": "application/json",
    },
    body: JSON.stringify({ name: "Test", stock: terms.items ? undefined : 10, ...terms }),
  });
  if (response.status !== 201) throw new Error(await response.text());
  return (await response.json()) as Sale;
}

/** A client without faults. */
export const buyer = (user = newUser(), options: Partial<ClientOptions> = {}) =>
  new Stampede({ baseUrl: url, user, ...options });

/** A client behind a proxy, where each of the faults happens once, and the requests that the proxy has seen. */
export async function faulty(faults: Fault[], options: Partial<ClientOptions> = {}) {
  const plan = randomUUID();
  const response = await fetch(`${faultsUrl}/_plans/${plan}`, { method: "PUT", body: JSON.stringify(faults) });
  if (!response.ok) throw new Error(await response.text());
  const user = newUser();
  const baseUrl = `${faultsUrl}/${plan}`;
  return {
    user,
    client: new Stampede({ baseUrl, user, ...options }),
    cashier: new Cashier({ baseUrl, token: adminToken }),
    seen: async () => (await (await fetch(`${faultsUrl}/_plans/${plan}`)).json()) as Seen[],
  };
}

export const problem = (status: number, slug: string, headers: Record<string, string> = {}): Fault => ({
  do: "answer",
  status,
  headers: { "Content-Type": "application/problem+json", ...headers },
  body: JSON.stringify({ type: `/problems/${slug}`, title: slug, status, detail: "By the proxy." }),
});

/** Has the relay send all events from now on to a webhook. */
export async function addRelayTarget(webhook: string, secret: string): Promise<void> {
  const file = join(await mkdtemp(join(tmpdir(), "stampede-test-")), "secret");
  await writeFile(file, secret, { mode: 0o600 });
  const target = ["relay", "add", `shop-${randomUUID()}`, webhook, `--secret-file=${file}`, "--allow-private"];
  await promisify(execFile)(environment("STAMPEDE_TEST_PROGRAM"), target);
}

/** How many units of a sale are reserved or sold. Another server's answer may be a second old, this one's is not. */
export async function taken(sale: Sale): Promise<number> {
  const now = await buyer().sale(sale.id);
  return now.held + now.sold;
}

export async function until<T>(look: () => Promise<T | undefined | false>): Promise<T> {
  for (const end = Date.now() + 50_000; ;) {
    const found = await look();
    if (found !== undefined && found !== false) return found;
    if (Date.now() > end) throw new Error("not within 50 s");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
