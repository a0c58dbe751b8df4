"use strict";
// The status page: one GET of /v1/blasst/status every REFRESH_MS, one PUT from the form.

const REFRESH_MS = 1000;
const LATE_MS = 10000;
const STALE_S = 10; // a front end writes its page every half second
const MIN_SAMPLES = 20; // of fewer a p95 is one request
const UNITS = {mag: "MAG", lambda: "lambda", scale: "scale"};
const HINTS = {
  mag: "lambda = 2^(-MAG/1000): a higher MAG skips less. Usual: 1000 to 14000.",
  lambda: "Natural base, 0 \u2264 lambda < 1; 0 skips nothing. Usual: 0.00001 to 0.5.",
  scale: "lambda times the prompt's length in tokens: longer prompts get a smaller lambda.",
  off: "Dense attention: no block is skipped.",
};
const CLASS_NAMES = {
  dense: "dense", lambda_0: "lambda 0", mag_lt_1000: "MAG < 1000", mag_ge_10000: "MAG \u2265 10000",
};

const $ = (id) => document.getElementById(id);
let token = "";
let generation = null;
let minContext = null;
let lastGood = 0;

function text(id, value, className = "") {
  $(id).textContent = value;
  $(id).className = className;
}

function row(cells, className = "") {
  const tr = document.createElement("tr");
  tr.className = className;
  for (const [value, cellClass, title] of cells) {
    const td = document.createElement("td");
    td.textContent = value;
    if (cellClass) td.className = cellClass;
    if (title) td.title = title;
    tr.append(td);
  }
  return tr;
}

const number = (value) => value === null ? "-" : String(Number(value.toPrecision(6)));

