"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 270, LEFT = 58, RIGHT = 12, TOP = 18, BOTTOM = 28;
const AXIS = { step: "training step", samples: "samples", tokens: "tokens", wall: "hours of training" };
const AXIS_X = AXIS[report.axis];

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const word = (status) => status.replace(" ", "-");
const colour = (role, index) => (role === "baseline" ? "var(--b)" : `var(--c${index % 3})`);

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((step) => step * power >= raw) * power;
  const found = [];
  for (let i = Math.ceil(low / unit); i * unit <= high + unit * 1e-9; i += 1) found.push(i * unit);
  return found;
}

// Trailing mean over `window` points; gaps stay gaps.
function smoothed(values, window) {
  if (window < 2) return values;
  const kept = [];
  let sum = 0;
  return values.map((value) => {
    if (value === null) return null;
    kept.push(value);
    sum += value;
    if (kept.length > window) sum -= kept.shift();
    return sum / kept.length;
  });
}

// At most four points per pixel column: first, lowest, highest, last. Spikes survive.
function thinned(xs, values, from, to) {
  const wide = (WIDTH - LEFT - RIGHT) * 2;
  if (to - from <= 4 * wide) return Array.from({ length: to - from }, (_, i) => from + i);
  const kept = [];
  for (let column = 0; column < wide; column += 1) {
    const start = from + Math.floor(((to - from) * column) / wide), end = from + Math.floor(((to - from) * (column + 1)) / wide);
    let low = start, high = start;
    for (let i = start; i < end; i += 1) {
      if (values[i] < values[low]) low = i;
      if (values[i] > values[high]) high = i;
    }
    kept.push(...[...new Set([start, low, high, end - 1])].sort((a, b) => a - b));
  }
  return kept;
}

