// The page of a job: gets its sections over a stream, keeps what is chosen in the address, and draws.

import { drawHeat, drawScalars, drawTimeline, heatKey } from "/charts.js";
import { byId, clock, count, duration, element, rate } from "/dom.js";
import { drawAccount, drawAnswers, drawCheckpoints, drawEvents, drawIncident, drawNodes } from "/panels.js";

const LATE_MS = 5000, HEAT_MS = 10000;
const GROUPS = [["", "All"], ["trouble", "Trouble"], ["world", "World"], ["saved", "Saved"], ["incident", "This incident"]];
const KEYS = [["j  k", "later, earlier incident"], ["Esc", "close the output, else the whole time"], ["l", "output of the incident's worker"], ["/", "search events"], ["1 – 9", "go to a panel"], ["t", "light or dark"], ["?", "these keys"]];
const PANELS = ["answers", "nodes", "timeline", "incident", "heat", "scalars", "account", "checkpoints", "events"];

const asked = new URLSearchParams(location.search);
const page = {
  sections: null, now_s: 0, job: asked.get("job") ?? "", chosen: Number(asked.get("incident")) || 0, follows: !asked.get("incident"),
  range: asked.get("from") && asked.get("to") ? [Number(asked.get("from")), Number(asked.get("to"))] : null,
  wanted: { group: asked.get("group") ?? "", text: asked.get("text") ?? "", incident: 0, node: "" }, before: null,
  run: 0, details: null, zoomed: null, heat: null, choose, openLog, showEvents, zoomTo, olderEvents,
  end_s: () => { const { series } = page.sections; return series.from_s + series.bucket_s * series.rate.length; },
};
let source = null, heardMs = 0, isLate = false, drawnEvents = "";

async function get(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(`${found.error ?? answer.status}${found.next ? ` – ${found.next}` : ""}`);
  return found;
}

const api = (rest) => `/api/jobs/${encodeURIComponent(page.job)}${rest}`;
const latest = {};
// Draws the answer of the newest request of its kind only; a failed one is tried again later.
async function ask(kind, path, use) {
  const mine = (latest[kind] = Symbol(kind));
  try {
    const found = await get(path);
    if (latest[kind] === mine) use(found);
  } catch (error) {
    if (latest[kind] === mine) console.warn(`${kind}: ${error.message}`);
  }
}

async function begin() {
  theme(localStorage.getItem("elastane-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  byId("groups").append(...GROUPS.map(([name, text]) => element("button", { type: "button", "data-group": name, click: () => showEvents(name === "incident" ? { incident: page.chosen } : { group: name }) }, text)));
  byId("heat-key").append(...heatKey());
  byId("search").value = page.wanted.text;
  bind();
  await listJobs();
  if (!page.job) { byId("connection").textContent = "no job yet: start one with elastane run"; setTimeout(() => location.reload(), 5000); return; }
  connect();
  setInterval(watch, 1000);
  setInterval(listJobs, 15000);
}

async function listJobs() {
  await ask("jobs", "/api/jobs", ({ chosen, jobs }) => {
    page.job ||= chosen || jobs[0]?.key || "";
    const options = jobs.map((job) => element("option", { value: job.key, selected: job.key === page.job }, `${job.name}${job.is_running ? " ●" : ""}`));
    if (page.job && !jobs.some((job) => job.key === page.job)) options.unshift(element("option", { value: page.job, selected: true }, page.job));
    if (document.activeElement !== byId("jobs")) byId("jobs").replaceChildren(...options);
  });
}

function connect() {
  source = new EventSource(api("/stream"));
  source.onmessage = (message) => {
    const changed = JSON.parse(message.data);
    heardMs = performance.now();
    page.now_s = changed.now_s;
    page.sections = { ...page.sections, ...changed };
    if (page.sections.job) draw(new Set(Object.keys(changed)));
    watch();
  };
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000); watch(); };
}

