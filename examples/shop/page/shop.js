// The whole shop of a browser: signs in, waits for the opening, buys, follows the order, pays. No library, no build.
// What it must never do is buy twice or say what it does not know. So each purchase has a key, which is stored before
// the click is sent, and everything without an answer is sent again with the same key.

import { isWitness, nth, nthRank, verify, words } from "/draw.js";

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
const offered = new Set(); // the codes of sizes whose shirts are for those who wait, as a refusal said

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
  if (seen.waiting === 0) offered.clear();
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
const leftOf = (item) => (offered.has(item.code) ? 0 : item.available);
const priceOf = (item) => item.unit_price ?? sale.unit_price;

// what says what an order has, or what is left: 1 × Medium, 2 × Large.
const what = (items) => Object.entries(items).filter(([, n]) => n > 0)
  .map(([code, n]) => `${n} × ${sizeOf(code)?.name ?? code}`).join(", ");

// namesOf says the sizes of an entry, which has one.
const namesOf = (items) => Object.keys(items).map((code) => sizeOf(code)?.name ?? code).join(", ");

// basket is what the buyer has picked, by the code of the size.
const basket = () => Object.fromEntries([...$("sizes").querySelectorAll("select")]
  .map((choice) => [choice.name, Number(choice.value)]).filter(([, n]) => n > 0));
const units = (items) => Object.values(items).reduce((sum, n) => sum + n, 0);

// short is the first size of the basket of which too few are left, while the buyer has not clicked.
const short = () => Object.entries(basket()).map(([code, n]) => ({ ...sizeOf(code), n }))
  .find((item) => leftOf(item) < item.n);

// waitedSize is the size for which the buyer has picked to wait, if any.
const waitedSize = () => sizeOf($("sizes").querySelector("option[value=wait]:checked")?.parentElement.name);

const opensIn = () => (sale?.opens_at ? Date.parse(sale.opens_at) - now() : 0);
const isScheduled = () => sale?.state === "scheduled" && opensIn() > 0;
const isOpen = () => sale?.state === "open" || (sale?.state === "scheduled" && opensIn() <= 0);

// stage says what the sale is doing. Headline, stock and button all follow it, so that no two of them contradict.
function stage() {
  if (sale.state === "paused" || sale.state === "ended") return sale.state;
  if (isScheduled()) return "soon";
  if (isForList()) return sale.waitlist_closed ? "gone" : "list";
  return sale.available > 0 ? "open" : "gone";
}

const HEADLINES = {
  soon: "Opens soon", open: "On sale now", list: "Sold out, with a waiting list", gone: "Sold out", paused: "Paused",
  ended: "Sale over",
};
const BUTTONS = { ...HEADLINES, soon: "Not open yet", open: "Buy", list: "Wait for a shirt" };

function stockText() {
  if (sale.available < 1) return "No shirts left right now";
  if (isForList()) return `${sale.available} came back, for those who wait`;
  return `${sale.available} of ${sale.stock} shirts left`;
}

// --- The purchase -------------------------------------------------------------------------------------------------

// The attempt is this buyer's purchase in this sale: {key, quantity}, or with sizes {key, items}, and {order, receipt}
// once it is accepted. In a draw it is the entry.
// Another tab has the same one, so that both buy the same order.
const attemptName = () => `attempt ${config.sale} ${user}`;
const attempt = {
  load: () => JSON.parse(localStorage.getItem(attemptName()) ?? "null"),
  save: (made) => localStorage.setItem(attemptName(), JSON.stringify(made)),
  forget: () => localStorage.removeItem(attemptName()),
};

let busy = ""; // what a click is doing

const isDrawn = () => Boolean(sale.offers_only);
const did = () => (isDrawn() ? "entered" : "bought");
const ordersPath = () => (isDrawn() ? `/v1/sales/${sale.entries_sale_id}/orders` : `${salePath}/orders`);

