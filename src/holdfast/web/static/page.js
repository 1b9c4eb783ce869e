"use strict";
// The page shows what the server sends; it acts only if its address permits that. All text goes through textContent: ranks may print anything.

const COLOURS = {
  r: ["running", "#3a8f5c"], e: ["exited", "#7a8797"], f: ["failed", "#c62828"],
  h: ["hung", "#ef6c00"], s: ["stopped", "#5c6bc0"], l: ["lost", "#6a1b9a"],
};
// By which share of the median a rank's own time exceeds it: the least of each level, its name, its colour.
const LAGS = [
  [0.5, "50 % or more", "#b3261e"], [0.25, "25 % or more", "#ef6c00"], [0.1, "10 % or more", "#c9a227"],
  [0.03, "3 % or more", "#6aa84f"], [-Infinity, "less than 3 %", "#2d7d8a"],
];
const UNMEASURED = ["not measured", "#7a8797"];
const CATEGORIES = {
  training: "#2e7d4f", checkpointing: "#2266bb", starting: "#8a94a3", running: "#2e7d4f", detecting: "#c62828",
  recovering: "#ef6c00", recomputing: "#a34a00", stopping: "#5b6675", "possibly recomputing": "#c9a227",
};
const CURVES = [
  ["loss", "Loss"], ["grad_norm", "Gradient norm"], ["step_s", "Seconds of a step"],
  ["tokens_per_s", "Tokens per second"], ["mfu_full", "MFU, full attention"],
];
const STROKES = ["#2266bb", "#c2571a", "#2d8a4e", "#8a3ea8", "#b3261e", "#00838f", "#7a6a00", "#5d4037"];
const RETRY_MS = [500, 1000, 2000, 5000];

const byId = (id) => document.getElementById(id);
const token = takeToken();
const actionToken = sessionStorage.getItem("actions") || "";
let confirmed = () => {};
let chosen = decodeURIComponent(location.hash.slice(1));
let view = {};
let charts = new Map();
let cells = [];
let lags = new Map();
let columns = 1;
let cursor = 0;
let stopStream = () => {};

// The tokens arrive in the fragment as `#token=…&actions=…&run=…`; they are kept for this tab only, and removed from the
// address.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("token")) {
    sessionStorage.setItem("token", given.get("token"));
    sessionStorage.setItem("actions", given.get("actions") || "");
    history.replaceState(null, "", "#" + encodeURIComponent(given.get("run") || ""));
  }
  return sessionStorage.getItem("token") || "";
}

function make(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") made.className = value;
    else if (name === "colour") made.style.background = value;
    else if (name === "width") made.style.width = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

const ask = (path, signal) => fetch(path, { headers: { Authorization: "Bearer " + token }, signal });

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 60) return value.toFixed(value < 10 ? 2 : 0) + " s";
  if (value < 3600) return Math.floor(value / 60) + " min " + Math.round(value % 60) + " s";
  if (value < 86400) return Math.floor(value / 3600) + " h " + Math.round((value % 3600) / 60) + " min";
  return Math.floor(value / 86400) + " d " + Math.round((value % 86400) / 3600) + " h";
}
const share = (value) => (value === null || value === undefined ? "" : (100 * value).toFixed(1) + " %");
const whole = (value) => (value === null || value === undefined ? "" : Math.round(value).toLocaleString("en"));
const short = (value) => (value === null || value === undefined ? "" : Number(value.toPrecision(4)).toString());

const spread = (pair) => (pair ? pair.map((value) => short(value) + " s").join(" / ") : "");

function say(text, lost) {
  byId("connection").textContent = text;
  byId("connection").classList.toggle("lost", Boolean(lost));
}

async function listRuns() {
  try {
    const answer = await ask("/api/runs");
    if (answer.status === 401) return say("no token: open the address that `holdfast web` prints", true);
    const runs = await answer.json();
    byId("runs").replaceChildren(...runs.map((row) =>
      make("tr", row.run === chosen ? { class: "chosen" } : {},
        make("td", {}, make("a", { href: "#" + encodeURIComponent(row.run) }, row.run)),
        make("td", { class: "phase " + row.phase }, row.phase),
        make("td", { class: "number" }, row.step ?? ""), make("td", { class: "number" }, row.restarts),
        make("td", {}, row.waiting_for))));
    listTargets([...new Set(runs.map((row) => row.target).filter(Boolean))]);
    if (!chosen && runs.length) location.replace("#" + encodeURIComponent(runs[0].run));
    if (!runs.length) say("no runs yet");
  } catch (error) {
    say("the server does not answer; trying again", true);
  }
}

