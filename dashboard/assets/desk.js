// Keeps a page of the dashboard up to date. The server has formatted every figure: this module puts texts, widths and
// fragments in their places as one stream tells them, and draws the charts. Without it a page shows one moment.

const everySay = 5000; // a screen reader is told of changes at most this often
const staleAfter = 5000;
const spanMax = 900;

const values = new Map();
const $$ = (selector, root = document) => root.querySelectorAll(selector);

// --- texts, widths, fragments

function put(element) {
  const text = values.get(element.dataset.live);
  if (text !== undefined && element.textContent !== text) element.textContent = text;
}

function size(element, attribute) {
  const text = values.get(element.dataset[attribute]);
  if (text && element.getAttribute(attribute) !== text) element.setAttribute(attribute, text);
}

function show(element) {
  const text = values.get(element.dataset.when);
  if (text === undefined) return;
  const {is, not} = element.dataset;
  element.hidden = is !== undefined ? !is.split(" ").includes(text) : text === not;
}

// --- times: the server tells them in UTC, and they are shown in the zone of the browser

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
const form = (parts) => new Intl.DateTimeFormat("sv-SE", {hour: "2-digit", minute: "2-digit", ...parts}); // 2026-11-27 09:30
const day = {year: "numeric", month: "2-digit", day: "2-digit", second: "2-digit"};
const forms = {
  second: form(day), exact: form({...day, fractionalSecondDigits: 3}), minute: form({}), hours: form({second: "2-digit"}),
};

function localize(time, at) {
  if (at) time.dateTime = at;
  else if (time.title) return;
  const date = new Date(time.dateTime);
  time.title = date.toISOString().slice(0, 19).replace("T", " ") + " UTC";
  time.textContent = forms[time.dataset.form].format(date).replace(",", ".");
}

function fill(root) {
  for (const e of $$("time[datetime]", root)) localize(e);
  for (const e of $$("[data-live]", root)) put(e);
  for (const e of $$("[data-width]", root)) size(e, "width");
  for (const e of $$("[data-x]", root)) size(e, "x");
  for (const e of $$("[data-when]", root)) show(e);
}

// A fragment is HTML of the server, in which every name is escaped. The focus stays on the same link.
function replace(e, html) {
  const focused = e.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  e.innerHTML = html;
  fill(e);
  if (focused) for (const a of $$("a[href]", e)) if (a.getAttribute("href") === focused) { a.focus(); break; }
}

let lastSaid = 0;
let said = values.get("say");
function say() {
  const text = values.get("say");
  if (text === said || Date.now() - lastSaid < everySay) return;
  if (said !== undefined) document.getElementById("say").textContent = text;
  lastSaid = Date.now();
  said = text;
}

// --- the stream

const stale = document.getElementById("stale");
let lastData = Date.now();
let lastAt = "";

function mark(isStale) {
  document.body.classList.toggle("stale", isStale);
  if (isStale === !stale.hidden) return;
  stale.hidden = !isStale;
  stale.textContent = isStale ?
    `Stale since ${lastAt || "this page was loaded"}: the dashboard does not answer, or has nothing new. The figures below are old.` : "";
}

function take(event) {
  const data = JSON.parse(event.data);
  lastData = Date.now();
  for (const [key, text] of Object.entries(data.v ?? {})) values.set(key, text);
  for (const e of $$("[data-fragment]")) {
    const html = data.f?.[e.dataset.fragment];
    if (html !== undefined) replace(e, html);
  }
  fill(document);
  for (const e of $$("[data-at] time")) { localize(e, values.get("at")); lastAt = e.textContent; }
  say();
  mark(false);
  for (const [scope, point] of Object.entries(data.p ?? {})) charts.add(scope, data.at, point);
  if (data.v?.marks && event.type === "change") charts.load();
  charts.draw();
  follow();
  const reload = document.querySelector("[data-reload]");
  if (reload && reload.dataset.was !== values.get(reload.dataset.reload)) {
    reload.removeAttribute("data-reload");
    location.replace(location.pathname + location.search);
  }
}

