// The timeline: step rate, world size, incidents and checkpoints on one axis of time. Who was slow on
// the same axis. And scalars.

import { SHAPES, clock, count, element, incidentLook, mark, rate, scalar, svg, tickLabel } from "/dom.js";

const MARKS = 34, RATE = 170, GAP = 26, WORLD = 62, SAVES = 18, AXIS = 20, LEFT = 46, RIGHT = 12;
// A logged value has up to nine characters.
const SCALAR_LEFT = 70;
const HEIGHT = MARKS + RATE + GAP + WORLD + SAVES + AXIS;
const TICKS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800];
// Marks that are nearer than this become one with a count.
const MARK_WIDTH = 24;
const ORDER = ["plan", "warn", "lost"];

export function drawTimeline(box, data) {
  const width = Math.max(280, box.clientWidth);
  const x = (s) => LEFT + ((s - data.from_s) / (data.to_s - data.from_s)) * (width - LEFT - RIGHT);
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "group", tabindex: 0,
    "aria-label": "Step rate and world size over time. Arrow keys read out, j and k go from incident to incident.",
  });
  const plot = { root, width, x, data };
  axis(plot);
  spans(plot);
  curves(plot);
  saves(plot);
  incidentMarks(plot);
  pointer(plot, box);
  const hadFocus = box.contains(document.activeElement) && document.activeElement.tagName === "svg";
  const markFocus = document.activeElement?.closest?.(".incident-mark")?.dataset.first;
  box.replaceChildren(root);
  if (markFocus) box.querySelector(`[data-first="${CSS.escape(markFocus)}"]`)?.focus();
  else if (hadFocus) root.focus();
}

function axis({ root, width, x, data }) {
  const span = data.to_s - data.from_s;
  const most = Math.max(2, Math.floor((width - LEFT) / 90));
  const step = TICKS.find((each) => span / each <= most) ?? Math.ceil(span / most / 86400) * 86400;
  const offset = new Date(data.from_s * 1000).getTimezoneOffset() * 60;
  for (let s = Math.ceil((data.from_s - offset) / step) * step + offset; s <= data.to_s; s += step) {
    root.append(svg("line", { class: "grid", x1: x(s), x2: x(s), y1: MARKS, y2: HEIGHT - AXIS }));
    const label = svg("text", { x: Math.min(x(s), width - 28), y: HEIGHT - 6, "text-anchor": "middle" });
    label.textContent = tickLabel(s, step);
    root.append(label);
  }
}

function scale(values, floorAtZero) {
  const known = values.filter((value) => value !== null);
  let high = known.length ? Math.max(...known) : 1;
  let low = known.length && !floorAtZero ? Math.min(...known) : 0;
  if (low <= high * 0.8) low = 0;
  if (high === low) high = low + 1;
  return [low, high];
}

function label(root, className, xAt, yAt, text, anchor = "start") {
  const made = svg("text", { class: className, x: xAt, y: yAt, "text-anchor": anchor });
  made.textContent = text;
  root.append(made);
}

function curves(plot) {
  const { root, width, data } = plot;
  const [, top] = scale(data.rate, true);
  const high = top * 1.08;
  const yRate = (value) => MARKS + RATE - (value / high) * (RATE - 16);
  label(root, "name", LEFT, MARKS + 8, "Steps per second");
  for (const part of [0, 0.5, 1]) {
    const value = top * part;
    root.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: yRate(value), y2: yRate(value) }));
    label(root, "", LEFT - 6, yRate(value) + 4, rate(value), "end");
  }
  if (data.usual) {
    const y = yRate(Math.min(data.usual, high));
    root.append(svg("line", { class: "usual", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    label(root, "", width - RIGHT, MARKS + 8, `dotted: usual, ${rate(data.usual)}`, "end");
  }
  if (data.rate.some((value) => value !== null)) {
    curve(plot, data.rate, yRate, MARKS + RATE, "rate", false);
  } else {
    label(root, "", LEFT + 8, MARKS + RATE / 2, "No steps were logged in this span.");
  }
  const worldTop = MARKS + RATE + GAP;
  const [low, most] = scale(data.world, false);
  const yWorld = (value) => worldTop + WORLD - ((value - low) / (most - low)) * (WORLD - 6);
  label(root, "name", LEFT, worldTop - 6, `Workers in the world${low ? ` (axis from ${count(low)})` : ""}`);
  for (const value of [low, most]) {
    root.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: yWorld(value), y2: yWorld(value) }));
    label(root, "", LEFT - 6, yWorld(value) + 4, count(value), "end");
  }
  curve(plot, data.world, yWorld, worldTop + WORLD, "world", true);
}