function watch() {
  const job = page.sections?.job, pill = byId("connection"), silentMs = performance.now() - heardMs;
  isLate = silentMs > LATE_MS;
  document.body.classList.toggle("stale", isLate && Boolean(job) && job.ended_s === null);
  pill.classList.toggle("late", isLate);
  if (isLate) pill.textContent = heardMs ? `no answer for ${duration(silentMs / 1000)}; as of ${clock(page.now_s)}` : "connecting";
  else if (!job?.is_read) pill.textContent = "reading the log …";
  else pill.textContent = job.ended_s !== null || job.state === "silent" ? "from its folder of logs" : job.is_live ? "● live" : "● live, from the log";
}

function draw(changed) {
  const { job, incidents } = page.sections;
  if (page.run && page.run !== job.run) forgetRun();
  page.run = job.run;
  document.title = `${{ failed: "✕ failed", done: "✓ done", stopped: "■ stopped" }[job.state] ?? `● ${count(job.step)}`} · ${job.name}`;
  const round = job.round === null ? "" : ` · round ${job.round}.${job.attempt}`;
  byId("about").textContent = `since ${job.started_s === null ? "–" : clock(job.started_s, true)}${round}${job.run > 1 ? ` · run ${job.run} of this name` : ""}`;
  if (page.follows && incidents.length) page.chosen = worstOf(incidents);
  if (!isPressed("answers")) drawAnswers(page);
  if (["nodes", "job", "step_times"].some((name) => changed.has(name)) && !isPressed("nodes")) drawNodes(page);
  timeline();
  if (!page.heat || performance.now() - page.heat.askedMs > HEAT_MS) askHeat();
  if (changed.has("incidents") || changed.has("not_here") || page.details?.id !== page.chosen) details();
  if (changed.has("scalars")) scalars();
  if ((changed.has("account") || changed.has("not_here")) && !isPressed("account")) drawAccount(page);
  drawCheckpoints(page);
  const key = JSON.stringify([job.events, page.wanted, page.before, page.chosen, job.run]);
  if (key !== drawnEvents) { drawnEvents = key; events(); }
}

// Another run has its own incidents and times, so nothing that was chosen of the last one is left.
function forgetRun() {
  Object.assign(page, { chosen: 0, follows: true, range: null, zoomed: null, heat: null, details: null, before: null });
  page.wanted.incident = 0;
  remember();
}

// A button that is replaced between press and release gets no click; the next message draws it.
const isPressed = (id) => byId(id).matches(":active");

const worstOf = (all) => (all.findLast((one) => one.state !== "recovered") ?? all.findLast((one) => one.kind !== "change") ?? all.at(-1)).id;

function timeline() {
  if (byId("chart").dataset.dragging) return;
  const { series, incidents, checkpoints, rate: rates } = page.sections;
  const end = page.end_s();
  const whole = [series.from_s, end];
  const [from, to] = span();
  const curves = page.range ? page.zoomed ?? series : series;
  zoomButtons(whole);
  drawTimeline(byId("chart"), {
    from_s: from, to_s: to, end_s: end, ended_s: page.sections.job.ended_s, series_from_s: curves.from_s, bucket_s: curves.bucket_s, rate: curves.rate, world: curves.world,
    usual: rates.usual, incidents, saves: checkpoints.marks, chosen: page.chosen,
    choose: (all) => { if (all.length > 1 && to - from > 2) zoom(Math.max(whole[0], all[0].from_s - (to - from) / 40), all.at(-1).from_s + (to - from) / 40); choose(all.at(-1).id); },
    zoom, read: readout,
  });
  if (page.range && (!page.zoomed || (to >= end - 5 && performance.now() - page.zoomedMs > 2000))) askZoomed();
}

function span() {
  const { series } = page.sections;
  return page.range ?? [series.from_s, page.end_s()];
}

function askHeat() {
  const [from, to] = span(), askedMs = performance.now();
  page.heat = { rows: [], ...page.heat, askedMs };
  ask("heat", api(`/heat?from=${from.toFixed(3)}&to=${to.toFixed(3)}`), (found) => { page.heat = { ...found, askedMs, span: [from, to] }; heat(); });
}