// buy sends a purchase until there is an answer to it.
async function buy() {
  if (busy) return;
  busy = isDrawn() ? "Entering …" : "Buying …";
  render();
  const made = attempt.load() ??
    { key: crypto.randomUUID(), ...(sale.items ? { items: basket() } : { quantity: Number($("quantity").value) || 1 }) };
  attempt.save(made); // before it is sent: a reload repeats it
  say("info", busy);
  const body = made.items ? { items: made.items } : { quantity: made.quantity };
  while (!await decided(made, await call("POST", ordersPath(), body, { "Idempotency-Key": made.key }))) {
    await pause(jitter(made.after));
  }
  busy = "";
  render();
}

// decided tells the buyer about an answer, and returns false if the purchase has to be repeated.
async function decided(made, answer) {
  const slug = slugOf(answer);
  const seconds = Math.ceil(answer.after / 1000);
  made.after = answer.after;
  if ((answer.status === 202 || answer.status === 201) && answer.body?.order_id) {
    attempt.save({ ...made, order: answer.body.order_id, receipt: answer.body.receipt });
    if (isDrawn()) {
      looked = answer.body.order_id;
      say("");
      showInHistory(answer.body.order_id);
      return true;
    }
    const several = (made.quantity ?? units(made.items)) > 1;
    say("good", several ? "The shirts are reserved for you." : "The shirt is reserved for you.", "order");
    follow(answer.body.order_id, answer.body.receipt, answer.body);
    return true;
  }
  if (slug === "" || slug === "outcome-unknown") {
    say("info", `No answer yet: we do not know whether the ${isDrawn() ? "entry" : "order"} was taken. Asking again, ` +
      `with the same key, so that nothing is ${did()} twice.`);
    return false;
  }
  if (slug === "rate-limited") {
    say("info", `Too many requests: nothing was ${did()}. Trying again in ${seconds} s.`);
    return false;
  }
  if (REPEATED.has(answer.status)) {
    say("info", `The shop is busy: nothing was ${did()}. Trying again.`);
    return false;
  }
  if (answer.status === 401) {
    say("info", "Signing in again.");
    return false; // with a new token
  }
  if (slug === "sale-not-open") {
    sale.opens_at = answer.body.opens_at;
    say("info", `Not open yet. Your ${isDrawn() ? "entry" : "purchase"} is sent at the opening.`);
    made.after = Math.max(opensIn(), 100);
    return false;
  }
  if (slug === "order-ended") {
    attempt.forget();
    say("bad", `That order is ${statusWord(answer.body.order_status)}: this click has ${did()} nothing.`);
    return true;
  }
  if (slug === "already-purchased" && answer.location) {
    const id = answer.location.split("/").pop();
    if (order?.order_id === id && isEnded(order)) {
      say("info", "The shirts of your last order are still on their way back. Trying again.");
      return false;
    }
    if (isDrawn() && (await call("GET", `/v1/orders/${id}`)).body.status === "cancelled") {
      say("info", "Your last entry is still being taken out. Trying again.");
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
  // What was so at the click stays true: what is left now is beside it.
  say("bad", {
    "sold-out": shortText(made, answer.body),
    "offers-only": sale.waitlist && offersText(answer.body),
    "sale-paused": `The sale was paused just before: nothing was ${did()}.`,
    "sale-ended": isDrawn() ? "The entries are closed." : "The sale is over.",
  }[slug] || answer.body.detail || `Nothing was ${did()}.`);
  if (sale.waitlist) refreshSale();
  return true;
}

// shortText says which sizes had gone at the click, and what was left then. An order has all that it asks for, or nothing.
function shortText(made, { items = [], available = {} }) {
  const returns = sale.payment_window_seconds ? " Shirts may come back: unpaid orders expire." : "";
  if (!made.items) {
    return `Too late: ${made.quantity > 1 ? `fewer than ${made.quantity} shirts were` : "no shirt was"} left.` + returns;
  }
  const gone = Object.keys(made.items).filter((code) => items.includes(code) || available[code] < made.items[code])
    .map((code) => `${made.items[code]} × ${sizeOf(code).name}`).join(" and ");
  const others = what(available);
  return `Too late: ${gone || "the shirts"} had just gone, so nothing was bought.` +
    (others ? ` Left then: ${others}.` : returns);
}

// offersText says that shirts of these sizes, or all of them, are for those who wait. The page remembers the sizes.
function offersText({ items = [] }) {
  for (const code of items) offered.add(code);
  const names = items.map((code) => sizeOf(code).name).join(" and ");
  return `Those who wait come first${names && ` for ${names}`}: nothing was bought.` +
    (sale.waitlist_closed ? "" : " You can wait, too.");
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
  say("bad", `The order ${id} does not exist any more.`);
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
    if (noteAbout === "order" || (noteAbout === "paid" && seen.status !== "paid")) say(""); // the order tells more now
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

async function cancel() {
  $("cancel").disabled = true;
  const answer = await sendCancel(order.order_id);
  if (answer.status === 200) take(answer.body);
  else say("bad", answer.body.detail);
  $("cancel").disabled = false;
}

// sendCancel may be repeated, so it is, until there is an answer.
async function sendCancel(id) {
  for (;;) {
    const answer = await call("POST", `/v1/orders/${id}/cancel`);
    const slug = slugOf(answer);
    if (answer.status === 200 && answer.body?.order_id) return answer;
    if (!["", "unauthorized", "order-not-confirmed"].includes(slug) && !REPEATED.has(answer.status)) return answer;
    await pause(jitter(answer.after));
  }
}

// --- The draw -----------------------------------------------------------------------------------------------------

let draw = null, proof = null;
let turns = 0; // that ranks had when the proof was asked for
let looked = ""; // the entry that was there when this page made it or looked

// watchDraw follows the draw, and this entrant in it. An offer is an order.
async function watchDraw() {
  for (;;) {
    const answer = await call("GET", `${salePath}/draw`);
    if (answer.status === 200) {
      if (draw && draw.state !== answer.body.state) loadHistory();
      draw = answer.body;
      keepWitness();
    }
    const entry = user && attempt.load();
    if (draw?.state === "entering" && entry?.order && entry.order !== looked) await lookAtEntry(entry);
    if (draw?.root && entry?.receipt && provesMore()) await loadProof(entry);
    render();
    await pause(jitter(["over", "open", "void"].includes(draw?.state) ? 10_000 : 1000));
  }
}

// provesMore is true when a proof has news: the place, then the rank, then what became of it. Until then the draw tells
// enough, which servers and caches have once for everybody. Each size has ranks of its own, and the draw counts all
// turns.
const provesMore = () => !proof || (proof.outcome === "waiting" &&
  (proof.rank === undefined ? draw.ranked_at : proof.rank < turnsOf(draw) && turns < turnsOf(draw)));
const turnsOf = (d) => d.offered + d.skipped;

async function loadProof(entry) {
  const answer = await call("GET", `${salePath}/draw/proof?receipt=${entry.receipt}`);
  if (answer.status === 200) [proof, turns] = [answer.body, turnsOf(draw)];
  if (proof?.order_id) follow(proof.order_id);
  if (answer.status !== 404) return;
  const shown = await call("GET", `/v1/orders/${entry.order}?receipt=${entry.receipt}`);
  if (shown.status === 200) proof = { outcome: "missing", status: shown.body.status };
}

// leaveDraw cancels the entry. The next click is another entry.
async function leaveDraw() {
  $("leave-draw").disabled = true;
  const answer = await sendCancel(attempt.load().order);
  if (answer.status === 200) {
    attempt.forget();
    say("info", "You have left the draw. Until the entries close you may enter again.");
    loadHistory();
  } else {
    const late = slugOf(answer) === "illegal-transition";
    say("bad", late ? "The entries are closed: your entry stays in." : answer.body.detail);
  }
  $("leave-draw").disabled = false;
  render();
}

// lookAtEntry forgets an entry that was cancelled, by its owner in another browser or by the shop.
async function lookAtEntry({ order: id }) {
  const answer = await call("GET", `/v1/orders/${id}`);
  if (answer.body.status !== "cancelled") {
    if (answer.status === 200) looked = id;
    return;
  }
  if (attempt.load()?.order !== id) return;
  attempt.forget();
  say("info", "Your entry was cancelled. Until the entries close you may enter again.");
}

// The witness is what the shop said of the draw before anybody knew the seed: {at, draw}, null if no page of this browser
// was open then. Without it nobody finds out that all of a draw was made up later.
const witnessName = `frozen ${config.sale}`;
let witness = JSON.parse(localStorage.getItem(witnessName) ?? "null");

function keepWitness() {
  if (witness || !isWitness(draw, Math.max(Date.now(), now()))) return;
  witness = { at: new Date().toISOString(), draw };
  try {
    localStorage.setItem(witnessName, JSON.stringify(witness));
  } catch {
    // Too large: it is kept until the page is closed.
  }
}

async function verifyEntry() {
  const answer = await fetch(`${config.api}${salePath}/draw/leaves`).catch(() => null);
  const list = answer?.ok && new Uint8Array(await answer.arrayBuffer().catch(() => 0));
  if (!list?.length) return text("verified", "The list could not be looked up. Try again.");
  const { root } = witness?.draw ?? draw;
  text("verified", await verify(list, attempt.load().receipt, { root, seed: draw.seed }).then(
    ({ place, rank }) => (place === proof.place && rank === proof.rank
      ? `Verified: your entry is in the list that was published${witness ? " before the draw" : ""}, and the random ` +
        `number makes you ${nthRank(rank, proof, draw)}.`
      : `The shop said that you are ${nthRank(proof.rank, proof, draw)}, and you are ${nthRank(rank, proof, draw)}!`),
    (problem) => `It cannot be verified: ${problem.message}.`));
}

// commands verify the draw on a machine that is not the shop's. Before the seed is known they keep a witness.
function commands(receipt) {
  const url = `${config.api}${salePath}/draw`;
  if (!draw.seed) return witness ? `curl -o frozen.json ${url}` : "";
  return (witness ? `cat > frozen.json <<'END'\n${JSON.stringify(witness.draw)}\nEND\n` : "") +
    `curl -o draw.json ${url}/bundle\ncurl -o draw.leaves ${url}/leaves\n` +
    `stampede draw verify --bundle draw.json --leaves draw.leaves ${witness ? "--frozen frozen.json " : ""}` +
    `--receipt ${receipt}`;
}

function witnessText() {
  if (!draw.seed && witness) return "This page has kept what is public before the draw. A copy of your own proves more:";
  const counts = proof?.rank === undefined ? ""
    : ` The report counts from 0: your place is ${proof.place}, and your rank ${proof.rank}.`;
  return (witness
    ? `frozen.json is what this page kept at ${new Date(witness.at).toLocaleTimeString()}, before the draw. The page comes ` +
      "from the shop, so take a copy of your own instead if you have one."
    : "This page has no witness: between the end of the entries and the draw it was not open, or asleep. The report then " +
      "says UNCHECKED of the witness. With somebody's copy from before, add --frozen.") + counts;
}

// --- The waiting list ---------------------------------------------------------------------------------------------

let place = null; // of this buyer

const isWaiting = () => place?.state === "waiting";
// Only those who wait get units then, also of those that are left. Each size has a list of its own.
const isForList = () => Boolean(sale.waitlist) && isOpen() &&
  (sale.items ? sale.items.every((item) => leftOf(item) < 1) : sale.available < 1 || sale.waiting > 0);
const canWaitFor = (item) => Boolean(sale.waitlist) && !sale.waitlist_closed && isOpen() && leftOf(item) < 1;

// wait joins the waiting list, at its end if the own place had its turn.
async function wait() {
  const item = waitedSize()?.code;
  busy = "Joining …";
  render();
  if (place && place.state !== "left") await changePlace("/leave");
  await changePlace("", item && { item });
  busy = "";
  await refreshSale();
  if (isWaiting()) showInHistory(place.entry_order_id);
  followPlace();
}

function takePlace(seen) {
  if (place?.state !== seen.state) loadHistory(); // which says it
  place = seen;
}

// joins is true if the button is to wait.
const joins = () => (sale.items ? Boolean(waitedSize()) : isForList());

// changePlace may be repeated, so it is, until there is an answer.
async function changePlace(step, body) {
  for (;;) {
    const answer = await call("POST", `${salePath}/waitlist${step}`, body);
    const again = [0, 401, 429].includes(answer.status) || answer.status >= 500;
    // It is too early to leave a place of a moment ago, and to join again after one that was left a moment ago.
    if (again || ["order-not-confirmed", "order-ended"].includes(slugOf(answer))) {
      await pause(jitter(answer.after));
      continue;
    }
    if (answer.body.state) takePlace(answer.body);
    if (slugOf(answer) === "not-sold-out") {
      offered.delete(body?.item);
      say("info", "Shirts are back on sale: you can buy one now.");
    } else say("bad", answer.status < 300 ? "" : answer.body.detail);
    return render();
  }
}

// lookAtPlace returns the state of the own place. An offer is an order.
async function lookAtPlace() {
  const answer = await call("GET", `${salePath}/waitlist`);
  if (answer.status === 404) return "none";
  if (answer.status === 200) takePlace(answer.body);
  if (place?.order_id) follow(place.order_id);
  render();
  return place?.state ?? "waiting";
}

async function followPlace() {
  while (await lookAtPlace() === "waiting") await pause(jitter(2000));
}

// refreshSale learns how many wait, which the stream of the sale does not say.
async function refreshSale() {
  const answer = await call("GET", salePath);
  if (answer.status === 200) takeSale(answer.body);
  render();
}

async function watchWaiting() {
  for (;;) {
    await pause(jitter(5000));
    if (isForList() || offered.size) await refreshSale();
  }
}

// placeText tells who waits, or has waited.
function placeText() {
  const { state, before, item } = place ?? {};
  return {
    waiting: `You wait for ${item ? `size ${sizeOf(item).name}` : "a shirt"}.` +
      (before > 0 ? ` ${before} before you.` : before === 0 ? " The next one is yours." : ""),
    skipped: "Your turn was skipped: you had an order then.",
    over: "The sale is over, and no shirt came back for you.",
  }[state] ?? "";
}

// --- Payments and history -----------------------------------------------------------------------------------------

let payments = []; // of one order
const query = new URLSearchParams(location.search);
const returned = query.has("payment") ? { payment: query.get("payment"), order: query.get("order") } : null;

let awaited = returned?.order; // is paid, and the shop may not know it yet

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
    if (made && made.state !== "waiting") {
      awaited = "";
      if (made.state === "settled") say("good", "Paid. See you in the front row!", "paid");
      else say("bad", moneyText(made));
      return render();
    }
    say("info", "The payment has arrived at the provider. Waiting for the shop to hear of it …");
    await pause(500);
  }
}

function moneyText(p) {
  if (p.state === "settled") return `Paid with ${p.reference}`;
  const sum = money(p.amount, p.currency);
  if (!["refund_due", "refunded"].includes(p.state)) return `The shop looks into your payment of ${sum}, ${p.reference}.`;
  return `Your ${sum} ${p.state === "refunded" ? "were" : "will be"} paid back` + ({
    "order-expired": ": the order had expired before the payment came.",
    "order-cancelled": ": the order was cancelled.",
    "already-paid": ": the order was paid by another payment.",
  }[p.reason] ?? ".");
}

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

// showInHistory looks until Postgres has an order of a moment ago.
async function showInHistory(id) {
  for (let tries = 0; tries < 30 && !$("history-list").querySelector(`[data-order="${id}"]`); tries++) {
    await loadHistory();
    await pause(jitter(1000));
  }
}

function historyRow(o) {
  const row = element("li", { tabIndex: -1 });
  row.dataset.order = o.order_id;
  const what = element("span", {}, historyText(o) + " ", element("small", {}, new Date(o.reserved_at).toLocaleString()));
  const tone = { paid: "good", confirmed: "", reserved: "" }[o.status] ?? "bad";
  row.append(what, element("span", { className: `badge ${tone}` }, o.entry_for ? entryWord(o) : statusWord(o.status)));
  return row;
}

function historyText(o) {
  const line = { entry: "Entry in the draw", place: "Place on the waiting list" }[o.kind];
  if (line && o.entry_for !== config.sale) return `${line} of another sale`;
  if (line) return line + (o.items ? `, ${namesOf(o.items)}` : "");
  return (o.sale_id === config.sale ? contents(o) : `${o.quantity} × another sale`) +
    (o.kind === "offer" ? ", offered to you" : "");
}

const statusWord = (status) => ({ rejected: "refused", voided: "lost" })[status] ?? status;

// entryWord says what became of an entry of a draw or a place on a waiting list, which are no orders to a buyer.
function entryWord(o) {
  if (o.status !== "confirmed") return o.kind === "place" && o.status === "cancelled" ? "left" : statusWord(o.status);
  const state = o.order_id === place?.entry_order_id ? place.state : "";
  return {
    waiting: "on the waiting list", offered: "offered a shirt", skipped: "skipped", over: "no shirt came back",
  }[state] ?? (o.kind === "place" ? "on the waiting list" : "entered");
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
const disable = (id, off) => { if ($(id).disabled !== Boolean(off)) $(id).disabled = off; };

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

// addSizes makes a choice for each size: how many of it.
function addSizes() {
  const several = !isDrawn() && sale.per_order_limit > 1;
  text("sizes-legend", several ? `Sizes, up to ${sale.per_order_limit} shirts in an order` : "Size");
  $("sizes").append(...(sale.items ?? []).map((item) => {
    const most = isDrawn() ? 1 : Math.min(item.per_order_limit ?? sale.per_order_limit, sale.per_order_limit, 10);
    const counts = Array.from({ length: most + 1 }, (_, n) => element("option", { value: n }, String(n)));
    if (sale.waitlist) counts.push(element("option", { value: "wait" }, "Wait"));
    return element("label", {}, element("span", {}, item.name),
      element("small", { className: "cost" }, sale.currency ? money(priceOf(item), sale.currency) : ""),
      element("small", { className: "left" }), element("select", { name: item.code }, ...counts));
  }));
}

// pick keeps one size where there can be only one: in an entry, and to wait for.
function pick({ target }) {
  for (const choice of $("sizes").querySelectorAll("select")) {
    const alone = isDrawn() || target.value === "wait" || choice.value === "wait";
    if (choice !== target && alone && target.value !== "0") choice.value = "0";
  }
  render();
}

function renderSizes() {
  const all = units(basket());
  for (const choice of $("sizes").querySelectorAll("select")) {
    const item = sizeOf(choice.name), left = leftOf(item), gone = !isDrawn() && left < 1, canWait = canWaitFor(item);
    if (choice.value === "wait" && !canWait) choice.value = "0";
    const own = Number(choice.value); // NaN for who waits
    choice.disabled = Boolean(busy) || isWaiting() || (gone && !canWait && !own);
    choice.parentElement.classList.toggle("gone", gone && !canWait);
    const says = isDrawn() ? `${item.stock} to be drawn` : !gone ? `${left} left` : canWait ? "waiting list" : "gone";
    const label = choice.parentElement.querySelector(".left");
    if (label.textContent !== says) label.textContent = says;
    for (const option of choice.options) {
      const off = option.value === "wait" ? !canWait
        : !isDrawn() && Number(option.value) > Math.min(left, sale.per_order_limit - all + (own || 0));
      if (option.disabled !== off) option.disabled = off;
    }
  }
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
  const at = stage();
  text("sale-name", sale.name);
  text("sale-state", HEADLINES[at]);
  $("price").hidden = !sale.currency;
  if (sale.currency) text("unit-price", unitPrice());
  $("sizes").hidden = !sale.items || Boolean(has) || at === "ended";
  renderSizes();
  $("countdown").hidden = at !== "soon";
  text("countdown", `Opens in ${duration(opensIn())}`);
  $("stock").hidden = at === "ended";
  $("stock-bar").max = sale.stock;
  $("stock-bar").value = sale.available;
  text("stock-text", stockText());
  $("purchase").hidden = !user || Boolean(has) || isWaiting();
  text("line-text", placeText());
  $("line").hidden = !placeText();
  $("leave").hidden = !isWaiting();
  const one = sale.items || sale.per_order_limit < 2 || !["soon", "open"].includes(at);
  $("quantity").hidden = $("quantity-label").hidden = Boolean(one);
  disable("quantity", busy);
  const picked = sale.items ? units(basket()) : 1;
  const sells = at === "open" || at === "list";
  disable("buy", busy || !(sells && (joins() || (picked > 0 && !short()))));
  text("buy", busy || (sells && sale.items ? buyText(picked) : BUTTONS[at]));
}

function buyText(picked) {
  if (joins()) return `Wait for ${waitedSize().name}`;
  if (!picked) return "Pick a size";
  const item = short();
  if (item) return leftOf(item) < 1 ? `${item.name} is gone` : `Only ${item.available} left in ${item.name}`;
  const cost = Object.entries(basket()).reduce((sum, [code, n]) => sum + n * priceOf(sizeOf(code)), 0);
  return sale.currency ? `Buy for ${money(cost, sale.currency)}` : "Buy";
}

const DRAW_HEADLINES = {
  entering: "In a draw: open for entries", freezing: "In a draw: entries closed", frozen: "In a draw: entries closed",
  ranking: "In a draw: entries closed", offering: "Drawn: offered one after the other",
  over: "Drawn: all offers are made", void: "The draw is void",
};

function renderDrawn() {
  const entry = user && attempt.load();
  const entered = Boolean(entry?.order), entering = draw?.state === "entering", paused = sale.state === "paused";
  text("sale-name", sale.name);
  text("sale-state", ["paused", "ended"].includes(sale.state) ? HEADLINES[sale.state]
    : DRAW_HEADLINES[draw?.state] ?? "In a draw");
  $("price").hidden = !sale.currency;
  if (sale.currency) text("unit-price", unitPrice());
  $("countdown").hidden = !entering;
  if (entering) text("countdown", `Entries close in ${duration(Date.parse(draw.closes_at) - now())}`);
  $("stock").hidden = draw?.state === "void";
  $("stock-bar").hidden = true; // what is left of a draw is nobody's to buy
  text("stock-text", `${draw?.ranked_at ? "Drawn" : "To be drawn"}: ${sale.stock} ${sale.stock === 1 ? "shirt" : "shirts"}`);
  $("purchase").hidden = !user || entered;
  $("sizes").hidden = !sale.items || entered || !entering;
  renderSizes();
  $("quantity").hidden = $("quantity-label").hidden = true;
  const picks = entering && sale.items && !units(basket());
  disable("buy", busy || !entering || picks);
  text("buy", busy || (picks ? "Pick a size" : entering || !draw ? "Enter the draw" : "The entries are closed"));
  $("leave-draw").hidden = !entering;
  $("draw").hidden = !entered || !draw;
  if (!entered || !draw) return;
  text("draw-text", words(draw, proof, order) +
    (paused && draw.state === "offering" ? " The sale is paused: nothing is offered until it goes on." : "") +
    (entry.receipt ? "" : " The browser in which you have entered has your receipt, and shows your rank."));
  const steps = [true, draw.root, draw.seed, proof?.outcome === "offered"];
  for (const [i, item] of [...$("draw-steps").children].entries()) item.className = steps[i] ? "done" : "";
  const facts = [
    ["Your entry", proof?.place !== undefined && `${nth(proof.place, draw)} in the list`],
    ["Your size", entry.items && namesOf(entry.items)],
    ["Your rank", proof?.rank !== undefined && nthRank(proof.rank, proof, draw)],
    ["Turns so far", draw.ranked_at && `${turnsOf(draw)} of ${draw.entries}`],
    ["Fingerprint of the list (root)", draw.root && element("code", {}, draw.root)],
    ["Random number (seed)", draw.seed && element("code", {}, draw.seed)],
    ["Your receipt", entry.receipt && element("code", {}, entry.receipt)],
  ].filter(([, value]) => value)
    .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  if (facts.map((f) => f.textContent).join() !== [...$("draw-facts").children].map((f) => f.textContent).join()) {
    $("draw-facts").replaceChildren(...facts);
  }
  $("draw-verify").hidden = !draw.frozen_at || !entry.receipt;
  $("verify").hidden = proof?.rank === undefined;
  text("witness", witnessText());
  text("verify-commands", commands(entry.receipt));
}

// unitPrice is the price of a shirt, and of the cheapest size.
function unitPrice() {
  const prices = sale.items ? sale.items.map(priceOf) : [sale.unit_price];
  const least = Math.min(...prices);
  return (prices.some((price) => price > least) ? "from " : "") + money(least, sale.currency);
}

function renderOrder() {
  $("order").hidden = !order;
  if (!order) return;
  text("order-id", order.order_id);
  text("order-what", order.quantity ? contents(order) : "");
  const step = ["reserved", "confirmed", "paid"].indexOf(order.status);
  for (const [i, item] of [...$("steps").children].entries()) item.className = i <= step ? "done" : "";
  $("steps").hidden = step < 0;
  $("step-paid").hidden = !sale.payment_window_seconds && order.status !== "paid";
  const left = order.expires_at ? Date.parse(order.expires_at) - now() : 0;
  const turnIn = order.pay_from ? Date.parse(order.pay_from) - surely() : 0;
  const comes = order.order_id === awaited; // the money
  const toPay = order.status === "confirmed" && order.expires_at && !comes;
  text("order-text", orderText(comes, left));
  $("pay-by").hidden = !toPay;
  text("pay-by", turnIn > 0
    ? `It is held for you. You can pay from ${new Date(order.pay_from).toLocaleTimeString()}, in ${duration(turnIn)}`
    : left > 0 ? `Pay within ${duration(left)}` : "The time to pay is over.");
  text("pay", order.currency ? `Pay ${money(order.amount, order.currency)}` : "Pay");
  disable("pay", paying || turnIn > 0 || left <= 0);
  $("order-actions").hidden = !toPay;
  const known = payments.filter((p) => p.order_id === order.order_id && p.state !== "waiting");
  const rows = known.map((p) => element("li", { className: `note ${p.state === "settled" ? "good" : "bad"}` }, moneyText(p)));
  if (rows.map((r) => r.textContent).join() !== [...$("payments").children].map((r) => r.textContent).join()) {
    $("payments").replaceChildren(...rows);
  }
}

// orderText is read aloud, so it has nothing that changes each second.
function orderText(comes, left) {
  switch (order.status) {
    case "reserved": return "Reserved. Writing it down …";
    case "confirmed":
      if (!order.expires_at) return "Confirmed. It is yours.";
      if (comes) return "Confirmed. Your payment is on its way to the shop.";
      return left > 0 ? "Confirmed. Pay in time to keep it." : "Confirmed, but not paid in time: it expires at any moment.";
    case "paid": return "Paid. It is yours.";
    case "cancelled": return "Cancelled." + onwardText();
    case "expired": return "Expired: it was not paid in time." + onwardText();
    case "rejected":
      return "Refused" + ({
        "sold-out": ": the shirts were gone after all", "already-purchased": ": you have another order",
      }[order.reason] ?? "") + ". Nothing is to be paid.";
    case "voided": return "Lost by the shop, with our apologies. Nothing is to be paid.";
  }
  return "Looking it up …";
}

// onwardText says whose the shirts of an ended order are, where that is known.
function onwardText() {
  if (sale.state === "ended" || (isDrawn() && draw?.state !== "offering")) return "";
  return (order.quantity > 1 ? " Its shirts go " : " Its shirt goes ") +
    (isDrawn() ? "to the next in the draw." : sale.waitlist ? "to the next who waits, or back on sale." : "back on sale.");
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
$("sizes").addEventListener("change", pick);
$("purchase").addEventListener("submit", (event) => { event.preventDefault(); joins() ? wait() : buy(); });
$("leave").addEventListener("click", () => changePlace("/leave"));
$("pay").addEventListener("click", pay);
$("cancel").addEventListener("click", cancel);
$("leave-draw").addEventListener("click", leaveDraw);
$("verify").addEventListener("click", verifyEntry);
$("history-more").addEventListener("click", () => loadHistory(historyPage.next));

await loadSale();
addSizes();
for (let n = 1; n <= Math.min(sale.per_order_limit, 10); n++) $("quantity").append(element("option", { value: n }, String(n)));
render();
if (user) signedIn();
watchSale();
if (isDrawn()) watchDraw();
if (sale.waitlist) watchWaiting();
setInterval(render, 250);
