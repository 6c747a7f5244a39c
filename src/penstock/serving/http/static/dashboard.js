// Shows what /dashboard/events sends: one whole view, then each second what changed.
"use strict";

const KEPT = 60; // seconds of the small charts
const SHOWN_EVENTS = 50;
const MOST_EVENTS = 200; // as many as the server keeps
const charts = new Map(); // the last seconds by model and version
const rows = new Map(); // the table's rows by model and version
const modelPage = new ModelPage(find("#model"));
const loading = new Actions();
let fields = [];
let began = 0;
let events = [];
let token = "";
let reading = new AbortController();

const keyOf = (model) => `${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
const shownModel = () => location.hash.match(/^#model\/([^/]+\/[^/]+)$/)?.[1];

// ---- the overview

function line(rows, name, kind) {
  const place = fields.indexOf(name);
  const most = Math.max(...rows.map((row) => row[place]), 1e-9);
  const points = rows.map((row, i) => `${i + KEPT - rows.length},${30 - (28 * row[place]) / most}`);
  return drawn("polyline", { points: points.join(" "), class: kind });
}

function chart(model, rows, up) {
  const last = Object.fromEntries(fields.map((name, i) => [name, rows.at(-1)?.[i] ?? 0]));
  const label = `${count(last.requests)} requests/s, p99 ${seconds(last.p99_s)}`;
  const svg = drawn("svg", { viewBox: `0 0 ${KEPT - 1} 32`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  svg.append(line(rows, "requests", "requests"), line(rows, "p99_s", "p99"));
  for (const event of events) {
    const x = KEPT - 1 - (up - event.up_s);
    if (x < 0 || (event.model && event.model !== model.name)) continue;
    svg.append(drawn("line", { x1: x, x2: x, y1: 0, y2: 32, class: BAD.has(event.kind) ? "bad" : "" }));
  }
  return svg;
}

function row(model, up) {
  const key = keyOf(model);
  const past = [...(charts.get(key) ?? []), ...model.seconds].slice(-KEPT);
  charts.set(key, past);
  const now = Object.fromEntries(fields.map((name, i) => [name, past.at(-1)?.[i] ?? 0]));
  let found = rows.get(key);
  if (!found) { // kept, so that the focus stays on its link
    const head = element("th", "", { scope: "row", title: model.name }, element("a", model.name, { href: `#model/${key}` }));
    head.append(" ", element("small", `version ${model.version}`));
    found = element("tr", "", {}, head);
    rows.set(key, found);
  }
  const late = model.slo_s && now.p99_s > model.slo_s ? "late" : "";
  const target = model.slo_s ? ` (target ${seconds(model.slo_s)})` : "";
  const cells = [
    ["State", model.state, model.state],
    ["Instances", `${model.up} of ${model.instances} on ${model.devices.join(", ")}`, model.up < model.instances ? "late" : ""],
    ["Requests/s", count(now.requests)],
    ["p50 / p99", `${seconds(now.p50_s)} / ${seconds(now.p99_s)}${target}`, late],
    ["Queue", count(now.queue)],
    ["Oldest", seconds(now.oldest_s)],
    ["Rows a batch", now.rows ? `${count(now.rows)} of ${model.batch}` : "-"],
    ["Busy", `${Math.min(100, Math.round((100 * now.busy) / Math.max(1, model.up)))} %`],
    ["Errors/s", count(now.failed + now.rejected), now.failed + now.rejected ? "errors" : ""],
    ["Memory", memory(model.memory_bytes)],
  ];
  const shown = cells.map(([label, text, kind = ""]) => element("td", text, { "data-label": label, class: kind }));
  while (found.children.length > 1) found.lastChild.remove();
  found.append(...shown, element("td", "", { "data-label": "Last minute" }, chart(model, past, up)));
  return found;
}