function heat() {
  const found = page.heat;
  byId("heat").hidden = !found?.rows.length;
  if (byId("heat").hidden) return;
  const usual = `own part of a step, beside the median${found.is_whole ? "" : `; the ${found.rows.length} slowest`}`;
  const read = (text) => { byId("heat-note").textContent = text ?? usual; };
  if (!byId("heat-body").contains(document.activeElement)) read(null);
  drawHeat(byId("heat-body"), { heat: found, from_s: found.span[0], to_s: found.span[1], read, open: openLog });
}

function scalars() {
  const { scalars: curves, job } = page.sections;
  byId("scalars").hidden = !curves.length;
  const usual = `by committed steps, up to step ${count(Math.max(job.step, ...curves.map((one) => one.steps.at(-1) ?? 0)))}`;
  byId("scalars-note").textContent = usual;
  drawScalars(byId("scalars-body"), curves, (text) => { byId("scalars-note").textContent = text ?? usual; });
}

function askZoomed() {
  page.zoomedMs = performance.now();
  const [from, to] = page.range;
  ask("series", api(`/series?from=${from.toFixed(3)}&to=${to.toFixed(3)}`), (found) => { const first = !page.zoomed; page.zoomed = found; if (first) timeline(); });
}

function readout(at, steps, world) {
  byId("readout").textContent = at === undefined || at === null ? "Drag to zoom" : `${clock(at)} · ${rate(steps)} steps/s · ${count(world)} workers`;
}

function zoomButtons(whole) {
  const span = whole[1] - whole[0];
  const choices = [["All", null], ["1 day", 86400], ["1 h", 3600], ["15 min", 900], ["5 min", 300], ["1 min", 60]].filter(([, seconds]) => seconds === null || seconds < span * 0.8).slice(0, 4);
  const now = page.range ? page.range[1] - page.range[0] : null;
  const key = JSON.stringify([choices, now]);
  if (byId("zooms").dataset.key === key) return;
  byId("zooms").dataset.key = key;
  byId("zooms").replaceChildren(...choices.map(([text, seconds]) => element("button", { type: "button", "aria-pressed": String(now === seconds || (now !== null && seconds !== null && Math.abs(now - seconds) < 0.01)), click: () => (seconds === null ? zoom(null) : zoom(page.end_s() - seconds, page.end_s())) }, text)));
}

function zoom(from, to) {
  page.range = from === null ? null : [from, Math.max(to, from + 1)];
  page.zoomed = null;
  remember();
  timeline();
  askHeat();
}

function zoomTo(one) {
  const length = Math.max(20, 6 * ((one.to_s ?? page.end_s()) - one.from_s));
  zoom(one.from_s - length / 2, one.from_s + length);
  byId("timeline").scrollIntoView({ block: "nearest" });
}

function choose(id) {
  page.chosen = id; page.follows = false;
  if (page.wanted.incident) page.wanted.incident = id;
  remember(); details(); timeline();
  drawnEvents = ""; events();
}

function details() {
  const id = page.chosen;
  if (page.details?.id !== id) drawIncident(page, null);
  if (!id) return;
  ask("incident", api(`/incidents/${id}`), (found) => { page.details = found; drawIncident(page, found); });
}

function beside(offset) {
  const { incidents } = page.sections, place = incidents.findIndex((one) => one.id === page.chosen) + offset;
  if (incidents[place]) choose(incidents[place].id);
}

function showEvents(wanted) {
  page.wanted = { group: "", incident: 0, node: "", text: page.wanted.text, ...wanted };
  page.before = null; drawnEvents = "";
  remember(); events();
  if (wanted.incident) byId("events").scrollIntoView({ block: "nearest" });
}

function olderEvents(before) { page.before = before; events(); }

function events() {
  const { group, text, incident, node } = page.wanted;
  for (const button of byId("groups").children) button.setAttribute("aria-pressed", String(button.dataset.group === (incident ? "incident" : group)));
  const query = new URLSearchParams({ group, text, node, ...(incident ? { incident } : {}), ...(page.before ? { before: page.before } : {}) });
  ask("events", api(`/events?${query}`), (found) => drawEvents(page, found, page.wanted));
}