function logIn() {
  location.assign("/login?over=1&next=" + encodeURIComponent(location.pathname + location.search));
}

let source;
function connect() {
  source?.close();
  source = new EventSource("/live");
  source.addEventListener("all", (event) => { take(event); charts.load(); });
  source.addEventListener("change", take);
  source.addEventListener("over", () => { source.close(); logIn(); });
  source.onerror = async () => {
    // The browser comes back by itself, unless the answer was no stream: the session is over, or there are too many.
    if (source?.readyState !== EventSource.CLOSED) return;
    source = undefined;
    const answer = await fetch("/history?of=all").catch(() => undefined);
    if (answer?.status === 401) return logIn();
    setTimeout(() => { if (!source && !document.hidden) connect(); }, 5000);
  };
}

// A page that nobody sees needs no connection, of which a browser has few.
let hiding;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) {
    hiding = setTimeout(() => { source?.close(); source = undefined; }, 30000);
  } else if (!source) {
    connect();
  }
});

// --- the charts

const SVG = "http://www.w3.org/2000/svg";
function svg(name, attributes, parent, text) {
  const e = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  if (text !== undefined) e.textContent = text;
  parent?.append(e);
  return e;
}

const charts = {
  all: [],
  points: new Map(), // scope → [[at, point], …], oldest first
  marks: new Map(), // scope → [{at, sign, text}, …]
  span: 300,
  cursor: undefined, // the time at the pointer, of all charts
  pinned: undefined, // the time that a link leads to

  setUp() {
    for (const figure of $$("[data-chart]")) {
      const chart = new Chart(figure);
      this.all.push(chart);
      if (!this.points.has(chart.scope)) this.points.set(chart.scope, []);
    }
    for (const input of $$("input[name=span]")) {
      input.checked = Number(input.value) === this.span;
      input.addEventListener("change", () => { this.span = Number(input.value); this.draw(); });
    }
    const led = Number(new URLSearchParams(location.search).get("at"));
    if (led && this.all.length) this.pin(led);
    if (this.all.length) new ResizeObserver(() => this.draw()).observe(document.getElementById("main"));
  },

  // pin shows a time until the pointer shows another, in the shortest span that has it.
  pin(at) {
    this.pinned = at;
    const ago = (Date.now() - at) / 1000;
    for (const input of $$("input[name=span]")) {
      input.checked = Number(input.value) >= ago || Number(input.value) === spanMax;
      if (input.checked) { this.span = Number(input.value); break; }
    }
  },

  add(scope, at, point) {
    const points = this.points.get(scope);
    if (!points || points.length && points.at(-1)[0] >= at) return;
    points.push([at, point]);
    while (points.length && points[0][0] < at - spanMax * 1000) points.shift();
  },

  async load() {
    for (const [scope, points] of this.points) {
      const answer = await fetch("/history?of=" + scope).catch(() => undefined);
      if (!answer?.ok) continue;
      const {at, points: old, marks} = await answer.json();
      this.marks.set(scope, marks);
      const last = at.at(-1) ?? 0;
      const newer = points.filter(([t]) => t > last);
      points.splice(0, points.length, ...at.map((t, i) => [t, old[i]]), ...newer);
    }
    this.draw();
  },

  draw() { for (const chart of this.all) chart.draw(); },
};

// --- tables of which the server makes the rows, and parts of a page: one that is not closed asks for them every few seconds

const everyRows = 5000;
const tables = [...$$("[data-rows]")].map((element) => ({element, at: element.open === false ? 0 : Date.now()}));

async function follow() {
  for (const table of tables) {
    if (table.element.open === false || document.hidden || Date.now() - table.at < everyRows) continue;
    table.at = Date.now();
    const answer = await fetch(table.element.dataset.rows, {redirect: "error"}).catch(() => undefined);
    const rows = answer?.ok ? await answer.text() : table.rows;
    if (rows === table.rows) continue;
    table.rows = rows;
    replace(table.element.matches("div") ? table.element : table.element.querySelector("tbody"), rows);
  }
}
for (const {element} of tables) element.addEventListener("toggle", follow);