function listTargets(targets) {
  const select = byId("machines-target");
  const known = [...select.options].map((option) => option.value);
  select.append(...targets.filter((name) => !known.includes(name)).map((name) => make("option", { value: name }, name)));
}

async function listMachines() {
  const told = byId("machines-told");
  told.textContent = "asking";
  try {
    const answer = await ask("/api/machines?" + new URLSearchParams({ target: byId("machines-target").value }));
    const rows = await answer.json();
    told.textContent = rows.error || rows.filter((row) => row.state === "quarantined").length + " of " + rows.length + " quarantined";
    byId("machine-rows").replaceChildren(...(rows.error ? [] : rows.slice(0, 2000)).map((row) => make("tr", {},
      make("td", {}, row.machine), make("td", {}, row.state), make("td", {}, row.runs.join(", ")),
      make("td", {}, row.why, ...row.evidence.map((line) => make("div", { class: "dim" }, line))))));
  } catch (error) {
    told.textContent = "the server does not answer";
  }
}

async function follow(run) {
  stopStream();
  const stopping = new AbortController();
  stopStream = () => stopping.abort();
  view = {};
  charts.forEach((chart) => chart.destroy());
  charts = new Map();
  byId("curves").replaceChildren();
  byId("output").textContent = byId("action-told").textContent = byId("phase").textContent = byId("notice").textContent = "";
  for (const name of ["problems", "upload", "figures", "failures", "findings", "marks", "nodes", "ledger", "ledger-key"]) byId(name).replaceChildren();
  byId("output-replica").value = "0";
  showRanks([]);
  showLags([]);
  byId("run").hidden = true;
  byId("name").textContent = run;
  for (let failed = 0; !stopping.signal.aborted; ) {
    try {
      const answer = await ask("/api/runs/" + encodeURIComponent(run) + "/stream", stopping.signal);
      if (answer.status === 401) return say("no token: open the address that `holdfast web` prints", true);
      if (answer.status === 404) return say("there is no run " + run, true);
      failed = 0;
      byId("run").hidden = false;
      if (await read(answer.body.getReader())) return say("the run is over");
    } catch (error) {
      if (stopping.signal.aborted) return;
    }
    say("the connection is lost; trying again", true);
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(failed++, RETRY_MS.length - 1)]));
  }
}

// Reads server-sent events; true when the run is over.
async function read(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    text += decoder.decode(value, { stream: true });
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const event = text.slice(0, end);
      if (event.startsWith("event: over")) return true;
      show(JSON.parse(event.slice("data: ".length)));
      say("live");
    }
  }
}

const SHOW = {
  problems: (rows) => byId("problems").replaceChildren(...rows.map(finding)),
  upload: (text) => { byId("upload").textContent = text; },
  head: showHead, nodes: showNodes, ranks: showRanks, lags: showLags, curves: showCurves, marks: showMarks,
  failures: (rows) => byId("failures").replaceChildren(...(rows.length ? rows.map(failure) : [make("p", {}, "none")])),
  findings: (rows) => byId("findings").replaceChildren(...(rows.length ? rows.map(finding) : [make("p", {}, "none")])),
};

function show(parts) {
  Object.assign(view, parts);
  for (const [name, value] of Object.entries(parts)) SHOW[name](value);
}

