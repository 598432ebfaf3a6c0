// The panels: each draws one part of the page from the sections of the job.

import { drawMap } from "/charts.js";
import { STATES, byId, clock, count, duration, element, incidentLook, mark, plural, rate, size, stateMark } from "/dom.js";

const WORDS = {
  reading: "Reading",
  starting: "Starting", training: "Training", stalled: "Stalled", recovering: "Recovering", waiting: "Waiting",
  done: "Done", failed: "Failed", stopped: "Stopped", silent: "No word",
};

function fill(id, ...children) {
  byId(id).querySelector(".body").replaceChildren(...children.filter(Boolean));
}

const heading = (id, text) => { byId(id).querySelector("h2").textContent = text; };

export function drawAnswers(page) {
  const { job, rate: rates, needs, incidents, not_here } = page.sections;
  const over = job.ended_s !== null;
  drawState(job, page.now_s, not_here);
  drawRate(job, rates, over, not_here);
  drawInterruptions(job, incidents, page);
  heading("answer-needs", over ? "What to do" : "What needs you?");
  fill("answer-needs", ...(needs.length ? needs.map((need) => needRow(need, page)) : [element("p", { class: "big" }, mark("check", "use"), not_here ? "Nothing in this log" : "Nothing")]));
}

function drawState(job, nowS, not_here) {
  byId("answer-state").classList.toggle("bad", ["failed", "stalled"].includes(job.state));
  const workers = job.world_size ? `${count(job.world_size)} of ${plural(job.world_full, "worker")}` : not_here ? "its world is not known here" : "no world yet";
  const since = job.started_s === null ? "" : duration((job.ended_s ?? nowS) - job.started_s);
  fill(
    "answer-state",
    element("p", { class: "big" }, stateMark(job.state), WORDS[job.state] ?? job.state, element("small", { text: job.ended_s ? `after ${since}` : workers })),
    job.has_steps ? element("p", {}, "Step ", element("b", { text: count(job.step) })) : null,
    job.state === "silent" ? element("p", { text: "The log has no end, and no agent of this job runs on this machine." }) : null,
    element("p", { class: "quiet", text: job.state === "training" ? `for ${since}` : job.reason.slice(0, 240) }),
  );
}

function drawRate(job, rates, over, not_here) {
  heading("answer-rate", over ? "How fast was it?" : "How fast?");
  const shown = over ? rates.usual : rates.now;
  const below = !over && rates.now !== null && rates.usual && rates.now < 0.85 * rates.usual ? Math.round(100 * (1 - rates.now / rates.usual)) : 0;
  const usual = rates.usual === null ? null : over ? "the usual rate" : `usual ${rate(rates.usual)}`;
  fill(
    "answer-rate",
    element("p", { class: "big" }, rate(shown), element("small", { text: "steps/s" })),
    below ? element("p", { class: "t-warn" }, mark("triangle", "warn"), element("b", { text: ` ${below}% below ` }), usual) : usual ? element("p", { class: "quiet", text: usual }) : null,
    job.has_steps ? null : element("p", { class: "quiet", text: not_here ? "The count of steps is not known here." : rates.usual === null ? "The script reports no steps." : "As its workers measure them: the script reports no steps." }),
  );
}