function seconds(value) {
  if (value === null) return "-";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function age(value) {
  if (value < 120) return `${Math.round(value)} s ago`;
  return value < 7200 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
}

function percent(rate) {
  const value = 100 * rate;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)}%`;
}

function lengthClass(name) {
  const [bound, size] = name.split("_");
  return `${bound === "gt" ? ">" : "\u2264"} ${size.toUpperCase()}`;
}

function lambdaClass(name) {
  if (name in CLASS_NAMES) return CLASS_NAMES[name];
  const [, low, high] = name.split("_");
  return `MAG ${low}\u2013${high}`;
}

async function call(method, path, headers = {}, body = undefined) {
  const all = {...headers};
  if (token) all.Authorization = `Bearer ${token}`;
  const answer = await fetch(path, {method, headers: all, body, cache: "no-store"});
  const data = await answer.json();
  if (!answer.ok) {
    const error = new Error(data.detail || answer.statusText);
    error.status = answer.status;
    throw error;
  }
  return data;
}

const threshold = (t) => t === null ? "dense" : `${UNITS[t.unit]} ${number(t.value)}`;
const step = (s) => threshold(s.threshold) + (s.up_to === null ? " above" : ` to ${s.up_to}`);

// A front end that has read the threshold serves nothing before a rank runs.
const waiting = (status) => !status.ranks.some((r) => r.alive);

function showThreshold(status) {
  const desired = status.desired;
  const live = status.front_ends.filter((f) => f.alive);
  if (desired === null) {
    generation = minContext = null;
    for (const id of ["threshold", "lambda", "generation", "min-context", "updated"]) text(id, "-");
    text("converged", "unknown", "warn");
    return;
  }
  generation = desired.generation;
  minContext = desired.min_context;
  const given = desired.threshold;
  let name = "dense";
  if (desired.schedule) name = desired.schedule.map(step).join(", ");
  else if (given !== null) name = threshold(given);
  else if (generation === 0) name = "never set";
  text("threshold", name);
  const byLength = desired.schedule || (given !== null && given.unit === "scale");
  text("lambda", byLength ? "by length" : number(desired.lambda));
  text("generation", String(generation));
  const followers = live.filter((f) => f.generation_read === generation).length;
  const follow = live.length ? `${followers} of ${live.length} front ends` : "no front end";
  if (live.length && waiting(status)) text("converged", "waiting for the engine", "warn");
  else text("converged", follow, desired.converged ? "good" : "warn");
  text("min-context", desired.min_context === null ? "engine's setting"
    : `${desired.min_context} tokens`);
  const when = desired.updated_at ? new Date(desired.updated_at).toLocaleString() : "-";
  text("updated", desired.updated_by ? `${when} by ${desired.updated_by}` : when);
}

function showFrontEnds(status) {
  const frontEnds = status.front_ends;
  const fresh = waiting(status) ? "loading" : "live";
  const state = (f) => !f.alive ? "gone" : f.age_s > STALE_S ? "stale" : fresh;
  $("front-ends").tBodies[0].replaceChildren(...frontEnds.map((f) => row([
    [f.name],
    [state(f), "state"],
    [f.generation_read],
    [f.generation_stamped],
    [age(f.age_s)],
  ], state(f))));
  $("front-ends").hidden = frontEnds.length === 0;
  $("no-front-ends").hidden = frontEnds.length > 0;
}

function heatCell(visited, skipped, label) {
  const td = document.createElement("td");
  if (!visited) {
    td.className = "none";
    td.textContent = "-";
    td.title = `${label}: no tile visited`;
    return td;
  }
  const rate = skipped / visited;
  td.textContent = percent(rate);
  td.title = `${label}: ${skipped} of ${visited} tiles skipped`;
  td.dataset.rate = rate.toFixed(4);
  td.style.background = `color-mix(in srgb, rgb(var(--hot)) ${(100 * rate).toFixed(1)}%, rgb(var(--cold)))`;
  td.style.color = rate > 0.63 ? "var(--card)" : "var(--ink)";
  return td;
}

function showTiles(tiles) {
  const sum = (key) => tiles.layers.reduce((n, l) => n + l[key].reduce((a, b) => a + b, 0), 0);
  const visited = sum("visited");
  $("heat").hidden = $("legend").hidden = $("heat-total").hidden = visited === 0;
  $("no-tiles").hidden = visited > 0;
  if (!visited) return;
  text("heat-total", `${percent(sum("skipped") / visited)} of ${visited.toLocaleString()} tiles `
    + "skipped since the engine started.", "quiet");
  const head = document.createElement("thead");
  const top = head.insertRow();
  for (const name of ["layer", ...tiles.kv_heads.map((h) => `head ${h}`)]) {
    const th = document.createElement("th");
    th.scope = "col";
    th.textContent = name;
    top.append(th);
  }
  const body = document.createElement("tbody");
  for (const layer of tiles.layers) {
    const tr = body.insertRow();
    const th = document.createElement("th");
    th.scope = "row";
    th.textContent = layer.layer;
    tr.append(th, ...tiles.kv_heads.map((h, i) =>
      heatCell(layer.visited[i], layer.skipped[i], `layer ${layer.layer}, kv head ${h}`)));
  }
  $("heat").replaceChildren(head, body);
}

function quantile(value, count) {
  if (count >= MIN_SAMPLES) return [seconds(value)];
  return ["-", "", `Fewer than ${MIN_SAMPLES} requests: too few for a quantile`];
}

function showClasses(classes, frontEnds) {
  const running = new Set(frontEnds.filter((f) => f.alive).map((f) => f.model_name));
  const shown = (c) => running.size === 0 || running.has(c.model_name);
  const answered = classes.filter((c) => c.ttft.count > 0 && shown(c));
  $("ttft").tBodies[0].replaceChildren(...answered.map((c) => row([
    [lengthClass(c.prompt_length_class)],
    [lambdaClass(c.lambda_class)],
    [c.ttft.count],
    [seconds(c.ttft.mean_s)],
    quantile(c.ttft.p50_s, c.ttft.count),
    quantile(c.ttft.p95_s, c.ttft.count),
  ])));
  $("ttft").hidden = $("ttft-note").hidden = answered.length === 0;
  $("no-ttft").hidden = answered.length > 0;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function showCanary(canary) {
  if (canary === null) return text("canary", "");
  const rate = (value) => value === null ? "-" : percent(value);
  const judged = canary.probes > 0 ? "within bounds" : "nothing judged yet";
  const what = canary.breached ? "bound crossed" : canary.noisy ? "cannot judge" : judged;
  return text("canary", `canary: ${what}, agreement ${rate(canary.agreement)} over `
    + `${canary.probes} probes, ${canary.steps} steps`, canary.breached ? "bad" : "");
}

function show(status) {
  const models = new Set([...status.front_ends, ...status.ranks].map((x) => x.model_name));
  text("models", [...models].filter(Boolean).join(", "));
  showThreshold(status);
  showFrontEnds(status);
  showTiles(status.tiles);
  showClasses(status.classes, status.front_ends);
  text("unreadable", status.unreadable_pages ? `${status.unreadable_pages} statistics pages cannot `
    + "be read: damaged, or of another release" : "");
  text("refused", status.requests_rejected ? `${status.requests_rejected} requests refused` : "");
  showCanary(status.canary);
  const last = status.last_error;
  text("last-error", last === null ? ""
    : `last error ${new Date(last.time).toLocaleTimeString()}: ${last.message}`);
  showError(status.error);
  $("main").hidden = false;
}

async function refresh() {
  try {
    show(await call("GET", "/v1/blasst/status"));
    lastGood = Date.now();
    $("token-box").hidden = true;
  } catch (error) {
    if (error.status === 401) {
      $("token-box").hidden = false;
      showError(token ? "This token is not accepted." : "");
    } else {
      showError(`The sidecar does not answer: ${error.message}`);
    }
  }
  const late = Date.now() - lastGood > LATE_MS;
  const when = lastGood ? `updated ${new Date(lastGood).toLocaleTimeString()}` : "";
  text("freshness", when, lastGood && late ? "late" : "");
}

async function submit(event) {
  event.preventDefault();
  const unit = $("unit").value;
  const given = $("value").value.trim();
  const value = Number(given);
  if (unit !== "off" && (given === "" || !Number.isFinite(value))) {
    text("set-result", "Give a number.", "bad");
    return;
  }
  $("set").disabled = true;
  try {
    const ifMatch = generation === null ? "*" : `"${generation}"`;
    const headers = {"Content-Type": "application/json", "If-Match": ifMatch};
    const wish = unit === "off" ? {off: true} : {[unit]: value};
    // A PUT replaces the whole state, and this form changes the threshold alone.
    if (minContext !== null) wish.min_context = minContext;
    const body = JSON.stringify(wish);
    const state = await call("PUT", "/v1/blasst/threshold", headers, body);
    text("set-result", `Set, generation ${state.generation}.`, "good");
  } catch (error) {
    text("set-result", error.message, "bad");
  } finally {
    $("set").disabled = false;
  }
  await refresh();
}

function changeUnit() {
  const unit = $("unit").value;
  $("hint").textContent = HINTS[unit];
  $("value").disabled = unit === "off";
  $("value").placeholder = {mag: "2500", lambda: "0.05", scale: "500", off: ""}[unit];
}

async function loop() {
  if (!document.hidden) await refresh();
  setTimeout(loop, REFRESH_MS);
}

$("unit").addEventListener("change", changeUnit);
$("set-form").addEventListener("submit", submit);
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  refresh();
});
changeUnit();
loop();