// nice is the least round number that is not below n.
function nice(n) {
  if (!(n > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(n));
  for (const step of [1, 2, 5, 10]) if (step * power >= n * 0.999) return step * power;
  return n;
}

const plain = new Intl.NumberFormat("en", {maximumSignificantDigits: 3, notation: "compact"});

class Chart {
  constructor(figure) {
    this.scope = figure.dataset.scope;
    this.unit = figure.dataset.unit;
    this.log = "log" in figure.dataset;
    this.series = JSON.parse(figure.dataset.series);
    this.plot = figure.querySelector(".plot");
    this.root = svg("svg", {class: "chart", role: "img"}, this.plot);
    this.root.setAttribute("aria-label", figure.querySelector("h3").textContent + ": the figures are in the table below");
    this.fit = "fit" in figure.dataset;
    this.root.addEventListener("pointermove", (e) => { charts.cursor = this.time?.(e.offsetX); charts.draw(); });
    this.root.addEventListener("pointerleave", () => { charts.cursor = undefined; charts.draw(); });
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width || !height) return;
    const all = charts.points.get(this.scope);
    const now = all.at(-1)?.[0] ?? Date.now();
    const span = charts.span * 1000, since = now - span;
    let first = all.findIndex(([at]) => at >= since);
    if (first < 0) first = all.length;
    const points = all.slice(Math.max(0, first - 1));
    const left = 60, right = 8, above = 6, below = 20;
    const x = (at) => left + (width - left - right) * (at - since) / span;
    this.time = (px) => since + span * (px - left) / (width - left - right);
    const {ticks, share, above: off} = this.scale(points);
    const y = (n) => above + (height - above - below) * (1 - share(n));

    this.root.replaceChildren();
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const tick of ticks) {
      svg("line", {class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick)}, this.root);
      svg("text", {class: "tick end", x: left - 6, y: y(tick) + 4}, this.root, this.label(tick));
    }
    for (let i = 0; i <= 2; i++) {
      const at = since + span * i / 2, anchor = ["", "middle", "end"][i];
      svg("text", {class: "tick " + anchor, x: x(at), y: height - 5}, this.root, forms.hours.format(at));
    }
    for (const s of this.series) if (s !== off) svg("path", {class: "l-" + s.key, d: this.path(points, s.column, x, y, left)}, this.root);
    if (off) svg("text", {class: "tick end", x: width - right, y: above + 6}, this.root, `↑ ${off.label}`);
    for (const {at, sign} of this.marks(since)) {
      svg("line", {class: "mark", x1: x(at), x2: x(at), y1: y(0), y2: above + 10}, this.root);
      svg("text", {class: "tick middle", x: x(at), y: above + 6}, this.root, sign);
    }
    const at = charts.cursor ?? charts.pinned;
    if (at >= since && points.length) this.read(points, at, x, y, width, left);
  }

  marks(since) { return (charts.marks.get(this.scope) ?? []).filter(({at}) => at >= since); }

  // scale is linear from zero, or has powers of ten. The first line of a chart that fits, such as the units left of a
  // million, stands above it if the others would be flat at its bottom.
  scale(points) {
    const most = (s) => points.reduce((top, [, p]) => Math.max(top, p[s.column] ?? 0), 0);
    const rest = this.fit ? Math.max(...this.series.slice(1).map(most)) : 0;
    const off = rest > 0 && points.every(([, p]) => !(p[this.series[0].column] < 20 * rest)) ? this.series[0] : undefined;
    let top = 0, bottom = Infinity;
    for (const [, p] of points) for (const s of this.series) {
      if (s === off) continue;
      const n = p[s.column] ?? 0;
      top = Math.max(top, n);
      if (n > 0) bottom = Math.min(bottom, n);
    }
    if (!this.log) {
      top = nice(top);
      return {ticks: [0, top / 2, top], share: (n) => n / top, above: off};
    }
    const from = Math.floor(Math.log10(Math.min(bottom, 1))), to = Math.max(Math.ceil(Math.log10(top || 1)), from + 2);
    const ticks = [];
    for (let e = from; e <= to; e++) if (to - from < 5 || (e - from) % 2 === 0) ticks.push(10 ** e);
    return {ticks, share: (n) => Math.max(0, (Math.log10(n) - from) / (to - from))};
  }

  label(n) {
    if (this.unit === "ms") return n >= 1000 ? plain.format(n / 1000) + " s" : plain.format(n) + " ms";
    return plain.format(n) + (this.unit === "s" ? " s" : "");
  }

  // path leaves a gap where a figure is not known or points are missing.
  path(points, column, x, y, left) {
    let d = "", before = 0;
    for (const [at, p] of points) {
      const n = p[column];
      if (n === null || n === undefined) { before = 0; continue; }
      const px = Math.max(left, x(at)).toFixed(1), py = y(n).toFixed(1);
      d += before && at - before < 5000 ? `L${px} ${py}` : `M${px} ${py}h0.1`;
      before = at;
    }
    return d;
  }

  read(points, wanted, x, y, width, left) {
    let near = points[0];
    for (const p of points) if (Math.abs(p[0] - wanted) < Math.abs(near[0] - wanted)) near = p;
    if (charts.cursor === undefined && Math.abs(near[0] - wanted) > 5000) return; // the history is on its way
    const at = Math.max(left, x(near[0]));
    svg("line", {class: "cursor", x1: at, x2: at, y1: y(0), y2: 6}, this.root);
    const rows = [forms.hours.format(near[0]), ...this.series.map((s) => {
      const n = near[1][s.column];
      return `${s.label} ${n === null || n === undefined ? "–" : this.label(n)}${this.unit === "/s" ? "/s" : ""}`;
    })];
    for (const mark of this.marks(0)) if (Math.abs(x(mark.at) - x(wanted)) < 8) rows.push(`${mark.sign} ${mark.text}`.slice(0, (width - 20) / 7));
    const box = svg("g", {class: "readout"}, this.root);
    const w = Math.max(...rows.map((r) => r.length)) * 6.6 + 14, h = rows.length * 16 + 8;
    const bx = at + w + 10 < width ? at + 8 : Math.max(0, at - w - 8);
    svg("rect", {x: bx, y: 4, width: w, height: h, rx: 4}, box);
    rows.forEach((row, i) => svg("text", {x: bx + 7, y: 20 + i * 16}, box, row));
  }
}