function drawInterruptions(job, incidents, page) {
  const faults = incidents.filter((one) => one.kind !== "change");
  const lost = faults.filter((one) => one.kind !== "authority" && one.kind !== "difference");
  const stood = lost.reduce((sum, one) => sum + Math.max(0, (one.trained_s ?? one.to_s ?? (one.state === "open" ? job.ended_s ?? page.now_s : one.from_s)) - one.from_s), 0);
  const kinds = [["worker", "worker"], ["node", "node"], ["stall", "stall"]]
    .map(([kind, word]) => [incidents.filter((one) => one.kind === kind).length, word])
    .filter(([number]) => number)
    .map(([number, word]) => (word === "stall" ? plural(number, "stall") : `${plural(number, word)} lost`));
  const changes = incidents.length - faults.length, beside = faults.length - lost.length;
  const { account, not_here } = page.sections;
  const allowed = job.restarts_allowed === null ? "" : ` of ${count(job.restarts_allowed)}`;
  fill(
    "answer-lost",
    element("p", { class: "big" }, lost.length ? count(lost.length) : not_here ? "Not known" : "Nothing", lost.length ? element("small", { text: `${lost.length === 1 ? "incident" : "incidents"}, ${duration(stood)} ${lost.some((one) => one.state === "open") && job.ended_s === null ? "so far" : lost.some((one) => one.state !== "recovered") ? "in all" : lost.some((one) => one.trained_s) ? "until training went on" : "until workers ran again"}` }) : null),
    account?.causes.length ? element("p", {}, "Goodput ", element("b", { text: share(account.goodput) }), kinds.length ? ` · ${kinds.join(" · ")}` : "") : null,
    beside ? element("p", { class: "quiet", text: `${plural(beside, "more incident")} stopped no worker` }) : null,
    not_here ? element("p", { class: "quiet", text: `${not_here[0].toUpperCase()}${not_here.slice(1)}.` }) : null,
    not_here && !job.is_live ? null : element("p", { class: "quiet", text: `${count(job.restarts_used)}${allowed} restarts of the budget used${changes ? ` · ${plural(changes, "planned change")}` : ""}` }),
  );
}

const NEED_LOOKS = { act: ["cross", "lost"], watch: ["triangle", "warn"], next: ["arrow", "use"] };
function needRow(need, page) {
  const inside = [mark(...NEED_LOOKS[need.severity], need.severity), element("div", {}, element("b", { text: need.text }), element("span", { class: "hint", text: need.hint }))];
  if (!need.incident) return element("div", { class: "need" }, ...inside);
  return element("button", { class: "need", type: "button", click: () => page.choose(need.incident) }, ...inside);
}