function showHead(head) {
  byId("phase").textContent = head.phase;
  byId("phase").className = "phase " + head.phase;
  for (const button of byId("action-buttons").children) button.disabled = head.over;
  document.title = head.run + " " + head.phase;
  byId("notice").className = head.phase;
  byId("notice").textContent = head.waiting_for || (head.stalled_s ? "no step for " + seconds(head.stalled_s) : "")
    || (head.degraded ? "runs with fewer nodes than requested" : "") || (head.over ? head.reason : "");
  const figures = {
    step: head.step === null ? "" : whole(head.step) + (head.total_steps ? " of " + whole(head.total_steps) : ""),
    "time left": seconds(head.remaining_s), loss: short(head.loss), "step time": seconds(head.step_s),
    "step time p50 / p99 of ranks": spread(head.step_p50_p99_s), "own time p50 / p99 of ranks": spread(head.own_p50_p99_s),
    "tokens per second": whole(head.tokens_per_s), MFU: share(head.mfu), ETTR: share(head.ettr),
    age: seconds(head.total_s), restarts: head.restarts,
    checkpoint: head.checkpoint_step === null ? ""
      : "step " + whole(head.checkpoint_step) + (head.over ? "" : ", " + seconds(head.checkpoint_age_s) + " ago")
        + (head.checkpoint_size && ", " + head.checkpoint_size),
    fabric: head.fabric,
  };
  byId("figures").replaceChildren(...Object.entries(figures).filter(([, value]) => value !== "")
    .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const parts = Object.entries(head.time);
  byId("ledger").replaceChildren(...parts.map(([name, spent]) =>
    make("span", { colour: CATEGORIES[name], width: (100 * spent) / head.total_s + "%", title: name })));
  byId("ledger-key").replaceChildren(...parts.map(([name, spent]) =>
    make("li", {}, make("span", { class: "key", colour: CATEGORIES[name] }), name + " " + seconds(spent) + ", " + share(spent / head.total_s))));
}

function showNodes(nodes) {
  byId("nodes").replaceChildren(...nodes.slice(0, 500).map((each) => make("tr", {},
    make("td", {}, each.node + (each.standby ? " (standby)" : "")), make("td", {}, each.phase),
    make("td", {}, each.host), make("td", {}, each.reason || ""))));
}

function showRanks(replicas) {
  byId("output-replicas").hidden = replicas.length < 2;
  cells = [];
  for (const replica of replicas) {
    let rank = 0;
    for (const [node, number] of replica.nodes)
      for (let i = 0; i < number; i++, rank++)
        cells.push({ replica: replica.replica, rank, node, letter: replica.letters[rank], detail: replica.details[rank] || "" });
  }
  cursor = Math.min(cursor, Math.max(0, cells.length - 1));
  showKey();
  draw();
}

function showLags(replicas) {
  lags = new Map(replicas.map((each) => [each.replica, { ...each, by: new Map(each.ranks.map((row) => [row.rank, row])) }]));
  byId("slowest").hidden = !replicas.length;
  const nodes = new Map(cells.map((cell) => [cell.replica + "/" + cell.rank, cell.node]));
  const rows = replicas.flatMap((each) => each.ranks.map((row) => ({ ...row, replica: each.replica })));
  byId("slowest-rows").replaceChildren(...rows.sort((a, b) => b.lag - a.lag).slice(0, 32).map((row) => make("tr", {},
    make("td", {}, row.rank + (row.replica ? " of replica " + row.replica : "")),
    make("td", {}, nodes.get(row.replica + "/" + row.rank) ?? ""), make("td", { class: "number" }, short(row.own_s) + " s"),
    make("td", { class: "number" }, share(row.lag)), make("td", {}, row.phase),
    make("td", { class: "number" }, short(row.beyond_s) + " s"))));
  if (replicas.length) {
    const { steps, phases_s } = replicas[0];
    byId("slowest-told").textContent = "By the time that a rank takes by itself, without waiting for others, in steps "
      + steps.join(" to ") + ". The median of the ranks: " + Object.entries(phases_s).map(([name, spent]) => name + " " + short(spent) + " s").join(", ") + ".";
  }
  if (byId("colour-by").value !== "lag") return;
  showKey();
  draw();
}

// How far a rank is behind the median, and whether that is only a bound; nothing if it is not known.
function lagOf(cell) {
  const known = lags.get(cell.replica);
  const row = known && known.by.get(cell.rank);
  if (row) return { ...row, exact: true };
  return known && known.others !== null ? { lag: known.others, exact: false } : undefined;
}

// The name and the colour of a cell.
function shade(cell) {
  if (byId("colour-by").value === "state") return COLOURS[cell.letter];
  const found = lagOf(cell);
  if (!found) return UNMEASURED;
  const level = LAGS.find(([least]) => found.lag >= least);
  return found.exact ? level.slice(1) : ["others, at most " + share(found.lag), LAGS[LAGS.length - 1][2]];
}

// Counts the cells by shade, and keeps their colours: the pointer redraws the grid often.
function showKey() {
  const counts = new Map();
  for (const cell of cells) {
    const [name, colour] = shade(cell);
    cell.colour = colour;
    const before = counts.get(name);
    counts.set(name, { colour, number: (before ? before.number : 0) + 1 });
  }
  byId("grid-key").replaceChildren(...[...counts].map(([name, { colour, number }]) =>
    make("li", {}, make("span", { class: "key", colour }), whole(number) + " " + name)));
}

function draw() {
  const canvas = byId("grid");
  const width = canvas.clientWidth || 600;
  const size = Math.max(4, Math.min(22, Math.floor(Math.sqrt((width * 260) / Math.max(1, cells.length)))));
  columns = Math.max(1, Math.floor(width / size));
  const height = Math.max(size, Math.ceil(cells.length / columns) * size);
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const gap = size > 6 ? 1.5 : 0.5;
  cells.forEach((cell, index) => {
    pen.fillStyle = cell.colour;
    pen.fillRect((index % columns) * size, Math.floor(index / columns) * size, size - gap, size - gap);
  });
  if (document.activeElement === canvas && cells.length) {
    pen.lineWidth = 2;
    pen.strokeStyle = getComputedStyle(canvas).color;
    pen.strokeRect((cursor % columns) * size, Math.floor(cursor / columns) * size, size - gap, size - gap);
  }
  canvas.dataset.size = size;
}

function point(index) {
  if (!cells[index]) return;
  cursor = index;
  const cell = cells[index];
  byId("rank-text").textContent = "rank " + cell.rank + (cell.replica ? " of replica " + cell.replica : "") + " on node " + cell.node
    + ": " + COLOURS[cell.letter][0] + (cell.detail ? ", " + cell.detail : "") + behind(cell);
  draw();
}

function behind(cell) {
  const found = lagOf(cell);
  if (!found) return "";
  if (!found.exact) return "; at most " + share(found.lag) + " behind the median";
  return "; " + short(found.own_s) + " s a step by itself, " + share(Math.abs(found.lag)) + (found.lag < 0 ? " less" : " more")
    + " than the median, most in " + found.phase;
}

function under(event) {
  const size = Number(byId("grid").dataset.size);
  const column = Math.floor(event.offsetX / size);
  return column < columns ? Math.floor(event.offsetY / size) * columns + column : -1;
}

function showCurves(replicas) {
  for (const [name, title] of CURVES) {
    const shown = Object.entries(replicas).filter(([, curve]) => curve[name]);
    if (!shown.length) continue;
    const steps = [...new Set(shown.flatMap(([, curve]) => curve.step))].sort((a, b) => a - b);
    const data = [steps, ...shown.map(([, curve]) => {
      const last = new Map(curve.step.map((step, index) => [step, curve[name][index]]));
      return steps.map((step) => last.get(step));
    })];
    const key = name + ":" + shown.map(([replica]) => replica).join();
    if (charts.has(key)) charts.get(key).setData(data);
    else charts.set(key, newChart(name, title, shown, data));
  }
}

function newChart(name, title, shown, data) {
  let box = byId("curve-" + name);
  if (!box) byId("curves").append((box = make("div", { id: "curve-" + name })));
  box.replaceChildren(make("h3", {}, title));
  const ink = getComputedStyle(document.body).color;
  const rule = getComputedStyle(document.body).getPropertyValue("--rule");
  const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
  return new uPlot({
    width: box.clientWidth || 400, height: 200, legend: { show: shown.length > 1 }, cursor: { drag: { setScale: false } },
    scales: { x: { time: false } }, axes: [axis, { ...axis, size: 64 }],
    series: [{ label: "step" }, ...shown.map(([replica], index) => ({
      label: "replica " + replica, stroke: STROKES[index % STROKES.length], width: 1.5, spanGaps: true, points: { show: false },
    }))],
  }, data, box);
}

function showMarks(kinds) {
  const all = Object.entries(kinds).flatMap(([kind, marks]) => marks.map(([at, text]) => [at, kind, text]));
  all.sort((a, b) => b[0] - a[0]);
  const begun = view.head ? view.head.created_at : 0;
  byId("marks").replaceChildren(...all.slice(0, 100).map(([at, kind, text]) =>
    make("tr", {}, make("td", { class: "number" }, seconds(at - begun)), make("td", {}, kind === "failure" ? "failure: " + text : text))));
}

function explained(row) {
  return [
    make("p", { class: "dim" }, [row.code, row.where].filter(Boolean).join(" · ")),
    ...(row.evidence.length ? [make("pre", {}, row.evidence.join("\n"))] : []),
    ...(row.cause ? [make("p", {}, row.cause)] : []),
    ...(row.remedy ? [make("p", {}, make("b", {}, "What to do: "), row.remedy)] : []),
  ];
}

function failure(row) {
  const cost = row.until_step_s === null ? "no step since" : "next step " + seconds(row.until_step_s) + " later";
  return make("article", {}, make("b", {}, "after " + seconds(row.after_s) + ": " + row.what),
    make("p", {}, "attempt " + row.attempt + ", " + row.action + ", " + cost), ...explained(row));
}

const finding = (row) => make("article", { class: row.severity }, make("b", {}, row.what), ...explained(row));

function showOutputOf(cell) {
  if (!cell) return;
  byId("output-rank").value = cell.rank;
  byId("output-replica").value = cell.replica;
  showOutput();
}

async function showOutput(event) {
  if (event) event.preventDefault();
  const asked = new URLSearchParams({ rank: byId("output-rank").value || "0", q: byId("output-text").value });
  if (byId("output-attempt").value) asked.set("attempt", byId("output-attempt").value);
  asked.set("replica", byId("output-replica").value || "0");
  const box = byId("output");
  try {
    const answer = await (await ask("/api/runs/" + encodeURIComponent(chosen) + "/output?" + asked)).json();
    box.textContent = answer.error || answer.lines.join("\n") || "no such line";
    box.scrollTop = box.scrollHeight;
  } catch (error) {
    box.textContent = "the server does not answer";
  }
}

async function listActions() {
  if (!actionToken) return;
  const answer = await fetch("/api/actions", { headers: { Authorization: "Bearer " + actionToken } });
  if (!answer.ok) return;
  const actions = await answer.json();
  byId("action-buttons").replaceChildren(...actions.map((action) => {
    const button = make("button", { type: "button" }, action.label);
    button.disabled = Boolean(view.head && view.head.over);
    button.addEventListener("click", () => askFirst(action));
    return button;
  }));
  byId("actions").hidden = false;
}

// Asks before an action, for the run that is shown now.
function askFirst(action) {
  const run = chosen;
  byId("confirm-title").textContent = action.label + ": " + run;
  byId("confirm-effect").textContent = action.effect;
  byId("confirm-argument").hidden = !action.argument;
  byId("confirm-name").textContent = action.argument;
  byId("confirm-text").value = "";
  byId("confirm-text").placeholder = action.example;
  byId("confirm-text").required = Boolean(action.argument);
  confirmed = () => act(run, action, byId("confirm-text").value);
  byId("confirm").returnValue = "";  // Escape keeps the value of an earlier answer in some browsers
  byId("confirm").showModal();
  byId(action.argument ? "confirm-text" : "confirm-no").focus();
}

async function act(run, action, text) {
  const tell = (words) => { byId("action-told").textContent = action.label + ", " + run + ": " + words; };
  tell("requested");
  try {
    const path = "/api/runs/" + encodeURIComponent(run) + "/actions/" + encodeURIComponent(action.name);
    const answer = await fetch(path, { method: "POST", headers: { Authorization: "Bearer " + actionToken }, body: text });
    const { done, error } = await answer.json().catch(() => ({ error: "the server failed; its terminal says why" }));
    tell(done || error);
  } catch (error) {
    tell("the server does not answer");
  }
}

function start() {
  byId("confirm").addEventListener("close", () => { if (byId("confirm").returnValue === "yes") confirmed(); });
  byId("confirm-no").addEventListener("click", () => byId("confirm").close("no"));
  listActions();
  byId("machines").addEventListener("toggle", () => { if (byId("machines").open) listMachines(); });
  byId("machines-target").addEventListener("change", listMachines);
  const canvas = byId("grid");
  const moves = { ArrowRight: () => 1, ArrowLeft: () => -1, ArrowDown: () => columns, ArrowUp: () => -columns };
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter") showOutputOf(cells[cursor]);
    if (!(event.key in moves)) return;
    event.preventDefault();
    point(cursor + moves[event.key]());
  });
  canvas.addEventListener("pointermove", (event) => point(under(event)));
  canvas.addEventListener("click", (event) => { point(under(event)); showOutputOf(cells[cursor]); });
  canvas.addEventListener("focus", draw);
  canvas.addEventListener("blur", draw);
  byId("colour-by").addEventListener("change", () => { showKey(); draw(); });
  byId("output-form").addEventListener("submit", showOutput);
  new ResizeObserver(() => {
    draw();
    charts.forEach((chart) => chart.setSize({ width: chart.root.parentElement.clientWidth, height: 200 }));
  }).observe(byId("run"));
  window.addEventListener("hashchange", () => {
    chosen = decodeURIComponent(location.hash.slice(1));
    listRuns();
    if (chosen) follow(chosen);
  });
  listRuns();
  setInterval(listRuns, 10000);
  if (chosen) follow(chosen);
}

start();