function curve({ root, x, data }, values, y, base, name, stepped) {
  let line = "", area = "", begun = null;
  const end = (s) => { if (begun !== null) area += `L${x(s).toFixed(1)} ${base}L${begun.toFixed(1)} ${base}Z`; begun = null; };
  values.forEach((value, index) => {
    const from = data.series_from_s + index * data.bucket_s;
    const middle = stepped ? from : from + data.bucket_s / 2;
    if (value === null) { end(from); return; }
    const [xAt, yAt] = [x(Math.min(Math.max(middle, data.from_s), data.to_s)), y(value).toFixed(1)];
    const xText = xAt.toFixed(1);
    if (begun === null) { line += `M${xText} ${yAt}`; area += `M${xText} ${yAt}`; begun = xAt; }
    else { line += `L${xText} ${yAt}`; area += `L${xText} ${yAt}`; }
    if (stepped) {
      const right = x(Math.min(from + data.bucket_s, data.to_s)).toFixed(1);
      line += `L${right} ${yAt}`; area += `L${right} ${yAt}`;
    }
  });
  end(Math.min(data.series_from_s + values.length * data.bucket_s, data.to_s));
  root.append(svg("path", { class: `${name}-area`, d: area || "M0 0" }), svg("path", { class: `${name}-line`, d: line || "M0 0" }));
}

const endOf = (one, data) => one.to_s ?? (one.state === "open" ? data.ended_s ?? data.end_s : one.from_s);
const isSeen = (one, data) => one.from_s <= data.to_s && endOf(one, data) >= data.from_s;

function spans({ root, x, data }) {
  for (const one of data.incidents) {
    if (!isSeen(one, data)) continue;
    const tone = incidentLook(one)[1];
    const [from, to] = [Math.max(one.from_s, data.from_s), Math.min(endOf(one, data), data.to_s)];
    const [y, height] = [MARKS, RATE + GAP + WORLD];
    root.append(svg("rect", { class: `span-${tone}`, x: x(from), y, width: Math.max(0, x(to) - x(from)), height }));
    if (one.from_s >= data.from_s) {
      const chosen = one.id === data.chosen ? " chosen-line" : "";
      root.append(svg("line", { class: `line-${tone}${chosen}`, x1: x(one.from_s), x2: x(one.from_s), y1: MARKS - 6, y2: MARKS + height, opacity: chosen ? 1 : 0.55 }));
    }
  }
}

function saves({ root, x, data }) {
  const y = MARKS + RATE + GAP + WORLD + 7;
  let last = -10;
  for (const [atS, step, failed] of data.saves) {
    if (atS < data.from_s || atS > data.to_s || (x(atS) - last < 6 && !failed)) continue;
    last = x(atS);
    const made = svg("path", { class: failed ? "failed-save" : "saved", d: SHAPES[failed ? "cross" : "triangle"], transform: `translate(${last - 4.2} ${y}) scale(.6)` });
    const title = svg("title");
    title.textContent = `${failed ? "save failed" : "checkpoint saved"}: step ${count(step)}, ${clock(atS)}`;
    made.append(title);
    root.append(made);
  }
}

function grouped({ x, data }) {
  const groups = [];
  for (const one of data.incidents) {
    if (one.from_s < data.from_s || one.from_s > data.to_s) continue;
    const at = x(one.from_s), last = groups.at(-1);
    if (last && at - last.at < MARK_WIDTH) last.all.push(one);
    else groups.push({ at, all: [one] });
  }
  return groups;
}