export function drawNodes(page) {
  const { nodes, job, step_times: times } = page.sections;
  const rows = nodes.here;
  const workers = rows.reduce((sum, node) => sum + (node.worker_count ?? 0), 0);
  const over = job.ended_s !== null;
  byId("nodes-note").textContent = `${plural(rows.length, "node")}, ${plural(workers, "worker")}${over ? ", as they were at the end" : times?.waits ? `; ${times.waits}` : ""}`;
  const states = new Map();
  for (const node of rows) states.set(node.state, (states.get(node.state) ?? 0) + 1);
  byId("nodes-key").replaceChildren(...[...states].map(([state, number]) => element("span", {}, stateMark(state), ` ${rows.length > 16 ? `${count(number)} ` : ""}${state}`)));
  const body = byId("nodes-body");
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  if (!rows.length) body.replaceChildren(element("p", { class: "empty", text: nodes.gone_count ? "No node is here." : "No node has come yet." }), gone(nodes));
  else if (nodes.has_all_workers) body.replaceChildren(element("div", { class: "cards" }, ...rows.map((node) => card(node, page))), gone(nodes));
  else nodeMap(body, rows, nodes, page);
  if (focused) body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

const toneOf = (state) => (STATES[state] ?? ["ring", "over"])[1];
const loud = (state) => (["warn", "lost"].includes(toneOf(state)) ? toneOf(state) : "");

// The own part of a step of the node's slowest worker, as `elastane top` has it.
function ownPart(node, times) {
  const slowest = times?.nodes.find((one) => one.node === node.name);
  if (!slowest) return null;
  const took = slowest.own_ms < 1000 ? `${Number(slowest.own_ms.toPrecision(3))} ms` : `${Number((slowest.own_ms / 1000).toPrecision(3))} s`;
  return element("span", { class: `own ${slowest.is_slow ? "t-warn" : "quiet"}`, title: `The own part of a step of rank ${slowest.rank}, the slowest here, beside the median of all` }, slowest.is_slow ? mark("triangle", "warn", "slow") : null, ` ${took} ${slowest.ratio.toFixed(2)}×`);
}

function card(node, page) {
  const facts = [node.host && node.host !== node.name ? node.host : "", node.step !== undefined ? `step ${count(node.step)}` : "", node.rate !== undefined ? `${rate(node.rate)}/s` : "", node.heard_s > 3 ? `heard ${duration(node.heard_s)} ago` : ""].filter(Boolean);
  if (loud(node.state) || !["training", "done"].includes(node.state)) facts.push(node.state);
  return element(
    "div", { class: `node ${loud(node.state)}` },
    element("h3", {}, stateMark(node.state, node.state), node.name, node.coordinates ? element("span", { class: "tag", text: "coordinator" }) : null, element("span", { class: "quiet", text: facts.join(" · "), title: node.why }), ownPart(node, page.sections.step_times)),
    element("div", { class: "workers" }, ...(node.workers ?? []).map((worker) => workerCell(node, worker, page))),
  );
}

function workerCell(node, worker, page) {
  const name = worker.rank === undefined ? `·${worker.local_rank ?? 0}` : worker.rank;
  const isUsual = worker.state === node.state;
  const slow = worker.slow ? `, the others wait for it in each step (${worker.slow})` : "";
  const words = `rank ${worker.rank ?? "unknown"}, local rank ${worker.local_rank}, pid ${worker.pid}, ${worker.state}${slow}: show its output`;
  const tone = loud(worker.state) || (worker.slow ? "warn" : "");
  return element(
    "button", { class: `worker ${tone}`, type: "button", title: words, "aria-label": words, "data-key": `${node.name}/${worker.local_rank}`, click: () => page.openLog({ node: node.name, local_rank: worker.local_rank }) },
    element("b", { text: name }), isUsual ? (worker.slow ? element("span", { text: `slow: ${worker.slow}` }) : null) : element("span", { text: worker.state }),
  );
}

function gone(nodes) {
  if (!nodes.gone_count) return element("p", { hidden: true });
  const named = nodes.gone.map((node) => element("span", { title: node.why ?? "" }, stateMark(node.state), ` ${node.name} ${node.state === "gone" ? "lost" : "left"} ${clock(node.since_s ?? 0)}`));
  const more = nodes.gone_count - nodes.gone.length;
  return element("p", { class: "gone" }, "No longer here:", ...named, more > 0 ? `and ${count(more)} more` : null);
}

function nodeMap(body, rows, nodes, page) {
  // Of nodes that stand still, those that the others wait for come first.
  const isAwaited = (node) => (node.workers ?? []).some((worker) => worker.state === "awaited");
  const unwell = rows.filter((node) => toneOf(node.state) !== "use").sort((one, other) => isAwaited(other) - isAwaited(one));
  const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": `${rows.length} nodes, ${unwell.length} not well; arrow keys read them out` });
  const note = element("p", { class: "quiet", text: "One square a node, in the order of their ranks; point at one, or use the arrow keys." });
  const table = element("table", {}, element("thead", {}, element("tr", {}, element("th", { text: `Not well: ${count(unwell.length)} of ${count(rows.length)}` }), element("th", { text: "state" }), element("th", { text: "why" }))));
  table.append(element("tbody", {}, ...unwell.slice(0, 12).map((node) => element("tr", {}, element("td", { class: "short" }, stateMark(node.state), ` ${node.name}`), element("td", { text: node.state }), element("td", { class: "quiet", text: (node.why ?? "").slice(0, 90) })))));
  const more = unwell.length > 12 ? element("p", { class: "quiet", text: `and ${count(unwell.length - 12)} more` }) : null;
  body.replaceChildren(element("div", { class: "map" }, element("div", {}, canvas, note), element("div", {}, table, more)), gone(nodes));
  const tell = (node) => { if (node) note.textContent = `${node.name}: ${node.state}${node.why ? `, ${node.why.slice(0, 120)}` : ""}`; };
  const find = drawMap(canvas, rows, (state) => STATES[state] ?? ["ring", "over"]);
  canvas.addEventListener("pointermove", (event) => tell(find(event)));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    page.mapAt = Math.min(rows.length - 1, Math.max(0, (page.mapAt ?? 0) + step));
    tell(rows[page.mapAt]);
  });
}

