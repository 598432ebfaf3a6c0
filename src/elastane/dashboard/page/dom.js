// Elements, shapes and the words for numbers. Text from a job is only ever set as text.

export function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "text") made.textContent = value;
    else if (key === "click") made.addEventListener("click", value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

// Shapes in a square of 14; each meaning has one, since colour is never alone.
export const SHAPES = {
  circle: "M7 2.2a4.8 4.8 0 1 1 0 9.6a4.8 4.8 0 0 1 0-9.6z",
  ring: "M7 2a5 5 0 1 1 0 10a5 5 0 0 1 0-10zm0 2a3 3 0 1 0 0 6a3 3 0 0 0 0-6z",
  half: "M7 2a5 5 0 1 1 0 10a5 5 0 0 1 0-10zm0 1.6v6.8a3.4 3.4 0 0 0 0-6.8z",
  square: "M2.5 2.5h9v9h-9zm1.8 1.8v5.4h5.4V4.3z",
  cross: "M2 3.6L3.6 2L7 5.4L10.4 2L12 3.6L8.6 7L12 10.4L10.4 12L7 8.6L3.6 12L2 10.4L5.4 7z",
  triangle: "M7 1.6L13 12.4H1z",
  change: "M6 2h2v4h4v2H8v4H6V8H2V6h4z",
  bars: "M3 2h3v10H3zM8 2h3v10H8z",
  server: "M2 2h10v4H2zM2 8h10v4H2zM9 3.2v1.6h1.6V3.2zM9 9.2v1.6h1.6V9.2z",
  check: "M2 7.4L3.6 5.8L6 8.2L10.8 3.2L12.4 4.8L6 11.2z",
  arrow: "M3 1.8L12 7L3 12.2z",
};

export function mark(shape, tone, label) {
  const made = svg("svg", { class: `mark t-${tone}`, viewBox: "0 0 14 14", role: "img" });
  if (label) made.setAttribute("aria-label", label);
  else made.setAttribute("aria-hidden", "true");
  made.append(svg("path", { d: SHAPES[shape], "fill-rule": "evenodd" }));
  return made;
}

// State of a node, worker or job: its shape and its tone.
export const STATES = {
  training: ["circle", "use"], reading: ["half", "over"], done: ["check", "use"], starting: ["half", "over"],
  waiting: ["ring", "over"], draining: ["change", "plan"], stopping: ["square", "over"],
  stopped: ["square", "over"], leaving: ["change", "plan"], left: ["change", "plan"],
  recovering: ["triangle", "warn"], away: ["triangle", "warn"], silent: ["ring", "warn"],
  stalled: ["bars", "lost"], awaited: ["bars", "lost"],
  gone: ["cross", "lost"], failed: ["cross", "lost"],
};
export const stateMark = (state, label) => mark(...(STATES[state] ?? ["ring", "over"]), label);

// Kind of an incident: its shape and its tone.
export function incidentLook(one) {
  if (one.kind === "change") return ["change", "plan"];
  if (one.kind === "difference" || one.kind === "authority") return ["triangle", "warn"];
  if (one.kind === "stall") return ["bars", "lost"];
  return [one.kind === "node" ? "server" : "cross", "lost"];
}

const number = new Intl.NumberFormat("en-US");
export const count = (value) => (value === null || value === undefined ? "–" : number.format(value));
export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// A logged value in at most nine characters.
export function scalar(value) {
  const size = Math.abs(value);
  if (size && (size >= 1e5 || size < 1e-3)) return value.toExponential(1).replace("+", "");
  return String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, seconds);
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s % 60 >= 1 ? ` ${Math.floor(s % 60)} s` : ""}`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes, unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value < 100 ? value.toPrecision(3) : Math.round(value)} ${units[unit]}`;
}

const two = (value) => String(value).padStart(2, "0");
export function clock(seconds, withDay = false) {
  const at = new Date(seconds * 1000);
  if (Number.isNaN(at.getTime())) return "–";
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return withDay ? `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}` : time;
}

export function tickLabel(seconds, stepSeconds) {
  const at = new Date(seconds * 1000);
  if (stepSeconds >= 86400) return at.toLocaleDateString("en-US", { weekday: "short", day: "numeric" });
  if (stepSeconds >= 21600) return `${at.toLocaleDateString("en-US", { weekday: "short" })} ${two(at.getHours())}:00`;
  return stepSeconds < 60 ? clock(seconds) : clock(seconds).slice(0, 5);
}