function incidentMarks(plot) {
  const { root, data } = plot;
  for (const { at, all } of grouped(plot)) {
    const chosen = all.some((one) => one.id === data.chosen);
    const worst = all.reduce((a, b) => (ORDER.indexOf(incidentLook(b)[1]) > ORDER.indexOf(incidentLook(a)[1]) ? b : a));
    const [shape, tone] = incidentLook(worst);
    const words = all.length === 1 ? `${worst.title}, ${clock(worst.from_s)}` : `${all.length} incidents from ${clock(all[0].from_s)}`;
    const group = svg("g", { class: `incident-mark t-${tone}${chosen ? " chosen" : ""}`, transform: `translate(${at} 15)`, tabindex: 0, role: "button", "aria-label": words, "data-first": all[0].id });
    const title = svg("title");
    title.textContent = words;
    group.append(title, svg("circle", { r: 12 }));
    if (all.length === 1) group.append(svg("path", { d: SHAPES[shape], transform: "translate(-7 -7)", "fill-rule": "evenodd" }));
    else { const text = svg("text", { y: 4 }); text.textContent = all.length > 99 ? "99+" : all.length; group.append(text); }
    const open = () => data.choose(all);
    group.addEventListener("click", open);
    group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } });
    root.append(group);
  }
}

function pointer({ root, width, x, data }, box) {
  const cursor = svg("line", { class: "cursor", y1: MARKS, y2: HEIGHT - AXIS, visibility: "hidden" });
  const zoom = svg("rect", { class: "zoom-box", y: MARKS, height: RATE + GAP + WORLD, visibility: "hidden" });
  root.append(zoom, cursor);
  const timeAt = (px) => data.from_s + ((px - LEFT) / (width - LEFT - RIGHT)) * (data.to_s - data.from_s);
  const within = (event) => Math.min(width - RIGHT, Math.max(LEFT, (event.clientX - root.getBoundingClientRect().left) * (width / root.getBoundingClientRect().width)));
  const readAt = (s) => {
    const index = Math.floor((s - data.series_from_s) / data.bucket_s);
    cursor.setAttribute("x1", x(s)); cursor.setAttribute("x2", x(s)); cursor.setAttribute("visibility", "visible");
    data.read(s, data.rate[index] ?? null, data.world[index] ?? null);
  };
  let from = null;
  root.addEventListener("pointerdown", (event) => {
    if (event.target.closest(".incident-mark") || event.button !== 0) return;
    from = within(event); box.dataset.dragging = "yes"; root.setPointerCapture(event.pointerId);
  });
  root.addEventListener("pointermove", (event) => {
    const at = within(event);
    readAt(timeAt(at));
    if (from === null) return;
    zoom.setAttribute("visibility", "visible");
    zoom.setAttribute("x", Math.min(from, at)); zoom.setAttribute("width", Math.abs(at - from));
  });
  const stop = (event) => {
    delete box.dataset.dragging;
    if (from === null) return;
    const [a, b] = [from, within(event)].sort((one, other) => one - other);
    from = null; zoom.setAttribute("visibility", "hidden");
    if (event.type === "pointerup" && b - a > 8) data.zoom(timeAt(a), timeAt(b));
  };
  root.addEventListener("pointerup", stop);
  root.addEventListener("pointercancel", stop);
  root.addEventListener("pointerleave", () => { if (from === null) { cursor.setAttribute("visibility", "hidden"); data.read(null); } });
  let read = data.to_s;
  root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.target !== root) return;
    event.preventDefault();
    read = Math.min(data.to_s, Math.max(data.from_s, read + step * data.bucket_s * (event.shiftKey ? 20 : 4)));
    readAt(read);
  });
}

const CHART_HIGH = 96, CHART_TOP = 10, CHART_BASE = 80;

// One small chart for each logged name, over committed steps; what is not finite is a gap.
export function drawScalars(box, curves, read) {
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.name : null;
  box.replaceChildren(...curves.map(() => element("figure")));
  curves.forEach((one, index) => scalarChart(box.children[index], one, read));
  if (focused !== null) box.querySelector(`[data-name="${CSS.escape(focused)}"]`)?.focus();
}