export function drawIncident(page, one) {
  const { incidents, job } = page.sections;
  const place = incidents.findIndex((each) => each.id === page.chosen);
  byId("incident-head").textContent = place < 0 ? "Incidents" : `Incident ${place + 1} of ${incidents.length}`;
  byId("earlier").disabled = place <= 0;
  byId("later").disabled = place < 0 || place >= incidents.length - 1;
  const body = byId("incident-body");
  if (!incidents.length) { body.replaceChildren(element("p", { class: "empty", text: page.sections.not_here ? "Incidents are not known here." : "No incident so far." })); return; }
  if (!one) { body.replaceChildren(element("p", { class: "empty", text: "Reading …" })); return; }
  body.replaceChildren(...incidentCard(page, job, one));
}

const STATE_WORDS = { open: "not over", left: "open at the end", recovered: "recovered", fatal: "ended the job" };

function incidentCard(page, job, one) {
  const where = [one.rank !== null ? `rank ${one.rank}` : "", one.node ? `on ${one.node}` : "", one.local_rank !== null ? `local rank ${one.local_rank}` : "", one.pid ? `pid ${one.pid}` : "", one.round !== null ? `round ${one.round}` : ""].filter(Boolean).join(", ");
  const facts = element("dl", { class: "facts" });
  const add = (name, ...what) => facts.append(element("dt", { text: name }), element("dd", {}, ...what));
  add("Cause", one.cause || "The log does not say.");
  const evidence = one.evidence.filter((text) => !one.cause.includes(text.slice(text.indexOf(": ") + 2)));
  if (evidence.length) add("Evidence", element("ul", {}, ...evidence.map((text) => element("li", { text }))));
  if (one.message) add(one.is_output ? "Its last output" : "It said", element("pre", { text: one.message }));
  if (one.consequences) add("Then", `${plural(one.consequences, "more failure")} elsewhere, as a consequence`);
  if (one.did.length) add("Done", element("ul", {}, ...one.did.map((text) => element("li", { text }))));
  add("Cost", ...cost(one, job));
  if (one.kind !== "change") add("Next", command(nextCommand(job, one)));
  const log = one.node && one.local_rank !== null;
  return [
    element("p", { class: "title" }, mark(...incidentLook(one)), element("span", { text: one.title })),
    element("p", { class: "quiet" }, `${clock(one.from_s, true)} · ${where} `, element("span", { class: "tag", text: STATE_WORDS[one.state === "open" && job.ended_s !== null ? "left" : one.state] ?? one.state })),
    element("p", { text: " " }), facts,
    element("p", { class: "actions" },
      log ? element("button", { type: "button", click: () => page.openLog({ node: one.node, local_rank: one.local_rank, round: one.round, rank: one.rank }) }, "Its output") : null,
      element("button", { type: "button", click: () => page.showEvents({ incident: one.id }) }, "Its events"),
      element("button", { type: "button", click: () => page.zoomTo(one) }, "On the timeline")),
  ];
}

