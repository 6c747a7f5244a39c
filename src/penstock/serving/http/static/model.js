// The page of one model: its last hour, and what its last batches did.
"use strict";

const PARTS = [ // of the time of a request, in their order; with the colours of dashboard.css
  ["waited_s", "queue"], ["handover_s", "hand-over"], ["decode_s", "decode"], ["preprocess_s", "preprocess"],
  ["predict_s", "predict"], ["postprocess_s", "postprocess"], ["encode_s", "encode"],
];
const WITH_WRITE = [...PARTS, ["write_s", "write"]]; // which is known of a second only
const WHY = { // docs/metrics.md has the whole table
  full: "it had max_batch_size rows, or what memory allows",
  "all that waits": "an instance was idle",
  "longer hold": "a hold that pays was over",
  "trial of a hold": "a hold on trial was over",
  crowd: "the callers that keep a processor busy rest",
  spread: "several instances were idle",
  share: "an even share, the other instances take the rest",
  deadline: "waiting longer would miss a deadline",
  urgent: "urgent requests came",
  "lower size": "it fills a size of batching.sizes",
  ahead: "the running batch was about to end",
  delay: "the delay of the policy was over",
  unbatched: "the policy sends requests one by one",
  rerun: "its worker died, and it runs again",
};
const MOST_LANES = 32;

class ModelPage {
  constructor(root) {
    this.root = root;
    this.hour = false;
    this.rows = [];
    this.steps = [];
    const of = (name) => (row) => row[this.fields.indexOf(name)];
    this.charts = [
      new PastChart("Requests a second", [
        ["answered", "c2", (row) => of("answers")(row) - of("failed")(row)],
        ["errors", "error", of("failed")], ["refused", "c5", of("rejected")],
      ], count),
      new PastChart("Latency", [["p50", "c1", of("p50_s")], ["p99", "error", of("p99_s")], ["target", "c3", () => this.slo]], seconds),
      new PastChart("Mean time of a request", WITH_WRITE.map(([field, label], i) => [label, `c${i}`, of(field)]), seconds, true),
      new PastChart("Queue and in flight", [["in flight", "c1", of("in_flight")], ["queue", "c5", of("queue")]], count),
      new PastChart("Oldest request in the queue", [["oldest", "c5", of("oldest_s")]], seconds),
      new PastChart("Rows a batch", [["rows", "c2", of("rows")]], count),
      new PastChart("Busy instances", [["busy", "c1", (row) => Math.min(of("busy")(row), this.up)]], count),
    ];
    this.title = element("h2", "", { tabindex: "-1" });
    this.facts = element("dl");
    this.ranges = ["Last 5 minutes", "Last hour"].map((text, i) => {
      const button = element("button", text, { type: "button", "aria-pressed": String(!i) });
      button.onclick = () => {
        this.hour = Boolean(i);
        this.ranges.forEach((each, j) => each.setAttribute("aria-pressed", String(i === j)));
        this.draw();
      };
      return button;
    });
    this.cost = this.costChart();
    this.graph = new PipelineGraph();
    this.actions = new Actions();
    this.lanes = element("section");
    this.reasons = element("section");
    this.slow = element("section");
    root.append(
      element("p", "", {}, element("a", "All models", { href: "#" })), this.title, this.facts,
      this.graph.section,
      element("div", "", { role: "group", "aria-label": "Range of the charts" }, ...this.ranges),
      element("div", "", { class: "charts" }, ...this.charts.map((chart) => chart.figure), this.cost.figure),
      this.lanes, this.reasons, this.slow, this.actions.section,
    );
  }

  show(view, events) {
    const model = view.models[0];
    if (view.fields) {
      this.fields = view.fields;
      this.step = view.step_s;
      this.rows = [];
      this.steps = [];
      this.graph.before = null;
      this.actions.section.hidden = !view.manages;
    }
    if (!model) {
      this.facts.replaceChildren(element("dt", "State"), element("dd", "no longer loaded"));
      return;
    }
    const detail = view.detail;
    this.rows = [...this.rows, ...model.seconds].slice(-300);
    this.steps = [...this.steps, ...detail.steps].slice(-360);
    this.age = detail.step_age;
    this.now = view.up_s;
    this.up = Math.max(1, model.up);
    this.slo = model.slo_s;
    this.events = events.filter((event) => !event.model || event.model === model.name);
    this.title.textContent = model.name;
    this.title.append(" ", element("small", `version ${model.version}`));
    const room = detail.max_queue_rows ? ` of at most ${count(detail.max_queue_rows)}` : "";
    const facts = [
      ["State", model.state], ["Instances", `${model.up} of ${model.instances} on ${model.devices.join(", ")}`],
      ["In flight", count(detail.in_flight)], ["Rows in the queue", `${count(detail.queue_rows)}${room}`],
      ["Oldest in the queue", seconds(detail.oldest_s)], ["Restarts", detail.restarts],
      ["Memory", memory(model.memory_bytes)],
    ];
    this.facts.replaceChildren(...facts.map(([name, text]) => element("div", "", {}, element("dt", name), element("dd", text))));
    this.draw();
    this.drawLanes(detail);
    this.drawReasons(detail);
    this.drawCost(detail.cost);
    this.drawSlow(detail.slow);
    this.graph.show(detail.pipeline, view.up_s);
    this.actions.show(model, detail);
  }

