// The whole shop of a browser: signs in, waits for the opening, buys, follows the order, pays. No library, no build.
// What it must never do is buy twice or say what it does not know. So each purchase has a key, which is stored before
// the click is sent, and everything without an answer is sent again with the same key.

import { verify, words } from "/draw.js";

const $ = (id) => document.getElementById(id);
const config = await (await fetch("/config")).json();
const salePath = `/v1/sales/${config.sale}`;

const ENDED = new Set(["paid", "cancelled", "expired", "rejected", "voided"]);
const STATUSES = ["reserved", "confirmed", ...ENDED];
const REPEATED = new Set([429, 503]); // and what gets no answer of the API at all

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const jitter = (ms) => ms * (1 + Math.random() / 2); // so that a crowd does not come back at once

// --- The server's clock -------------------------------------------------------------------------------------------

// Date has whole seconds. The server's time lay between the request and the answer, at second + 0 to 999 ms: each
// answer narrows the range in which the difference of the clocks must be.
const clock = { least: -Infinity, most: Infinity };

function learnTime(answer, sent, received) {
  const second = Date.parse(answer.headers.get("Date"));
  if (Number.isNaN(second)) return;
  const least = second - received, most = second + 999 - sent;
  if (least > clock.most || most < clock.least) Object.assign(clock, { least, most }); // one of the clocks was set
  else Object.assign(clock, { least: Math.max(clock.least, least), most: Math.min(clock.most, most) });
}

const now = () => Date.now() + (Number.isFinite(clock.least) ? (clock.least + clock.most) / 2 : 0);
// The server's clock is not behind this: what may not begin too early waits for it.
const surely = () => Date.now() + (Number.isFinite(clock.least) ? clock.least : 0);

// --- Who is buying ------------------------------------------------------------------------------------------------

let user = localStorage.getItem("user") ?? "";
let token = { text: "", until: 0 };

// currentToken renews a token before it expires. A real shop would ask for a session, not for a name.
async function currentToken() {
  if (Date.now() > token.until - 30_000) {
    const answer = await fetch("/login", { method: "POST", body: JSON.stringify({ name: user }) });
    if (!answer.ok) throw new Error(await answer.text());
    const { token: text, expires_in } = await answer.json();
    token = { text, until: Date.now() + expires_in * 1000 };
  }
  return token.text;
}

// --- Calls --------------------------------------------------------------------------------------------------------

// call makes one call of the API. It returns the status (0 without an answer), the body, and after how many
// milliseconds to come back.
async function call(method, path, body, headers = {}) {
  try {
    if (user) headers.Authorization = `Bearer ${await currentToken()}`;
    if (body) headers["Content-Type"] = "application/json";
    const sent = Date.now();
    const answer = await fetch(config.api + path, { method, headers, body: body && JSON.stringify(body) });
    learnTime(answer, sent, Date.now());
    const text = await answer.text();
    const isJSON = /json/.test(answer.headers.get("Content-Type") ?? "");
    if (answer.status === 401) token.until = 0;
    return {
      status: answer.status,
      body: isJSON ? JSON.parse(text) : {},
      location: answer.headers.get("Location"),
      after: (Number(answer.headers.get("Retry-After")) || 1) * 1000,
    };
  } catch {
    return { status: 0, body: {}, after: 1000 };
  }
}