function cost(one, job) {
  if (one.to_s === null) return [job.ended_s === null ? "not over yet" : `${duration(Math.max(0, job.ended_s - one.from_s))} until the end`];
  const stood = Math.max(0, one.to_s - one.from_s), found = Math.min(one.detected_s ?? 0, stood);
  // Of an incident that ended no world, such as a coordinator that could not reach its store.
  const stays = ["authority", "difference", "stall"].includes(one.kind) && !one.ended_world;
  const until = one.state === "fatal" ? "until the job ended" : stays ? "until it was over" : "until the next world's workers had started";
  const trained = one.trained_s === null ? 0 : Math.max(0, one.trained_s - one.to_s);
  const parts = [[found, "until it was detected"], [stood - found, until], [trained, "until its first step"]];
  const words = one.whole_s !== null && one.whole_s > one.to_s ? ` All ${count(one.world_before)} workers again after ${duration(one.whole_s - one.from_s)}.` : "";
  const bar = element("div", { class: "phases", "aria-hidden": "true" });
  for (const [seconds] of parts) { const part = element("i"); part.style.flexGrow = String(1 + (1000 * seconds) / Math.max(stood + trained, 1e-9)); bar.append(part); }
  const told = one.kind === "change" ? ` from its announcement until ${trained ? "the next world's first step" : "the next world's workers had started"}.` : ` ${parts.filter(([seconds]) => seconds > 0).map(([seconds, text]) => `${duration(seconds)} ${text}`).join(", ")}.`;
  return [element("b", { text: duration(stood + trained) }), element("span", { class: "quiet", text: told + words }), one.kind === "change" ? null : bar].filter(Boolean);
}

function nextCommand(job, one) {
  if (one.rank !== null && one.round !== null && one.kind === "worker") return `elastane logs ${job.log_dir} --rank ${one.rank} --round ${one.round} --attempt ${one.attempt}`;
  return `elastane explain ${job.log_dir}${one.round !== null ? ` --round ${one.round}` : ""}`;
}

function command(text) {
  const copied = element("button", { type: "button", click: async () => { await navigator.clipboard?.writeText(text); copied.textContent = "Copied"; } }, "Copy");
  return element("div", { class: "command" }, element("code", { text }), copied);
}

// Causes of time that are no loss; every other one is.
const CAUSE_TONES = { productive: "use", starting: "over", saving: "over", evaluating: "over", unknown: "over" };

export function drawAccount(page) {
  const { account } = page.sections;
  const body = byId("account-body");
  byId("account-note").textContent = account ? `goodput ${share(account.goodput)} of ${duration(account.wall_s)}` : "";
  if (!account?.causes.length) { body.replaceChildren(element("p", { class: "empty", text: page.sections.not_here ? `Not known: ${page.sections.not_here}.` : "Nothing is known yet." })); return; }
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const whole = element("div", { class: "shares", "aria-hidden": "true" });
  const most = Math.max(...account.causes.map((one) => one.seconds), 1e-9);
  const rows = account.causes.map((one) => {
    const tone = `t-${CAUSE_TONES[one.cause] ?? "lost"}`, part = element("i", { class: tone }), bar = element("i", { class: `share ${tone}` });
    part.style.flexGrow = String(one.seconds);
    bar.style.width = `${(100 * one.seconds) / most}%`;
    whole.append(part);
    const numbers = one.incidents.map(([number, seconds]) => element("button", { type: "button", "data-key": `${one.cause}/${number}`, title: duration(seconds), "aria-label": `incident ${number}: ${duration(seconds)}`, click: () => page.choose(number) }, `#${number}`));
    return element("tr", {}, element("td", { text: one.cause }), element("td", { class: "number", text: duration(one.seconds) }),
      element("td", { class: "number", text: share(one.seconds / Math.max(account.wall_s, 1e-9)) }), element("td", { class: "bar wide" }, bar), element("td", { class: "incidents" }, ...numbers));
  });
  const head = element("tr", {}, ...["cause", "time", "share", "", "longest incidents"].map((name, at) => element("th", { text: name, class: at === 1 || at === 2 ? "number" : at === 3 ? "wide" : "" })));
  body.replaceChildren(whole, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)),
    ...(account.missing ? [element("p", { class: "quiet", text: `${account.missing[0].toUpperCase()}${account.missing.slice(1)}.` })] : []),
    ...account.helped.map((text) => element("p", { class: "quiet", text: `Would help: ${text}` })));
  if (focused) body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

const share = (part) => `${(100 * part).toFixed(1)}%`;

