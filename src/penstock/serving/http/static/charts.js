// What all pages of the dashboard draw with: elements, numbers as text, and charts of the past by uPlot.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const find = (selector) => document.querySelector(selector);

function element(name, text = "", attributes = {}, ...children) {
  const found = document.createElement(name);
  found.textContent = text; // never as HTML: models have any name
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

function drawn(name, attributes = {}, ...children) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

function seconds(value) {
  if (!value) return "-";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toPrecision(value < 0.01 ? 2 : 3)} ms`;
  return value < 120 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

function count(value) {
  return value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function memory(bytes) {
  return bytes ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : "-";
}

function ago(value) {
  const whole = Math.round(-value);
  return whole ? `-${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}` : "now";
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// An axis in the colours of the page.
function axis(format, size, more = {}) {
  return {
    stroke: () => color("faint"), font: "11px system-ui, sans-serif", size,
    values: (_, all) => all.map((value) => (value ? format(value) : "0")),
    grid: { stroke: () => color("line"), width: 1 }, ticks: { show: false }, ...more,
  };
}

function plot(figure, options, data) {
  const found = new uPlot({ width: 300, height: 150, ...options }, data, figure);
  found.root.querySelector(".u-wrap").setAttribute("role", "img");
  new ResizeObserver(() => found.setSize({ width: figure.clientWidth || 300, height: 150 })).observe(figure);
  return found;
}

// Draws in the present colours of the page.
function recolor(chart) {
  chart.redraw();
  chart.root.querySelectorAll(".u-marker").forEach((marker, i) => {
    const series = chart.series[i + chart.series.length - chart.root.querySelectorAll(".u-marker").length];
    if (series.stroke) marker.style.borderColor = series.stroke();
    if (series.fill) marker.style.background = series.fill();
  });
}

// A chart of the past. `lines` are [label, CSS variable, function of a second], in `stacked` ones each on top of the
// ones before. Events are marks, whose text is shown while the pointer is near.
class PastChart {
  constructor(title, lines, format, stacked = false) {
    this.title = title;
    this.lines = lines;
    this.format = format;
    this.stacked = stacked;
    this.events = [];
    this.raw = [];
    this.figure = element("figure", "", {}, element("figcaption", title));
    this.mark = element("p", "", { class: "mark" });
    const series = lines.map(([label, name], i) => ({
      label, stroke: () => color(name), width: 1.5, points: { show: false },
      fill: stacked ? () => color(name) : undefined,
      value: (_, __, ___, at) => (at === null ? "-" : format(this.raw[i]?.[at] ?? 0)),
    }));
    if (stacked) series.reverse(); // the highest is drawn first
    this.plot = plot(this.figure, {
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
      axes: [axis(ago, 24, { incrs: [15, 60, 600], values: (_, all) => all.map(ago) }), axis(format, 64)],
      series: [{ label: "Time", value: (_, value) => (value === null ? "-" : ago(value)) }, ...series],
      cursor: { y: false, drag: { x: false, y: false } },
      legend: { live: true },
      hooks: { draw: [(u) => this.drawMarks(u)], setCursor: [(u) => this.nameMark(u)] },
    }, [[], ...lines.map(() => [])]);
    this.figure.append(this.mark);
  }

  set(rows, step, age, up, events) {
    const times = rows.map((_, i) => (i + 1 - rows.length) * step - age);
    this.raw = this.lines.map(([, , value]) => rows.map(value));
    let shown = this.raw;
    if (this.stacked) {
      let sum = rows.map(() => 0);
      shown = this.raw.map((values) => (sum = sum.map((below, i) => below + values[i])));
      shown = shown.toReversed();
    }
    this.events = events.map((event) => ({ ...event, x: event.up_s - up }));
    this.plot.setData([times, ...shown], false);
    this.plot.setScale("x", { min: Math.min(-step * 2, times[0] ?? 0), max: 0 });
    if (this.plot.cursor.idx === null || this.plot.cursor.left < 0) {
      this.plot.setLegend({ idxs: this.plot.series.map(() => times.length - 1) }, false);
    }
    const last = this.lines.map(([label], i) => `${label} ${this.format(this.raw[i].at(-1) ?? 0)}`);
    this.plot.root.querySelector(".u-wrap").setAttribute("aria-label", `${this.title}: ${last.join(", ")}`);
  }

  drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const event of this.events) {
      if (event.x < u.scales.x.min) continue;
      const x = Math.round(u.valToPos(event.x, "x", true));
      ctx.strokeStyle = color(BAD.has(event.kind) ? "error" : "faint");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  nameMark(u) {
    const near = (u.scales.x.max - u.scales.x.min) / 60;
    const at = u.cursor.left < 0 ? null : u.posToVal(u.cursor.left, "x");
    const shown = at === null ? [] : this.events.filter((event) => Math.abs(event.x - at) < near);
    this.mark.textContent = shown.slice(-3).map(named).join("; ");
  }
}

const BAD = new Set(["died", "failed", "leaking", "not reloaded"]);

function named(event) {
  return `${event.model && `${event.model} ${event.version}: `}${event.kind}${event.text && `, ${event.text}`}`;
}