function remember() {
  const kept = new URLSearchParams({ job: page.job });
  if (page.chosen && !page.follows) kept.set("incident", page.chosen);
  if (page.range) { kept.set("from", page.range[0].toFixed(1)); kept.set("to", page.range[1].toFixed(1)); }
  if (page.wanted.group) kept.set("group", page.wanted.group);
  if (page.wanted.text) kept.set("text", page.wanted.text);
  history.replaceState(null, "", `/?${kept}`);
}

let beforeDrawer = null;
function openLog(worker) {
  const drawer = byId("drawer");
  if (drawer.hidden) beforeDrawer = document.activeElement?.dataset?.key ?? "";
  const text = element("pre", { tabindex: 0, "aria-label": "Output" }), note = element("span", { class: "quiet" });
  const reload = (std) => {
    const query = new URLSearchParams({ ...Object.fromEntries(Object.entries(worker).filter(([, value]) => value !== null && value !== undefined)), std });
    for (const button of tabs.children) button.setAttribute("aria-pressed", String(button.dataset.std === std));
    note.textContent = "reading …";
    get(api(`/log?${query}`)).then(
      (found) => { text.textContent = found.text || "Nothing was written."; note.textContent = `${found.path}${found.is_cut ? ", its end" : ""}`; text.scrollTop = text.scrollHeight; },
      (error) => { text.textContent = error.message; note.textContent = ""; });
  };
  const tabs = element("span", { class: "choices" }, ...["stderr", "stdout"].map((std) => element("button", { type: "button", "data-std": std, click: () => reload(std) }, std)));
  const close = element("button", { type: "button", "aria-label": "Close (Esc)", click: closeLog }, "✕");
  drawer.replaceChildren(element("header", {}, element("h2", { text: `Output of local rank ${worker.local_rank} on ${worker.node}` }), element("span", { class: "space" }), tabs, close), note, text);
  drawer.hidden = false;
  close.focus();
  reload("stderr");
}

function closeLog() {
  byId("drawer").hidden = true;
  if (beforeDrawer) document.querySelector(`[data-key="${CSS.escape(beforeDrawer)}"]`)?.focus();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  if (page.sections) { drawNodes(page); timeline(); scalars(); }
}

function bind() {
  byId("jobs").addEventListener("change", () => { location.search = new URLSearchParams({ job: byId("jobs").value }); });
  byId("theme").addEventListener("click", () => { const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; localStorage.setItem("elastane-theme", name); theme(name); });
  byId("help").addEventListener("click", help);
  byId("earlier").addEventListener("click", () => beside(-1));
  byId("later").addEventListener("click", () => beside(1));
  let typing = 0;
  byId("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => showEvents({ ...page.wanted, text: byId("search").value }), 250); });
  addEventListener("resize", () => { if (page.sections) { drawNodes(page); timeline(); scalars(); } });
  addEventListener("keydown", key);
}

function help() {
  const keys = byId("keys");
  keys.replaceChildren(element("h2", { text: "Keys" }), element("dl", {}, ...KEYS.flatMap(([name, what]) => [element("dt", {}, element("code", { text: name })), element("dd", { text: what })])), element("button", { type: "button", click: () => keys.close() }, "Close"));
  keys.showModal();
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !page.sections) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
  const panel = PANELS[Number(event.key) - 1];
  if (panel) { byId(panel).scrollIntoView({ block: "start" }); byId(panel).focus({ preventScroll: true }); }
  const actions = {
    j: () => beside(1), k: () => beside(-1), t: () => byId("theme").click(), "?": help,
    "/": () => { event.preventDefault(); byId("search").focus(); },
    l: () => { const one = page.details; if (one?.node && one.local_rank !== null) openLog({ node: one.node, local_rank: one.local_rank, round: one.round, rank: one.rank }); },
    Escape: () => { if (!byId("drawer").hidden) closeLog(); else if (page.range) zoom(null); },
  };
  actions[event.key]?.();
}

begin();