function showModels(view) {
  const body = find("#models tbody");
  const shown = view.models.map((model) => row(model, view.up_s));
  if (shown.length !== body.children.length || shown.some((each, i) => each !== body.children[i])) {
    body.replaceChildren(...shown);
    const there = new Set(view.models.map(keyOf));
    for (const key of rows.keys()) if (!there.has(key)) (rows.delete(key), charts.delete(key));
  }
  find("#models").hidden = !shown.length;
  const more = view.model_count - view.models.length;
  find("#more").hidden = !more;
  find("#more").textContent = `... and ${more} models with fewer requests`;
}

function showRuns(runs) {
  find("#runs").hidden = !runs.length;
  find("#runs ul").replaceChildren(...runs.map((run) => {
    const name = `${run.kind} ${run.name}`;
    const bar = element("progress", "", { "aria-label": name, max: run.total ?? 1, ...(run.total ? { value: run.done } : {}) });
    return element("li", "", {}, element("b", name), ` (process ${run.pid}, since ${new Date(run.began_s * 1000).toLocaleTimeString()}) `, bar, ` ${run.text}`);
  }));
}

// ---- all pages

function show(view) {
  if (view.fields) {
    fields = view.fields;
    began = view.began_s;
    events = [];
    charts.clear();
    find("#about").dataset.version = view.penstock;
    find("#load").hidden = !view.manages;
  }
  const verdict = find("#verdict");
  if (verdict.dataset.text !== view.verdict.text) { // else screen readers would repeat it
    verdict.dataset.text = view.verdict.text;
    verdict.className = view.verdict.level;
    verdict.replaceChildren(element("b", view.verdict.word), view.verdict.text);
  }
  const unsent = view.unsent_bytes ? `, ${memory(view.unsent_bytes)} that clients have not read` : "";
  find("#about").textContent =
    `${find("#about").dataset.version}, up for ${seconds(view.now_s - began)}, ${view.connections} connections${unsent}`;
  events = [...events, ...view.events].slice(-MOST_EVENTS);
  if (shownModel()) {
    if ("detail" in view) modelPage.show(view, events); // else the view is one of the page before
  } else if ("runs" in view) {
    showModels(view);
    showRuns(view.runs);
  }
  find("#events").hidden = !events.length;
  if (view.events.length) {
    find("#events ol").replaceChildren(...events.slice(-SHOWN_EVENTS).toReversed().map((event) => {
      const time = new Date(event.time_s * 1000);
      return element("li", "", {}, element("time", time.toLocaleTimeString(), { datetime: time.toISOString() }), named(event));
    }));
  }
}

async function read(signal) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const model = shownModel();
  const response = await fetch(`/dashboard/events${model ? `/${model}` : ""}`, { headers, signal });
  find("#token").hidden = response.status !== 401;
  if (response.status === 401) return false;
  if (!response.ok) throw new Error(`the server answers ${response.status}: ${await response.text()}`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server has ended");
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) show(JSON.parse(part.replace(/^data: /gm, "")));
  }
}

async function run() {
  reading.abort();
  const { signal } = (reading = new AbortController());
  find("#overview").hidden = Boolean(shownModel());
  find("#model").hidden = !shownModel();
  while (!signal.aborted) {
    try {
      if (!(await read(signal))) {
        find("#verdict").textContent = token ? "The token is wrong." : "A token is required.";
        return;
      }
    } catch (error) {
      if (signal.aborted) return;
      const verdict = find("#verdict");
      verdict.className = "error";
      verdict.dataset.text = "";
      verdict.textContent = `No connection to the server: ${error.message}`;
    }
    await new Promise((next) => setTimeout(next, 1000));
  }
}

find("#token").onsubmit = (event) => {
  event.preventDefault();
  token = find("#token input").value;
  run();
};
onhashchange = () => {
  run();
  if (shownModel()) modelPage.title.focus();
};
find("#verdict").textContent = "Connecting ..."; // a browser without scripts shows the table alone
loading.load();
find("#load").append(loading.section);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => modelPage.redraw());
run();
