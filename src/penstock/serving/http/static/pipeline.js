// A pipeline as a live graph: each node below the nodes before it, with its queue, instances and rates.
"use strict";

const BOX = { width: 210, height: 76, gapX: 30, gapY: 40 };

class PipelineGraph {
  constructor() {
    this.section = element("section");
    this.before = null; // the last state, with its time: what counts since the start becomes a rate
  }

  show(graph, up) {
    this.section.hidden = !graph;
    if (!graph) return;
    const before = this.before;
    this.before = { state: graph.state, up };
    const past = before && up > before.up ? up - before.up : 0;
    const rate = (name, key) => {
      const change = (graph.state[name]?.[key] ?? 0) - (before?.state[name]?.[key] ?? 0);
      return past && change > 0 ? change / past : 0;
    };
    const places = this.places(graph.nodes);
    const edges = graph.nodes.flatMap((node) => [
      ...node.next.map((next) => [node.name, next, ""]), ...(node.body ? [[node.name, node.body, "each"]] : []),
    ]);
    const all = [...places.values()];
    const [width, height] = [Math.max(...all.map((p) => p.x)) + BOX.width + 2, Math.max(...all.map((p) => p.y)) + BOX.height + 2];
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "graph", role: "img" });
    for (const [from, to, kind] of edges) {
      const [a, b] = [places.get(from), places.get(to)];
      if (!a || !b) continue;
      const [x1, y1, x2, y2] = [a.x + BOX.width / 2, a.y + BOX.height, b.x + BOX.width / 2, b.y];
      svg.append(drawn("path", { class: `edge ${kind}`, d: `M${x1},${y1} C${x1},${y1 + BOX.gapY / 2} ${x2},${y2 - BOX.gapY / 2} ${x2},${y2}` }));
    }
    const said = graph.nodes.map((node) => {
      const now = graph.state[node.name] ?? {};
      const [batches, rows, run] = ["batches", "rows", "run_s"].map((key) => rate(node.name, key));
      const busy = Math.min(1, run / Math.max(1, now.instances ?? node.instances));
      const failed = rate(node.name, "failed");
      const lines = [
        `${count(rate(node.name, "items"))} items/s${failed ? `, ${count(failed)} failed` : ""}`,
        `queue ${count(now.queue ?? 0)}, ${batches ? `batches of ${count(rows / batches)}` : "no batch"} of ${node.max_batch}`,
        `${count(now.instances ?? node.instances)} instances, ${Math.round(busy * 100)} % busy`,
      ];
      this.box(svg, places.get(node.name), node, lines, busy);
      return `${node.name}: ${lines.join(", ")}`;
    });
    svg.setAttribute("aria-label", said.join("; "));
    const wide = element("div", "", { class: "wide", tabindex: "0", role: "region", "aria-label": "Graph" }, svg);
    const old = this.section.querySelector(".wide");
    if (!old) this.section.replaceChildren(element("h3", "Nodes"), wide);
    else old.replaceChildren(svg); // keeps where it is scrolled to
  }

  box(svg, { x, y }, node, lines, busy) {
    const title = drawn("title");
    title.textContent = node.ops.join(", ");
    svg.append(drawn("rect", { x, y, width: BOX.width, height: BOX.height, rx: 5, class: "node" }, title));
    svg.append(drawn("rect", { x, y: y + BOX.height - 4, width: BOX.width * busy, height: 4, class: "c1" }));
    [node.name, ...lines].forEach((line, i) => {
      const text = drawn("text", { x: x + 8, y: y + 17 + i * 17, class: i ? "" : "name" });
      text.textContent = line.length > 34 ? `${line.slice(0, 33)}…` : line;
      svg.append(text);
    });
  }

  // Rows of nodes with equally long ways from a first node.
  places(nodes) {
    const depth = new Map();
    const next = (node) => [...node.next, ...(node.body ? [node.body] : [])];
    const byName = new Map(nodes.map((node) => [node.name, node]));
    const visit = (node, at) => {
      if (at > nodes.length || (depth.get(node.name) ?? -1) >= at) return; // a body may lead back
      depth.set(node.name, at);
      next(node).forEach((name) => byName.has(name) && visit(byName.get(name), at + 1));
    };
    const later = new Set(nodes.flatMap(next));
    nodes.filter((node) => !later.has(node.name)).forEach((node) => visit(node, 0));
    nodes.forEach((node) => depth.has(node.name) || visit(node, 0));
    const used = new Map();
    return new Map(nodes.map((node) => {
      const row = depth.get(node.name);
      const column = used.get(row) ?? 0;
      used.set(row, column + 1);
      return [node.name, { x: 1 + column * (BOX.width + BOX.gapX), y: 1 + row * (BOX.height + BOX.gapY) }];
    }));
  }
}