// --- conveniences of forms

for (const e of $$("[data-script]")) e.hidden = false;
for (const box of $$("[data-all]")) {
  box.addEventListener("change", () => {
    for (const one of $$(`input[name="${box.dataset.all}"]`, box.form)) one.checked = box.checked;
  });
}
for (const form of $$("form[method=post]")) {
  form.addEventListener("submit", (event) => {
    if (form.dataset.sent) { event.preventDefault(); return; } // a second click while the first is on its way
    form.dataset.sent = "1";
  });
}
// Who sees local times writes local times; the server wants UTC.
for (const e of $$("[data-zone]")) e.textContent = e.dataset.zone === "in" ? `in ${zone} ` : zone;
for (const form of $$("form:has([type=datetime-local])")) {
  form.addEventListener("formdata", (event) => {
    for (const {name, value} of $$("[type=datetime-local]", form)) {
      if (value) event.formData.set(name, new Date(value).toISOString());
    }
  });
}
addEventListener("pageshow", () => { for (const form of $$("form[data-sent]")) delete form.dataset.sent; });

fill(document);
if (document.body.dataset.livePage) {
  charts.setUp();
  connect();
  setInterval(() => { if (!document.hidden) { mark(Date.now() - lastData > staleAfter); say(); } }, 1000);
}