const snapshotLine = (page, each) => element("p", {}, `If any ${each.survives} died now: back to step `, element("b", { text: count(each.step) }),
  ` in memory, ${duration(page.end_s() - each.begun_s)} old, which took ${duration(each.took_s)}`);

export function drawCheckpoints(page) {
  const { checkpoints, snapshots, job } = page.sections;
  const body = byId("checkpoints-body");
  byId("checkpoints-note").textContent = checkpoints.newest.length ? `${count(checkpoints.saved)} saved, ${count(checkpoints.failed)} failed` : "";
  if (!checkpoints.newest.length) {
    body.replaceChildren(...snapshots.map((each) => snapshotLine(page, each)), element("p", { class: "empty", text: "None was saved by elastane's Checkpointer. What the script saves itself does not appear here." }));
    return;
  }
  const last = checkpoints.newest.find((each) => !each.slug);
  const steps = last && job.has_steps ? `, ${plural(Math.max(0, job.step - last.step), "step")} ago` : "";
  const head = element("tr", {}, ...["step", "age", "size", "took", "why", "place"].map((name) => element("th", { text: name, class: ["age", "size", "took"].includes(name) ? "number" : name === "place" ? "wide" : "" })));
  const rows = checkpoints.newest.map((each) => element("tr", { class: each.slug ? "t-lost" : "" },
    element("td", { class: "short" }, each.slug ? mark("cross", "lost", "failed") : null, ` ${count(each.step)}`),
    element("td", { class: "number", text: duration(page.end_s() - each.begun_s) }),
    element("td", { class: "number", text: each.slug ? "–" : size(each.stored_bytes) }),
    element("td", { class: "number", text: each.slug ? "failed" : duration(each.seconds) }),
    element("td", { text: each.slug ? `[${each.slug}]` : each.why }),
    element("td", { class: "wide quiet", text: `${each.location} by ${each.node}` })));
  body.replaceChildren(
    ...snapshots.map((each) => snapshotLine(page, each)),
    last ? element("p", {}, `If all died now: back to step `, element("b", { text: count(last.step) }), steps) : element("p", { class: "t-lost", text: "No checkpoint was saved yet." }),
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))));
}

const EVENT_LOOKS = { good: ["circle", "use"], bad: ["cross", "lost"], act: ["triangle", "warn"], plain: null };

export function drawEvents(page, found, wanted) {
  const body = byId("events-body");
  const filtered = wanted.group || wanted.text || wanted.incident || wanted.node;
  byId("events-note").textContent = `${filtered ? "filtered, of " : ""}${plural(found.total, "event")}`;
  if (!found.rows.length) { body.replaceChildren(element("p", { class: "empty", text: filtered ? "No such event." : "No event yet." })); return; }
  const rows = found.rows.map((row) => {
    const look = EVENT_LOOKS[row.tone];
    const text = row.incident ? element("button", { class: "plain", type: "button", "data-key": row.number, click: () => page.choose(row.incident) }, row.reason) : row.reason;
    return element("tr", { class: row.incident && row.incident === page.chosen ? "own" : "" },
      element("td", { class: "short mono", text: clock(row.time_s), title: clock(row.time_s, true) }),
      element("td", { class: "short" }, look ? mark(...look) : null, element("code", { text: ` ${row.kind}` })),
      element("td", { class: "wide short quiet", text: row.node }), element("td", {}, text));
  });
  const scroll = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events, newest first" },
    element("table", {}, element("thead", {}, element("tr", {}, element("th", { text: "time" }), element("th", { text: "event" }), element("th", { class: "wide", text: "node" }), element("th", { text: "reason" }))), element("tbody", {}, ...rows)));
  if (found.more_before !== null) scroll.append(element("p", {}, element("button", { type: "button", click: () => page.olderEvents(found.more_before) }, "Older events")));
  const old = body.querySelector(".scroll"), top = old?.scrollTop ?? 0;
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  body.replaceChildren(scroll);
  scroll.scrollTop = top;
  if (focused) scroll.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}