function scalarChart(figure, { name, steps, values }, read) {
  const width = Math.max(180, figure.clientWidth), known = values.filter((value) => value !== null);
  const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 0];
  const [first, last] = [steps[0], steps.at(-1)];
  const x = (step) => SCALAR_LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (width - SCALAR_LEFT - RIGHT);
  const y = (value) => CHART_BASE - (high > low ? (value - low) / (high - low) : 0.5) * (CHART_BASE - CHART_TOP);
  const newest = values.at(-1);
  figure.append(element("figcaption", {}, element("b", { text: name }), element("span", { text: newest === null ? "not finite" : scalar(newest) })));
  const root = svg("svg", { viewBox: `0 0 ${width} ${CHART_HIGH}`, height: CHART_HIGH, role: "img", tabindex: 0, "data-name": name, "aria-label": `${name}: ${newest === null ? "not finite" : scalar(newest)} at step ${count(last)}, between ${scalar(low)} and ${scalar(high)}. Arrow keys read out.` });
  for (const value of high > low ? [low, high] : [low]) {
    root.append(svg("line", { class: "grid", x1: SCALAR_LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    label(root, "", SCALAR_LEFT - 6, y(value) + 4, scalar(value), "end");
  }
  label(root, "", SCALAR_LEFT, CHART_HIGH - 3, count(first));
  if (last > first) label(root, "", width - RIGHT, CHART_HIGH - 3, count(last), "end");
  let line = "", isOpen = false;
  values.forEach((value, index) => {
    if (value !== null) line += `${isOpen ? "L" : "M"}${x(steps[index]).toFixed(1)} ${y(value).toFixed(1)}`;
    isOpen = value !== null;
  });
  root.append(svg("path", { class: "rate-line", d: line || "M0 0" }));
  if (known.length === 1) root.append(svg("circle", { class: "point", cx: x(steps[values.indexOf(known[0])]), cy: y(known[0]), r: 3 }));
  figure.append(root);
  readScalar(root, { name, steps, values }, { width, x }, read);
}

function readScalar(root, { name, steps, values }, { width, x }, read) {
  const cursor = svg("line", { class: "cursor", y1: CHART_TOP, y2: CHART_BASE, visibility: "hidden" });
  root.append(cursor);
  let at = steps.length - 1;
  const show = () => {
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(steps[at]));
    cursor.setAttribute("visibility", "visible");
    read(`${name} ${values[at] === null ? "not finite" : scalar(values[at])} at step ${count(steps[at])}`);
  };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect(), px = ((event.clientX - box.left) * width) / box.width;
    at = steps.reduce((best, step, index) => (Math.abs(x(step) - px) < Math.abs(x(steps[best]) - px) ? index : best), 0);
    show();
  });
  const hide = () => { cursor.setAttribute("visibility", "hidden"); read(null); };
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    at = Math.min(steps.length - 1, Math.max(0, at + step * (event.shiftKey ? 20 : 1)));
    show();
  });
}

// A worker's own part of a step as a multiple of the median: these and more are colours of their own.
const HEAT_EDGES = [1.1, 1.2, 1.5, 2];
const SLOW = 1.2;
const heatColour = (ratio) => (ratio === null ? "transparent" : `var(--h${HEAT_EDGES.filter((edge) => ratio >= edge).length})`);