function chart(panel, names) {
  const series = [
    ...panel.baseline.map((values, i) => ({ role: "baseline", name: names.baseline[i], values, colour: colour("baseline", i) })),
    ...panel.candidate.map((values, i) => ({ role: "candidate", name: names.candidate[i], values, colour: colour("candidate", i) })),
  ];
  const xs = panel.x;
  const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": panel.title });
  const readout = element("p", { class: "values" });
  let from = 0, to = xs.length, window_ = report.window;
  let scaleX, dragStart = null;

  function limits(curves) {
    const shown = curves.flatMap((values) => values.slice(from, to)).filter((value) => value !== null);
    let low = Infinity, high = -Infinity;
    for (const value of shown) { if (value < low) low = value; if (value > high) high = value; }
    if (low === Infinity) return [0, 1];
    const space = (high - low || Math.abs(high) || 1) * 0.06;
    return [low - space, high + space];
  }

  function draw(window) {
    window_ = window;
    const smooth = series.map((one) => smoothed(one.values, window));
    const [low, high] = limits([...smooth, ...(panel.band || []), ...(window < 2 ? series.map((one) => one.values) : [])]);
    const x0 = xs[from], x1 = xs[to - 1];
    scaleX = (x) => LEFT + ((x - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
    const scaleY = (y) => TOP + ((high - y) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const clip = `clip-${panel.metric.replace(/[^A-Za-z0-9]/g, "-")}`;
    picture.replaceChildren();
    const frame = shape("clipPath", { id: clip });
    frame.append(shape("rect", { x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM }));
    picture.append(frame);
    for (const y of ticks(low, high, 5)) {
      picture.append(shape("line", { class: "gridline", x1: LEFT, x2: WIDTH - RIGHT, y1: scaleY(y), y2: scaleY(y) }));
      picture.append(shape("text", { x: LEFT - 8, y: scaleY(y) + 4, "text-anchor": "end" }, number(y)));
    }
    for (const x of ticks(x0, x1, 6)) {
      picture.append(shape("text", { x: scaleX(x), y: HEIGHT - 9, "text-anchor": "middle" }, number(x)));
    }
    const inside = shape("g", { "clip-path": `url(#${clip})` });
    if (panel.band) inside.append(shape("path", { class: "band", d: area(panel.band, scaleY) }));
    series.forEach((one, i) => {
      const style = `stroke:${one.colour}` + (one.role === "baseline" && panel.baseline.length > 1 ? ";stroke-opacity:.6;stroke-width:1.4" : "");
      const faint = one.role === "baseline" ? 0.3 / panel.baseline.length : 0.3;
      if (window > 1) inside.append(shape("path", { class: "raw", style: `stroke:${one.colour};opacity:${faint}`, d: line(one.values, scaleY) }));
      inside.append(shape("path", { class: "smooth", style, d: line(smooth[i], scaleY) }));
    });
    picture.append(inside);
    for (const step of report.attempts) mark(step, "attempt", null, scaleX);
    if (panel.first !== null) mark(panel.first, "first", `fails from ${panel.first}`, scaleX);
  }

  function mark(step, kind, label) {
    const at = panel.steps.findIndex((one) => one >= step);
    if (at < from || at >= to) return;
    const x = scaleX(xs[at]);
    picture.append(shape("line", { class: kind, x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (!label) return;
    const anchor = x > WIDTH - 110 ? "end" : "start";
    picture.append(shape("text", { class: "first-label", x: x + (anchor === "end" ? -5 : 5), y: TOP - 6, "text-anchor": anchor }, label));
  }

  function line(values, scaleY) {
    let path = "", pen = "M";
    for (const i of thinned(xs, values, from, to)) {
      if (values[i] === null) { pen = "M"; continue; }
      path += `${pen}${scaleX(xs[i]).toFixed(1)} ${scaleY(values[i]).toFixed(1)}`;
      pen = "L";
    }
    return path;
  }

  function area([low, high], scaleY) {
    const there = thinned(xs, high, from, to), back = thinned(xs, low, from, to).reverse();
    const at = (i, values) => `${scaleX(xs[i]).toFixed(1)} ${scaleY(values[i]).toFixed(1)}`;
    return "M" + [...there.map((i) => at(i, high)), ...back.map((i) => at(i, low))].join("L") + "Z";
  }

  function nearest(event) {
    const box = picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    let best = from;
    for (let i = from; i < to; i += 1) if (Math.abs(scaleX(xs[i]) - x) < Math.abs(scaleX(xs[best]) - x)) best = i;
    return best;
  }

  function point(event) {
    const at = nearest(event), x = scaleX(xs[at]);
    picture.querySelectorAll(".cursor, .drag").forEach((old) => old.remove());
    picture.append(shape("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (dragStart !== null) {
      const start = scaleX(xs[dragStart]);
      picture.append(shape("rect", { class: "drag", x: Math.min(x, start), width: Math.abs(x - start), y: TOP, height: HEIGHT - TOP - BOTTOM }));
    }
    readout.replaceChildren(`step ${panel.steps[at]}`);
    series.forEach((one) => readout.append("   ", element("span", { style: `color:${one.colour}` }, "● "), `${one.name} ${number(one.values[at])}`));
  }

  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerleave", () => {
    picture.querySelectorAll(".cursor").forEach((old) => old.remove());
    readout.replaceChildren();
  });
  picture.addEventListener("pointerdown", (event) => { dragStart = nearest(event); });
  picture.addEventListener("pointerup", (event) => {
    const end = nearest(event);
    const [first, last] = [Math.min(dragStart, end), Math.max(dragStart, end)];
    dragStart = null;
    if (last - first < 3) return;
    [from, to] = [first, last + 1];
    draw(window_);
  });
  picture.addEventListener("dblclick", () => { [from, to] = [0, xs.length]; draw(window_); });
  return { picture, readout, draw };
}

function checks(panel) {
  const rows = panel.findings.map((finding) => {
    const state = finding.passed === null ? "–" : finding.passed ? "✓" : "✗";
    const kind = finding.passed === null ? "soft" : finding.passed ? "pass" : "fail";
    const what = element("td", {}, element("span", {}, finding.formula), finding.text ? element("div", { class: "soft" }, finding.text) : null);
    const since = finding.passed === false && finding.first_step !== null ? ` from step ${finding.first_step}` : "";
    return element("tr", {}, element("td", { class: kind }, `${state} ${finding.check}`), element("td", { class: kind }, finding.shown + since),
      element("td", {}, finding.limit), what);
  });
  const head = element("tr", {}, ...["check", "value", "limit", "formula"].map((title) => element("th", {}, title)));
  const sources = panel.findings.filter((finding) => finding.source);
  return [
    element("table", {}, head, ...rows),
    element("details", {}, element("summary", {}, `Points used ${panel.used}, skipped ${panel.skipped}; tags and sources of the limits`),
      element("p", {}, ...panel.tags.flatMap((tag) => [element("code", {}, tag), " "])),
      element("ul", {}, ...sources.map((finding) => element("li", {}, `${finding.check}: ${finding.source}`)))),
  ];
}

function build() {
  const status = report.aligned ? "aligned" : "not aligned";
  document.title = `${report.candidate.join(", ")}: ${status}`;
  const charts = report.panels.map((panel) => ({ panel, ...chart(panel, report) }));
  const slider = element("input", { type: "range", min: 1, max: 50, value: report.window, "aria-label": "smoothing window" });
  const shown = element("span", { class: "soft" });
  const redraw = () => {
    shown.textContent = slider.value === "1" ? "off" : `${slider.value} points`;
    charts.forEach((one) => one.draw(Number(slider.value)));
  };
  slider.addEventListener("input", redraw);
  const keys = [
    ...report.candidate.map((name, i) => element("span", { class: "key" }, element("i", { style: `border-color:${colour("candidate", i)}` }), name)),
    report.baseline.length ? element("span", { class: "key" }, element("i", { style: "border-color:var(--b)" }), report.baseline.join(", ")) : null,
  ];
  const hint = `x: ${AXIS_X}; drag to zoom, double click to reset`;
  document.getElementById("page").append(
    element("header", {},
      element("div", {}, element("h1", {}, `${report.candidate.join(", ")} against ${report.baseline.join(", ") || "no baseline"}`),
        element("p", { class: "soft" }, report.headline)),
      element("span", { class: `badge ${word(status)}` }, status)),
    element("div", { class: "controls" }, ...keys.filter(Boolean), element("label", {}, "Smoothing", slider, shown),
      element("span", { class: "soft" }, hint + (report.attempts.length ? `; dotted: a resume (steps ${report.attempts.join(", ")})` : ""))),
    element("div", { class: "grid" }, ...charts.map(({ panel, picture, readout }) => element("section", { class: "card" },
      element("div", {}, element("h2", {}, panel.title), element("span", { class: `badge ${word(panel.status)}` }, panel.status)),
      readout, picture, ...checks(panel)))),
    notes());
  redraw();
}

function notes() {
  const lines = [...report.notes, ...report.unjudged.map((one) => `${one.metric} was not judged: ${one.reason}`)];
  if (!lines.length) return "";
  return element("section", { class: "card notes" }, element("h2", {}, "Notes"), element("ul", {}, ...lines.map((note) => element("li", {}, note))));
}

build();