  draw() {
    const past = this.hour && this.steps.length > 1 ? [this.steps, this.step, this.age] : [this.rows, 1, 0];
    for (const chart of this.charts) chart.set(...past, this.now, this.events);
  }

  redraw() {
    for (const each of [...this.charts, this.cost]) recolor(each.plot);
  }

  // ---- the last batches

  drawLanes({ lanes, lanes_s: past, processes }) {
    const names = new Map(processes.map(([slot, pid, bytes]) => [slot, `process ${pid}, ${memory(bytes)}`]));
    const slots = [...new Set([...names.keys(), ...lanes.map((lane) => lane[0])])].sort((a, b) => a - b);
    const most = Math.max(1, ...lanes.map((lane) => lane[3]));
    const found = slots.slice(0, MOST_LANES).map((slot) => {
      const own = lanes.filter((lane) => lane[0] === slot);
      const busy = own.reduce((sum, lane) => sum + lane[2], 0) / past;
      const text = `Instance ${slot}: ${own.length} batches, ${Math.min(100, Math.round(busy * 100))} % busy`;
      const svg = drawn("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": text });
      for (const [, began, run, rows, reason] of own) {
        const bar = drawn("rect", {
          x: Math.max(0, 1000 * (1 - began / past)), y: 2, height: 16, width: Math.max(1, (1000 * run) / past),
          "fill-opacity": 0.4 + (0.6 * rows) / most,
        });
        const title = drawn("title");
        title.textContent = `${rows} rows, ${seconds(run)}, sent because: ${reason}`;
        bar.append(title);
        svg.append(bar);
      }
      return element("div", "", { class: "lane" }, element("span", `${text}${names.has(slot) ? `; ${names.get(slot)}` : ""}`), svg);
    });
    const more = slots.length > MOST_LANES ? [element("p", `... and ${slots.length - MOST_LANES} instances`)] : [];
    this.lanes.replaceChildren(element("h3", `Instances in the last ${seconds(past)}`), ...found, ...more);
  }

  drawReasons({ reasons, batches_s: past }) {
    const names = Object.keys(reasons);
    const sizes = [...new Set(names.flatMap((name) => Object.keys(reasons[name]).map(Number)))].sort((a, b) => a - b);
    const sums = sizes.map((size) => names.reduce((sum, name) => sum + (reasons[name][size] ?? 0), 0));
    const most = Math.max(1, ...sums);
    const legend = names.map((name, i) => element(
      "li", "", {}, drawn("svg", { viewBox: "0 0 10 10", class: "swatch" }, drawn("rect", { width: 10, height: 10, class: `c${i % 7}` })),
      element("b", name), WHY[name] ? `: ${WHY[name]}` : "",
    ));
    const rows = sizes.map((size, j) => {
      let x = 0;
      const bars = names.map((name, i) => {
        const width = (1000 * (reasons[name][size] ?? 0)) / most;
        return drawn("rect", { x: (x += width) - width, width, height: 20, class: `c${i % 7}` });
      });
      const text = names.map((name) => `${name} ${reasons[name][size] ?? 0}`).join(", ");
      const svg = drawn("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": text }, ...bars);
      const label = size < 3 ? `${size}` : `${size / 2 + 1} to ${size}`;
      return element("tr", "", {}, element("th", label, { scope: "row" }), element("td", sums[j]), element("td", "", {}, svg));
    });
    const heads = ["Rows", "Batches", "Why they left"].map((text) => element("th", text, { scope: "col" }));
    const table = element("table", "", { class: "reasons" }, element("thead", "", {}, element("tr", "", {}, ...heads)), element("tbody", "", {}, ...rows));
    const shown = names.length ? [table, element("ul", "", { class: "legend" }, ...legend)] : [element("p", "No batches in the last minute.")];
    this.reasons.replaceChildren(element("h3", `Batches of the last ${seconds(past || 60)}`), ...shown);
  }

  costChart() {
    const figure = element("figure", "", {}, element("figcaption", "Time of a batch, as learned"));
    const found = plot(figure, {
      scales: { x: { time: false, range: (_, low, high) => [0, Math.max(1, high * 1.05)] }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [axis(count, 24), axis(seconds, 64)],
      series: [
        { label: "Rows", value: (_, value) => (value === null ? "-" : count(value)) },
        { label: "predicted", stroke: () => color("c1"), width: 1.5, spanGaps: true, points: { show: false }, value: (_, value) => seconds(value) },
        { label: "measured", stroke: () => color("c5"), paths: () => null, points: { show: true, size: 7, fill: () => color("c5") }, value: (_, value) => seconds(value) },
      ],
      cursor: { y: false, drag: { x: false, y: false } },
    }, [[], [], []]);
    const text = element("p", "", { class: "mark" });
    figure.append(text);
    return { figure, plot: found, text };
  }

  drawCost(cost) {
    const points = cost.points ?? [];
    const steps = Object.entries(cost.sizes_s ?? {}).map(([rows, time]) => [Number(rows), time]);
    const most = Math.max(1, cost.max_batch_size ?? 1, ...points.map((point) => point[0]));
    const line = (rows) => [rows, cost.a_s + cost.b_s * rows];
    const measured = new Map(points.map((point) => [point[0], point[1]]));
    const predicted = new Map(steps.length ? steps : cost.fitted ? [1, most].map(line) : points.map(([rows]) => line(rows)));
    const rows = cost.ready ? [...new Set([...measured.keys(), ...predicted.keys()])].sort((a, b) => a - b) : [...measured.keys()];
    const text = !cost.ready ? "Too few batches for a prediction."
      : cost.fitted ? `${seconds(cost.a_s)} for a batch, and ${seconds(cost.b_s)} for each row.`
      : "All batches have nearly the same size: the cost of a row is not known.";
    this.cost.text.textContent = text;
    this.cost.plot.root.querySelector(".u-wrap").setAttribute("aria-label", `Time of a batch: ${text}`);
    const at = (of) => rows.map((each) => of.get(each) ?? null);
    this.cost.plot.setData([rows, at(cost.ready ? predicted : new Map()), at(measured)]);
  }

  drawSlow(slow) {
    if (!slow) {
      this.slow.replaceChildren();
      return;
    }
    const total = PARTS.reduce((sum, [field]) => sum + slow[field], 0);
    const before = slow.before;
    const ran = before ? PARTS.slice(2).reduce((sum, [field]) => sum + before[field], 0) : 0;
    const start = before ? Math.min(0, before.ended_s - ran) : 0;
    const scale = 1000 / Math.max(total - start, 1e-9);
    const bar = (of, parts, from) => {
      let x = from;
      const rects = parts.map(([field, label]) => {
        const title = drawn("title");
        title.textContent = `${label} ${seconds(of[field])}`;
        const place = PARTS.findIndex((part) => part[0] === field);
        const rect = drawn("rect", { x: (x - start) * scale, width: of[field] * scale, height: 20, class: `c${place}` }, title);
        x += of[field];
        return rect;
      });
      const label = parts.filter(([field]) => of[field]).map(([field, name]) => `${name} ${seconds(of[field])}`).join(", ");
      return drawn("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...rects);
    };
    const what = (of) => `${of.rows} of at most ${of.max_batch_size} rows on instance ${of.instance}, sent because: ${of.reason}`;
    const lanes = [element("div", "", { class: "lane" }, element("span", `The request; its batch had ${what(slow)}`), bar(slow, PARTS, 0))];
    if (before) {
      lanes.unshift(element("div", "", { class: "lane" }, element("span", `The batch before it had ${what(before)}`), bar(before, PARTS.slice(2), before.ended_s - ran)));
    }
    const legend = PARTS.map(([field, label], i) => element(
      "li", "", {}, drawn("svg", { viewBox: "0 0 10 10", class: "swatch" }, drawn("rect", { width: 10, height: 10, class: `c${i}` })),
      `${label} ${seconds(slow[field])}`,
    ));
    this.slow.replaceChildren(
      element("h3", `The slowest request of the last minute: ${seconds(total)}`), ...lanes, element("ul", "", { class: "legend" }, ...legend),
    );
  }
}
