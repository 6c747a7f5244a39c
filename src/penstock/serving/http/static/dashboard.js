// Shows what /dashboard/events sends: one whole view, then each second what changed.
"use strict";

const KEPT = 60; // seconds of the small charts
const SHOWN_EVENTS = 50;
const find = (selector) => document.querySelector(selector);
const charts = new Map(); // the last seconds by model and version
let fields = [];
let began = 0;
let events = [];

function element(name, text = "", attributes = {}) {
  const found = document.createElement(name);
  found.textContent = text; // never as HTML: models have any name
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}

function seconds(value) {
  if (!value) return "-";
  if (value < 1) return `${(value * 1000).toPrecision(value < 0.01 ? 2 : 3)} ms`;
  return value < 120 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

function count(value) {
  return value === 0 ? "0" : value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function memory(bytes) {
  return bytes ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : "-";
}

function line(rows, name, kind) {
  const place = fields.indexOf(name);
  const most = Math.max(...rows.map((row) => row[place]), 1e-9);
  const points = rows.map((row, i) => `${i + KEPT - rows.length},${30 - (28 * row[place]) / most}`);
  const found = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  found.setAttribute("points", points.join(" "));
  found.setAttribute("class", kind);
  return found;
}

function chart(model, rows) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 32`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const last = Object.fromEntries(fields.map((name, i) => [name, rows.at(-1)?.[i] ?? 0]));
  svg.setAttribute("aria-label", `${count(last.requests)} requests/s, p99 ${seconds(last.p99_s)}`);
  svg.append(line(rows, "requests", "requests"), line(rows, "p99_s", "p99"));
  return svg;
}

function row(model) {
  const key = JSON.stringify([model.name, model.version]);
  const rows = [...(charts.get(key) ?? []), ...model.seconds].slice(-KEPT);
  charts.set(key, rows);
  const now = Object.fromEntries(fields.map((name, i) => [name, rows.at(-1)?.[i] ?? 0]));
  const found = element("tr");
  const head = element("th", model.name, { scope: "row", title: model.name });
  head.append(" ", element("small", `version ${model.version}`));
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
  found.append(head, ...cells.map(([label, text, kind = ""]) => element("td", text, { "data-label": label, class: kind })));
  const drawn = element("td", "", { "data-label": "Last minute" });
  drawn.append(chart(model, rows));
  found.append(drawn);
  return found;
}

function show(view) {
  if (view.fields) {
    fields = view.fields;
    began = view.began_s;
    events = [];
    charts.clear();
    find("#about").dataset.version = view.penstock;
  }
  const verdict = find("#verdict");
  if (verdict.dataset.text !== view.verdict.text) { // else screen readers would repeat it
    verdict.dataset.text = view.verdict.text;
    verdict.className = view.verdict.level;
    verdict.replaceChildren(element("b", view.verdict.word), view.verdict.text);
  }
  find("#about").textContent =
    `${find("#about").dataset.version}, up for ${seconds(view.now_s - began)}, ${view.connections} connections`;
  find("#models").hidden = !view.models.length;
  find("#models tbody").replaceChildren(...view.models.map(row));
  const more = view.model_count - view.models.length;
  find("#more").hidden = !more;
  find("#more").textContent = `... and ${more} models with fewer requests`;
  events = [...events, ...view.events].slice(-SHOWN_EVENTS);
  find("#events").hidden = !events.length;
  if (view.events.length) {
    find("#events ol").replaceChildren(...events.toReversed().map((event) => {
      const found = element("li");
      const time = new Date(event.time_s * 1000);
      found.append(element("time", time.toLocaleTimeString(), { datetime: time.toISOString() }));
      found.append(`${event.model} ${event.version}: ${event.kind}${event.text && `, ${event.text}`}`);
      return found;
    }));
  }
}

async function read(token) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const response = await fetch("/dashboard/events", { headers });
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

async function run(token) {
  for (;;) {
    try {
      if (!(await read(token))) {
        find("#verdict").textContent = token ? "The token is wrong." : "A token is required.";
        return;
      }
    } catch (error) {
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
  run(find("#token input").value);
};
run("");