// ask makes one call of the shop's own server, which answers null if there is no answer to use.
async function ask(method, path, body) {
  try {
    const headers = { Authorization: `Bearer ${await currentToken()}` };
    const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

// slugOf is "" for an answer that the API did not make. 502 and 504 are a proxy's, whatever they say.
const slugOf = (answer) => [502, 504].includes(answer.status) ? ""
  : /^\/problems\/([a-z-]+)$/.exec(answer.body?.type)?.[1] ?? "";

// --- The sale -----------------------------------------------------------------------------------------------------

let sale = null;

async function loadSale() {
  for (;;) {
    const sent = Date.now();
    try {
      const answer = await fetch(config.api + salePath, { cache: "no-cache" });
      learnTime(answer, sent, Date.now());
      if (answer.ok) {
        takeSale(await answer.json());
        return;
      }
      say("bad", answer.status === 404 ? "There is no such sale." : "The shop does not answer. Trying again.");
    } catch {
      say("bad", "The shop cannot be reached. Trying again.");
    }
    await pause(jitter(1000));
  }
}

// takeSale shows the sale as it is now. Its stream says what is left of each size, not what it is called.
function takeSale(seen) {
  const known = sale?.items ?? [];
  sale = { ...sale, ...seen };
  sale.items = seen.items?.map((item) => ({ ...known.find((k) => k.code === item.code), ...item }));
}

// watchSale keeps the stock on the page current. Anybody may read this stream, so it needs no ticket.
async function watchSale() {
  for (;;) {
    const source = new EventSource(config.api + salePath + "/events");
    source.addEventListener("sale", (event) => {
      takeSale(JSON.parse(event.data));
      render();
    });
    await closed(source);
    await pause(jitter(1000));
  }
}

// closed waits until a stream has ended for good. EventSource reconnects by itself while its state is CONNECTING.
const closed = (source) => new Promise((done) => {
  source.addEventListener("error", () => source.readyState === EventSource.CLOSED && done());
  source.addEventListener("over", () => { source.close(); done(); });
});

const sizeOf = (code) => sale.items?.find((item) => item.code === code);
const picked = () => sizeOf($("sizes").querySelector(":checked")?.value);

// what says what an order has, or what is left: 1 × Medium, 2 × Large.
const what = (items) => Object.entries(items).filter(([, n]) => n > 0)
  .map(([code, n]) => `${n} × ${sizeOf(code)?.name ?? code}`).join(", ");

const opensIn = () => (sale?.opens_at ? Date.parse(sale.opens_at) - now() : 0);
const isScheduled = () => sale?.state === "scheduled" && opensIn() > 0;
const isOpen = () => sale?.state === "open" || (sale?.state === "scheduled" && opensIn() <= 0);

// --- The purchase -------------------------------------------------------------------------------------------------

// The attempt is this buyer's purchase in this sale: {key, quantity, size}, and {order, receipt} once it is accepted. A
// sale without items has no size. In a draw it is the entry.
// Another tab has the same one, so that both buy the same order.
const attemptName = () => `attempt ${config.sale} ${user}`;
const attempt = {
  load: () => JSON.parse(localStorage.getItem(attemptName()) ?? "null"),
  save: (made) => localStorage.setItem(attemptName(), JSON.stringify(made)),
  forget: () => localStorage.removeItem(attemptName()),
};

let busy = false;

const isDrawn = () => Boolean(sale.offers_only);
const ordersPath = () => (isDrawn() ? `/v1/sales/${sale.entries_sale_id}/orders` : `${salePath}/orders`);

// buy sends a purchase until there is an answer to it.
async function buy() {
  if (busy) return;
  busy = true;
  render();
  const made = attempt.load() ??
    { key: crypto.randomUUID(), quantity: Number($("quantity").value) || 1, size: picked()?.code };
  attempt.save(made); // before it is sent: a reload repeats it
  say("info", isDrawn() ? "Entering …" : "Buying …");
  const body = made.size ? { items: { [made.size]: made.quantity } } : { quantity: made.quantity };
  while (!decided(made, await call("POST", ordersPath(), body, { "Idempotency-Key": made.key }))) {
    await pause(jitter(made.after));
  }
  busy = false;
  render();
}

// decided tells the buyer about an answer, and returns false if the purchase has to be repeated.
function decided(made, answer) {
  const slug = slugOf(answer);
  const seconds = Math.ceil(answer.after / 1000);
  made.after = answer.after;
  if ((answer.status === 202 || answer.status === 201) && answer.body?.order_id) {
    attempt.save({ ...made, order: answer.body.order_id, receipt: answer.body.receipt });
    if (isDrawn()) {
      say("");
      return true;
    }
    say("good", made.quantity > 1 ? "The shirts are reserved for you." : "The shirt is reserved for you.", "order");
    follow(answer.body.order_id, answer.body.receipt, answer.body);
    return true;
  }
  if (slug === "" || slug === "outcome-unknown") {
    say("info", "No answer yet: we do not know whether the order was taken. Asking again, with the same key, so that " +
      "nothing is bought twice.");
    return false;
  }
  if (slug === "rate-limited") {
    say("info", `Too many requests: nothing was bought. Trying again in ${seconds} s.`);
    return false;
  }
  if (REPEATED.has(answer.status)) {
    say("info", "The shop is busy: nothing was bought. Trying again.");
    return false;
  }
  if (answer.status === 401) {
    say("info", "Signing in again.");
    return false; // with a new token
  }
  if (slug === "sale-not-open") {
    sale.opens_at = answer.body.opens_at;
    say("info", "Not open yet. Your purchase is sent at the opening.");
    made.after = Math.max(opensIn(), 100);
    return false;
  }
  if (slug === "order-ended") {
    attempt.forget();
    say("bad", `That order is ${answer.body.order_status}. You can buy again.`);
    return true;
  }
  if (slug === "already-purchased" && answer.location) {
    const id = answer.location.split("/").pop();
    if (order?.order_id === id && isEnded(order)) {
      say("info", "The shirts of your last order are still on their way back. Trying again.");
      return false;
    }
    attempt.save({ ...made, order: id });
    if (isDrawn()) {
      say("info", "You have entered in another browser. It has your receipt, and shows your rank.");
      return true;
    }
    say("info", "You already have an order in this sale.", "order");
    follow(id);
    return true;
  }
  attempt.forget(); // nothing was bought, and the next click is another purchase
  say("bad", {
    "sold-out": made.size ? shortText(made, answer.body.available ?? {})
      : "Sold out. Shirts may come back: unpaid orders expire.",
    "sale-paused": "The sale is paused. Try again when it goes on.",
    "sale-ended": "The sale is over.",
  }[slug] ?? answer.body.detail ?? "The purchase was refused.");
  return true;
}

// shortText says which size is gone, and what is left of the sale.
function shortText(made, left) {
  const name = sizeOf(made.size).name, others = what(left);
  return (made.quantity > 1 ? `Fewer than ${made.quantity} shirts are left in ${name}.` : `${name} is sold out.`) +
    (others ? ` Still there: ${others}.` : " Shirts may come back: unpaid orders expire.");
}

// --- The order ----------------------------------------------------------------------------------------------------

let order = null;

const isEnded = (o) => ENDED.has(o.status) || (o.status === "confirmed" && !o.expires_at);

// follow shows the order and every change of it. EventSource sends no headers, so each connection begins with a ticket,
// which is asked for with the token. Within its minute EventSource reconnects by itself.
async function follow(id, receipt, first) {
  if (order?.order_id === id && !isEnded(order)) return;
  order = { version: 0, ...first, order_id: id };
  render();
  while (order?.order_id === id && !isEnded(order)) {
    const answer = await call("POST", `/v1/orders/${id}/events/ticket`);
    if (answer.status === 201) {
      const query = receipt ? `&receipt=${encodeURIComponent(receipt)}` : "";
      const source = new EventSource(config.api + answer.body.events_url + query);
      for (const status of STATUSES) {
        source.addEventListener(status, (event) => {
          if (order?.order_id === id) take(JSON.parse(event.data));
          if (order?.order_id !== id || isEnded(order)) source.dispatchEvent(new Event("over"));
        });
      }
      await closed(source);
    }
    if (order?.order_id !== id || isEnded(order)) return;
    // EventSource does not tell why it was refused.
    const shown = await call("GET", `/v1/orders/${id}` + (receipt ? `?receipt=${receipt}` : ""));
    if (shown.status === 200) take(shown.body);
    else if (shown.status === 404) return lost(id);
    await pause(jitter(answer.after));
  }
}

function lost(id) {
  attempt.forget();
  order = null;
  say("bad", `The order ${id} does not exist any more. You can buy again.`);
  render();
}

// take shows a version of the order, unless a later one is shown.
function take(seen) {
  if (order && seen.version < order.version) return;
  const changed = seen.status !== order?.status;
  order = seen;
  if (isEnded(seen) && seen.status !== "paid" && seen.status !== "confirmed" && !isDrawn()) attempt.forget();
  if (changed && seen.status !== "reserved") {
    loadHistory();
    loadPayments(seen.order_id);
    if (noteAbout === "order") say(""); // the order tells more now
  }
  render();
}

let paying = false;

async function pay() {
  paying = true;
  render();
  const opened = await ask("POST", `/orders/${order.order_id}/payments`);
  if (opened) {
    location.href = opened.pay_url;
    return;
  }
  say("bad", "The payment provider cannot be reached. Nothing was paid.");
  paying = false;
}

// cancel may be repeated, so it is, until there is an answer.
async function cancel() {
  $("cancel").disabled = true;
  for (;;) {
    const answer = await call("POST", `/v1/orders/${order.order_id}/cancel`);
    const slug = slugOf(answer);
    if (answer.status === 200 && answer.body?.order_id) take(answer.body);
    else if (["", "unauthorized", "order-not-confirmed"].includes(slug) || REPEATED.has(answer.status)) {
      await pause(jitter(answer.after));
      continue;
    } else say("bad", answer.body.detail);
    break;
  }
  $("cancel").disabled = false;
}

// --- The draw -----------------------------------------------------------------------------------------------------

let draw = null, proof = null;

// watchDraw follows the draw, and this entrant in it. An offer is an order.
async function watchDraw() {
  for (;;) {
    const answer = await call("GET", `${salePath}/draw`);
    if (answer.status === 200) draw = answer.body;
    const entry = user && attempt.load();
    if (draw?.root && entry?.receipt && provesMore()) await loadProof(entry);
    render();
    await pause(jitter(["over", "void"].includes(draw?.state) ? 10_000 : 1000));
  }
}

// provesMore is true when a proof has news: the place, then the rank, then what became of it. Until then the draw tells
// enough, which servers and caches have once for everybody.
const provesMore = () => !proof || (proof.outcome === "waiting" &&
  (proof.rank === undefined ? draw.ranked_at : proof.rank < draw.offered + draw.skipped));

async function loadProof(entry) {
  const answer = await call("GET", `${salePath}/draw/proof?receipt=${entry.receipt}`);
  if (answer.status === 200) proof = answer.body;
  if (proof?.order_id) follow(proof.order_id);
  if (answer.status !== 404) return;
  const shown = await call("GET", `/v1/orders/${entry.order}?receipt=${entry.receipt}`);
  if (shown.status === 200) proof = { outcome: "missing", status: shown.body.status };
}

async function verifyEntry() {
  const answer = await fetch(`${config.api}${salePath}/draw/leaves`).catch(() => null);
  const list = answer?.ok && new Uint8Array(await answer.arrayBuffer().catch(() => 0));
  if (!list?.length) return text("verified", "The list could not be looked up. Try again.");
  text("verified", await verify(list, attempt.load().receipt, draw).then(
    ({ place, rank }) => (place === proof.place && rank === proof.rank
      ? `Verified: your entry is at place ${place} of the list, the list has the root that was published, and its rank ` +
        `follows from the seed: ${rank}.`
      : `The shop said place ${proof.place} and rank ${proof.rank}, and it is place ${place} and rank ${rank}!`),
    (problem) => `It cannot be verified: ${problem.message}.`));
}

// --- The waiting list ---------------------------------------------------------------------------------------------

let place = null; // of this buyer

const isWaiting = () => place?.state === "waiting";
// Only who waits gets units then, also of those that are left.
const isForList = () => Boolean(sale.waitlist) && isOpen() && (sale.available < 1 || sale.waiting > 0);

// wait joins the waiting list, at its end if the own place had its turn.
async function wait() {
  busy = true;
  render();
  if (place && place.state !== "left") await changePlace("/leave");
  await changePlace("");
  busy = false;
  followPlace();
}

// changePlace may be repeated, so it is, until there is an answer.
async function changePlace(step) {
  for (;;) {
    const answer = await call("POST", `${salePath}/waitlist${step}`);
    const again = [0, 401, 429].includes(answer.status) || answer.status >= 500;
    // It is too early to leave a place of a moment ago, and to join again after one that was left a moment ago.
    if (again || ["order-not-confirmed", "order-ended"].includes(slugOf(answer))) {
      await pause(jitter(answer.after));
      continue;
    }
    if (answer.body.state) place = answer.body;
    say("bad", answer.status < 300 ? "" : answer.body.detail);
    return render();
  }
}

// lookAtPlace returns the state of the own place. An offer is an order.
async function lookAtPlace() {
  const answer = await call("GET", `${salePath}/waitlist`);
  if (answer.status === 404) return "none";
  if (answer.status === 200) place = answer.body;
  if (place?.order_id) follow(place.order_id);
  render();
  return place?.state ?? "waiting";
}

async function followPlace() {
  while (await lookAtPlace() === "waiting") await pause(jitter(2000));
}

// --- Payments and history -----------------------------------------------------------------------------------------

let payments = []; // of one order
const query = new URLSearchParams(location.search);
const returned = query.has("payment") ? { payment: query.get("payment"), order: query.get("order") } : null;

// loadPayments asks the shop what became of the money for an order. The shop asks Stampede.
async function loadPayments(id) {
  const answer = await ask("GET", `/orders/${id}/payments`);
  if (answer) payments = answer.payments;
  render();
}

// awaitPayment waits for the outcome of the payment from whose page the buyer comes back.
async function awaitPayment() {
  history.replaceState(null, "", "/");
  for (;;) {
    await loadPayments(returned.order);
    const made = payments.find((p) => p.reference === returned.payment);
    if (made?.state === "settled") return say("good", "Paid. See you in the front row!");
    if (made && made.state !== "waiting") return say("bad", refundText(made));
    say("info", "The payment has arrived at the provider. Waiting for the shop to hear of it …");
    await pause(500);
  }
}

const refundText = (p) => `Your ${money(p.amount, p.currency)} ` +
  (p.state === "refunded" ? "were paid back: " : "will be paid back: ") + ({
  "order-expired": "the order had expired before the payment came.",
  "order-cancelled": "the order was cancelled.",
  "already-paid": "the order was paid by another payment.",
}[p.reason] ?? "the order does not exist any more.");

const historyPage = { limit: 5, next: null };

async function loadHistory(cursor) {
  const query = `?limit=${historyPage.limit}` + (cursor ? `&cursor=${cursor}` : "");
  const answer = await call("GET", "/v1/orders" + query);
  if (answer.status !== 200) return; // the list stays as it was
  historyPage.next = answer.body.next_cursor ?? null;
  const rows = answer.body.orders.map(historyRow);
  if (cursor) $("history-list").append(...rows);
  else $("history-list").replaceChildren(...rows);
  $("history-empty").hidden = $("history-list").childElementCount > 0;
  $("history-more").hidden = !historyPage.next;
  if (cursor) rows[0]?.focus();
}

function historyRow(o) {
  const row = element("li", { tabIndex: -1 });
  const what = element("span", {},
    (o.sale_id === config.sale ? contents(o) : o.sale_id === sale.entries_sale_id ? "Entry in the draw"
      : o.order_id === place?.entry_order_id ? "Place in the waiting list" : `${o.quantity} × another sale`) + " ",
    element("small", {}, new Date(o.reserved_at).toLocaleString()));
  const tone = { paid: "good", confirmed: "", reserved: "" }[o.status] ?? "bad";
  row.append(what, element("span", { className: `badge ${tone}` }, o.status));
  return row;
}

// contents says what an order of this sale has, and what it costs.
const contents = (o) => (o.items ? `${sale.name}, ${what(o.items)}` : `${o.quantity} × ${sale.name}`) +
  (o.amount ? `, ${money(o.amount, o.currency)}` : "");

// --- The page -----------------------------------------------------------------------------------------------------

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

let noteAbout = "";

function say(tone, text = "", about = "") {
  noteAbout = about;
  const note = $("status");
  note.className = `note ${tone}`;
  note.hidden = !text;
  if (note.textContent !== text) note.textContent = text; // is read aloud
}

const text = (id, value) => { if ($(id).textContent !== value) $(id).textContent = value; };
const disable = (id, off) => { if ($(id).disabled !== off) $(id).disabled = off; };

function duration(ms) {
  const seconds = Math.max(0, Math.ceil(ms / 1000));
  const part = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
  return (hours ? `${hours}:${part(minutes)}` : String(minutes)) + `:${part(seconds % 60)}`;
}

// money formats minor units of a currency.
function money(minor, currency) {
  const format = new Intl.NumberFormat("en", { style: "currency", currency, trailingZeroDisplay: "stripIfInteger" });
  return format.format(minor / 10 ** format.resolvedOptions().maximumFractionDigits);
}

// addSizes makes the buttons of the sizes.
function addSizes() {
  $("sizes").append(...(sale.items ?? []).map((item) => element("label", {},
    element("input", { type: "radio", name: "size", value: item.code }), item.name,
    element("small", {}))));
}

function render() {
  if (!sale) return;
  const has = order && !(isEnded(order) && order.status !== "paid" && order.status !== "confirmed");
  $("signin").hidden = Boolean(user);
  $("account").hidden = !user;
  text("account-name", user);
  if (isDrawn()) renderDrawn();
  else renderSale(has);
  renderOrder();
  $("history").hidden = !user;
}

function renderSale(has) {
  text("sale-name", sale.name);
  text("sale-state", isScheduled() ? "Opens soon"
    : { open: "On sale now", scheduled: "On sale now", paused: "Paused", ended: "Sale over" }[sale.state]);
  $("price").hidden = !sale.currency;
  if (sale.currency) text("unit-price", unitPrice());
  $("sizes").hidden = !sale.items || Boolean(has);
  for (const choice of $("sizes").querySelectorAll("input")) {
    const item = sizeOf(choice.value);
    choice.disabled = busy || item.available < 1;
    choice.parentElement.classList.toggle("gone", item.available < 1);
    const left = item.available > 0 ? `${item.available} left` : "gone";
    if (choice.nextElementSibling.textContent !== left) choice.nextElementSibling.textContent = left;
  }
  $("countdown").hidden = !isScheduled();
  text("countdown", `Opens in ${duration(opensIn())}`);
  $("stock").hidden = false;
  $("stock-bar").max = sale.stock;
  $("stock-bar").value = sale.available;
  text("stock-text", sale.available > 0 ? `${sale.available} of ${sale.stock} shirts left` : "No shirts left right now");
  $("purchase").hidden = !user || Boolean(has) || isWaiting();
  $("line").hidden = !isWaiting();
  const before = place?.before;
  text("line-text", "You wait for a shirt." +
    (before > 0 ? ` ${before} before you.` : before === 0 ? " The next one is yours." : ""));
  $("quantity").hidden = $("quantity-label").hidden = sale.per_order_limit < 2 || isForList();
  disable("quantity", busy);
  const left = sale.items ? picked()?.available : sale.available;
  disable("buy", busy || !isOpen() || !(left > 0 || isForList()));
  text("buy", busy ? "Buying …" : isForList() ? "Wait for a shirt" : isScheduled() ? "Not open yet" : sale.state === "paused" ? "Paused"
    : sale.state === "ended" ? "Sale over" : sale.available < 1 ? "Sold out" : left === undefined ? "Pick a size"
    : left < 1 ? `${picked().name} is gone` : "Buy");
}

function renderDrawn() {
  const entry = user && attempt.load();
  const entered = Boolean(entry?.order), entering = draw?.state === "entering";
  text("sale-name", sale.name);
  text("sale-state", entering ? "In a draw: open for entries" : "In a draw");
  $("price").hidden = !sale.currency;
  if (sale.currency) text("unit-price", unitPrice());
  $("countdown").hidden = !entering;
  if (entering) text("countdown", `Entries close in ${duration(Date.parse(draw.closes_at) - now())}`);
  $("stock").hidden = false;
  $("stock-bar").max = sale.stock;
  $("stock-bar").value = sale.available;
  text("stock-text", `${sale.stock} shirts are drawn`);
  $("purchase").hidden = !user || entered;
  $("quantity").hidden = $("quantity-label").hidden = true;
  disable("buy", busy || !entering);
  text("buy", busy ? "Entering …" : entering || !draw ? "Enter the draw" : "The entries are closed");
  $("draw").hidden = !entered || !draw;
  if (!entered || !draw) return;
  text("draw-text", words(draw, proof));
  const steps = [true, draw.root, draw.seed, proof?.outcome === "offered"];
  for (const [i, item] of [...$("draw-steps").children].entries()) item.className = steps[i] ? "done" : "";
  const last = (draw.entries ?? 0) - 1;
  const facts = Object.entries({
    Place: proof?.place !== undefined && `${proof.place}, from 0 to ${last}`,
    Rank: proof?.rank !== undefined && `${proof.rank}, from 0 to ${last}`,
    Turns: draw.ranked_at && `${draw.offered + draw.skipped} of ${draw.entries} ranks`,
    Root: draw.root, Seed: draw.seed, Receipt: entry.receipt,
  }).filter(([, value]) => value).map(([name, value]) => element("div", {}, element("dt", {}, name),
    element("dd", {}, element("code", {}, value))));
  if (facts.map((f) => f.textContent).join() !== [...$("draw-facts").children].map((f) => f.textContent).join()) {
    $("draw-facts").replaceChildren(...facts);
  }
  $("draw-verify").hidden = proof?.rank === undefined;
  text("verify-commands", `curl -o draw.json ${config.api}${salePath}/draw/bundle\n` +
    `curl -o draw.leaves ${config.api}${salePath}/draw/leaves\n` +
    `stampede draw verify --bundle draw.json --leaves draw.leaves --receipt ${entry.receipt}`);
}

// unitPrice is the price of the picked size, and of the cheapest one before.
function unitPrice() {
  const price = picked()?.unit_price ?? sale.unit_price;
  return price ? money(price, sale.currency)
    : "from " + money(Math.min(...sale.items.map((item) => item.unit_price)), sale.currency);
}

function renderOrder() {
  $("order").hidden = !order;
  if (!order) return;
  text("order-id", order.order_id);
  text("order-what", order.quantity ? contents(order) : "");
  const step = ["reserved", "confirmed", "paid"].indexOf(order.status);
  for (const [i, item] of [...$("steps").children].entries()) item.className = i <= step ? "done" : "";
  $("steps").hidden = step < 0;
  const left = order.expires_at ? Date.parse(order.expires_at) - now() : 0;
  const turnIn = order.pay_from ? Date.parse(order.pay_from) - surely() : 0;
  const onward = isDrawn() ? "to the next rank" : sale.waitlist ? "to those who wait" : "back on sale";
  text("order-text", {
    reserved: "Reserved. Writing it down …",
    confirmed: order.expires_at ? "Confirmed. Pay in time to keep it." : "Confirmed. It is yours.",
    paid: "Paid. It is yours.",
    cancelled: `Cancelled. Its shirts go ${onward}.`,
    expired: `Expired: it was not paid in time. Its shirts go ${onward}.`,
    rejected: "Refused: the shirts were gone after all. Nothing is to be paid.",
    voided: "Lost by the shop, with our apologies. Nothing is to be paid; you can buy again.",
  }[order.status] ?? "Looking it up …");
  $("pay-by").hidden = order.status !== "confirmed" || !order.expires_at;
  text("pay-by", turnIn > 0
    ? `It is yours. You can pay from ${new Date(order.pay_from).toLocaleTimeString()}, in ${duration(turnIn)}`
    : left > 0 ? `Pay within ${duration(left)}` : "The time to pay is over.");
  text("pay", order.currency ? `Pay ${money(order.amount, order.currency)}` : "Pay");
  disable("pay", paying || turnIn > 0);
  $("order-actions").hidden = order.status !== "confirmed" || !order.expires_at;
  const known = payments.filter((p) => p.order_id === order.order_id && p.state !== "waiting");
  const rows = known.map((p) => element("li", { className: `note ${p.state === "settled" ? "good" : "bad"}` },
    p.state === "settled" ? `Paid with ${p.reference}` : refundText(p)));
  if (rows.map((r) => r.textContent).join() !== [...$("payments").children].map((r) => r.textContent).join()) {
    $("payments").replaceChildren(...rows);
  }
}

// --- The start ----------------------------------------------------------------------------------------------------

function signedIn() {
  render();
  loadHistory();
  const made = attempt.load();
  if (made?.order && !isDrawn()) follow(made.order, made.receipt);
  else if (sale.waitlist) followPlace();
  if (made && !made.order) buy(); // the page was left before there was an answer
  if (returned) awaitPayment();
}

$("signin").addEventListener("submit", async (event) => {
  event.preventDefault();
  user = $("name").value.trim();
  try {
    await currentToken();
  } catch (problem) {
    user = "";
    say("bad", `You are not signed in: ${problem.message}`);
    return;
  }
  localStorage.setItem("user", user);
  say("");
  signedIn();
  $("buy").focus();
});
$("signout").addEventListener("click", () => {
  localStorage.removeItem("user");
  location.reload();
});
$("sizes").addEventListener("change", render);
$("purchase").addEventListener("submit", (event) => { event.preventDefault(); isForList() ? wait() : buy(); });
$("leave").addEventListener("click", () => changePlace("/leave"));
$("pay").addEventListener("click", pay);
$("cancel").addEventListener("click", cancel);
$("verify").addEventListener("click", verifyEntry);
$("history-more").addEventListener("click", () => loadHistory(historyPage.next));

await loadSale();
addSizes();
for (let n = 1; n <= Math.min(sale.per_order_limit, 10); n++) $("quantity").append(element("option", { value: n }, String(n)));
render();
if (user) signedIn();
watchSale();
if (isDrawn()) watchDraw();
setInterval(render, 250);