export function heatKey() {
  return ["usual", ...HEAT_EDGES.map((edge) => `${edge}× and more`)].map((text, level) => {
    const swatch = element("i", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = `var(--h${level})`;
    return element("span", {}, swatch, text);
  });
}

function workerName({ node, local_rank: local, rank: place }) {
  if (!node) return `rank ${place}`;
  return local === undefined ? `${node}, rank ${place}` : `${node} · ${local}`;
}

// One strip for each worker, over the same span of time as the timeline.
export function drawHeat(box, { heat, from_s: from, to_s: to, read, open }) {
  const held = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const top = box.querySelector(".heat")?.scrollTop ?? 0;
  const part = (s) => Math.min(100, Math.max(0, (100 * (s - from)) / (to - from))).toFixed(2);
  const tell = (row, cell) => {
    const ratio = row.ratios[cell] ?? null, at = heat.from_s + (cell + 0.5) * heat.cell_s;
    read(`${workerName(row)}: ${ratio === null ? "nothing known" : `${ratio.toFixed(2)}× the median`} at ${clock(at)}`);
  };
  const rows = heat.rows.map((row) => {
    const strip = element("div", { class: "strip" }), newest = row.ratios.findLast((ratio) => ratio !== null) ?? null;
    const stops = row.ratios.map((ratio, cell) => `${heatColour(ratio)} ${part(heat.from_s + cell * heat.cell_s)}% ${part(heat.from_s + (cell + 1) * heat.cell_s)}%`);
    strip.style.background = `linear-gradient(90deg, ${stops.join(", ")}, transparent ${part(heat.from_s + row.ratios.length * heat.cell_s)}%)`;
    strip.addEventListener("pointermove", (event) => tell(row, Math.floor((from + (event.offsetX / strip.clientWidth) * (to - from) - heat.from_s) / heat.cell_s)));
    strip.addEventListener("pointerleave", () => read(null));
    const name = row.local_rank === undefined ? element("span", { text: workerName(row) })
      : element("button", { type: "button", "data-key": `heat/${workerName(row)}`, title: "Show its output", click: () => open({ node: row.node, local_rank: row.local_rank }) }, workerName(row));
    const isSlow = newest !== null && newest >= SLOW;
    return element("div", { class: "heat-row" }, name, strip, element("span", { class: isSlow ? "t-warn" : "quiet" }, isSlow ? mark("triangle", "warn", "slow") : null, newest === null ? "–" : ` ${newest.toFixed(2)}×`));
  });
  const slow = heat.rows.filter((row) => (row.ratios.findLast((ratio) => ratio !== null) ?? 0) >= SLOW);
  const grid = element("div", { class: "heat scroll", tabindex: 0, role: "group", "data-key": "heat", "aria-label": `Own parts of steps of ${rows.length} workers over time${slow.length ? `; slow now: ${slow.map(workerName).join(", ")}` : ""}. Arrow keys read out.` }, ...rows);
  grid.addEventListener("keydown", (event) => heatKeys(event, { grid, heat, rows, tell }));
  box.replaceChildren(grid);
  grid.scrollTop = top;
  if (held) box.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

function heatKeys(event, { grid, heat, rows, tell }) {
  const [down, right] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [];
  if (down === undefined || event.target !== grid) return;
  event.preventDefault();
  const bounded = (value, length) => Math.min(length - 1, Math.max(0, value));
  const cells = heat.rows[0].ratios.length;
  const row = bounded(Number(grid.dataset.row ?? 0) + down, rows.length);
  const cell = bounded(Number(grid.dataset.cell ?? cells - 1) + right, cells);
  Object.assign(grid.dataset, { row, cell });
  rows.forEach((each, at) => each.classList.toggle("read", at === row));
  rows[row].scrollIntoView({ block: "nearest" });
  tell(heat.rows[row], cell);
}

// A map of many nodes: one square each, in the order of node rank; what is not well has a shape.
export function drawMap(canvas, nodes, looks) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || 600;
  const cell = Math.max(8, Math.min(16, Math.floor(Math.sqrt((width * 190) / nodes.length))));
  const columns = Math.max(1, Math.floor(width / cell)), rows = Math.ceil(nodes.length / columns);
  canvas.width = width * ratio; canvas.height = rows * cell * ratio; canvas.style.height = `${rows * cell}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`);
  const fills = { use: colour("use-soft"), over: colour("over"), warn: colour("warn-mark"), lost: colour("lost"), plan: colour("plan") };
  nodes.forEach((node, index) => {
    const [shape, tone] = looks(node.state);
    const [left, top] = [(index % columns) * cell, Math.floor(index / columns) * cell];
    pen.fillStyle = fills[tone];
    pen.fillRect(left, top, cell - 1.5, cell - 1.5);
    if (tone === "use") return;
    pen.save();
    pen.translate(left + 1, top + 1); pen.scale((cell - 3.5) / 14, (cell - 3.5) / 14);
    pen.fillStyle = colour("panel");
    pen.fill(new Path2D(SHAPES[shape]), "evenodd");
    pen.restore();
  });
  return (event) => {
    const box = canvas.getBoundingClientRect();
    const [column, row] = [Math.floor((event.clientX - box.left) / cell), Math.floor((event.clientY - box.top) / cell)];
    return column < columns ? nodes[row * columns + column] : undefined;
  };
}
