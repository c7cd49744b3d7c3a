// Draws status.json, each second, as long as somebody looks. All texts go in as text: an event may hold anything.

const EVERY = 1000, PATIENCE = 15000, EVENTS = 60;
const TIMES = {
  productive: "new steps", redone: "steps computed again", checkpointing: "checkpoints",
  validating: "waiting for validations", data: "waiting for data", straggler: "waiting for a straggler",
  recovering: "recovering", starting: "starting", idle: "idle",
};
const ACTIVITIES = {
  computing: "computes", data: "waits for data", shards: "waits for parameters", idle: "between batches, or idle",
};
const MODES = {
  training: "Training", recovering: "Recovering", starting: "Starting", idle: "Waiting",
  checkpointing: "Writing the last checkpoint and the model", validating: "Waiting for a validation",
};
const $ = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "width") element.style.width = value; // not as an attribute: the policy refuses inline styles
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function table(columns, rows) { // columns: [name, class]
  const cells = (tag, row) => h("tr", {}, row.map((cell, i) => h(tag, { class: columns[i][1] ?? "" }, cell)));
  const body = h("tbody", {}, rows.map((row) => cells("td", row)));
  const names = h("thead", {}, cells("th", columns.map(([name]) => name)));
  return h("div", { class: "scroll" }, h("table", {}, names, body));
}

const title = (text, note = "") =>
  h("div", { class: "row between" }, h("h2", {}, text), h("span", { class: "soft small" }, note));

// -- words ------------------------------------------------------------------------------------------------------------

const missing = (value) => value === null || value === undefined;
const integer = (value) => (missing(value) ? "–" : Math.round(value).toLocaleString("en"));
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;

function number(value) {
  if (missing(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 4 });
}

function duration(seconds) {
  if (missing(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  const hours = seconds / 3600;
  return hours < 48 ? `${hours.toFixed(1)} h` : `${(hours / 24).toFixed(1)} days`;
}

function bytes(count) {
  if (missing(count)) return "–";
  const power = Math.min(4, Math.floor(Math.log10(Math.max(count, 1)) / 3));
  return `${Number((count / 1000 ** power).toPrecision(3))} ${["B", "KB", "MB", "GB", "TB"][power]}`;
}

function saved({ step, at, bytes: size }, now) {
  if (!step) return "no checkpoint so far";
  return `checkpoint of step ${integer(step)}` + (at ? `, ${duration(Math.max(0, now - at))} ago, ${bytes(size)}` : "");
}

const mode = (job) => (job.state === "running" ? job.time?.mode ?? "training" : job.state);

function headline(job) {
  const at = `step ${integer(job.step)}` + (job.total_steps ? ` of ${integer(job.total_steps)}` : "");
  switch (job.state) {
    case "complete": return `Complete: ${integer(job.step)} steps`;
    case "failed": return `Failed at ${at}`;
    case "stopped": return `Stopped at ${at}`;
    case "idle": return `No process works on it, ${at}`;
    case "not begun": return "Saved, and never begun";
    case "starting": return job.step ? `Starting, at ${at}` : "Starting";
    case "running": return `${MODES[mode(job)] ?? "Training"}, ${at}`;
    case "unreadable": return "Its folder cannot be read";
    default: return missing(job.step) ? "Nothing is known of it so far" : `Not known whether it runs; saved at ${at}`;
  }
}

function end(job) {
  if (job.state === "complete") return job.time ? `took ${duration(job.time.wall)}` : "";
  if (job.state !== "running") return "";
  if (mode(job) === "checkpointing") return "done in a moment";
  const left = job.time?.seconds_left;
  return missing(left) ? "time left: not known" : `done in about ${duration(left)}, at ${clock(job.now + left)}`;
}

// -- sections ---------------------------------------------------------------------------------------------------------

function head(job) {
  const part = job.total_steps && !missing(job.step) ? job.step / job.total_steps : null;
  const last = job.curve?.series.loss?.findLast((value) => value !== null); // of a job that runs no more
  const figures = {
    loss: number(job.loss ?? last),
    ...Object.fromEntries(Object.entries({ ...job.learning_rates, ...job.metrics }).map(([n, v]) => [n, number(v)])),
    "steps/s": number(job.time?.steps_per_second || null),
    "samples/s": integer(job.samples_per_second || null),
    epoch: job.epochs ? `${Math.min((job.epoch ?? job.epochs - 1) + 1, job.epochs)} of ${integer(job.epochs)}` : "–",
    generation: integer(job.generation),
  };
  const shown = Object.entries(figures).filter(([, value]) => value !== "–");
  const notices = [
    job.failure,
    job.etcd_full && "etcd is full: its quota is used up, and the job waits.",
    job.waiting && `It waits for ${job.waiting}.`,
    ...Object.entries(job.without_room ?? {}).map(([place, names]) => `${names.join(", ")}: ${place}`),
    job.skipped_steps && `${job.skipped_steps} steps were skipped as not finite.`,
    job.discarded && `${job.discarded} batches were discarded.`,
    ...(job.lost ?? []),
    job.curve?.unread,
    job.continued && `It went on in ${job.continued}.`,
  ];
  return [
    h("div", { class: "row between" },
      h("h1", { class: "pill" }, h("span", { class: `dot ${mode(job)}`, "aria-hidden": "true" }), job.job ?? "graphft"),
      h("span", { class: "soft small mono" }, job.folder ?? "")),
    h("p", { class: "headline" }, headline(job)),
    h("p", { class: "soft", id: "end" }, end(job)),
    missing(part) ? "" : h("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * part) },
      h("i", { width: `${100 * part}%` })),
    h("dl", { class: "figures" }, shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    notices.filter(Boolean).map((text) => h("p", { class: "notice" }, text)),
    job.model ? h("p", { class: "small soft mono" }, job.model) : "",
  ];
}

function bar(parts, words = {}) { // parts: {name: amount}
  const whole = Object.values(parts).reduce((sum, value) => sum + value, 0) || 1;
  const shown = Object.entries(parts).filter(([, value]) => value > 0);
  const said = (name, value) => `${words[name] ?? name} ${percent(value / whole)}`;
  return h("div", { class: "bar", role: "img", "aria-label": shown.map(([n, v]) => said(n, v)).join(", ") },
    shown.map(([n, v]) => h("i", { class: `c-${n}`, width: `${(100 * v) / whole}%`, title: said(n, v) })));
}

const legend = (names) => h("ul", { class: "legend small" },
  Object.entries(names).map(([name, words]) => h("li", {}, h("b", { class: `c-${name}` }), words)));

function time(job) {
  if (!job.time?.wall) return null;
  const { seconds, wall, goodput, by_page, began } = job.time;
  const spent = Object.entries(seconds).filter(([, s]) => s > 0);
  return [
    title("Where the time went", `goodput ${missing(goodput) ? "not known" : percent(goodput)} in ${duration(wall)}`),
    by_page ? h("p", { class: "soft small" }, `as this page has seen it since ${clock(began)}`) : "",
    bar(seconds, TIMES),
    legend(Object.fromEntries(spent.map(([n, s]) => [n, `${TIMES[n]} ${duration(s)}, ${percent(s / wall)}`]))),
  ];
}

function chart(name, points, dots, marks) {
  const width = innerWidth < 640 ? 350 : 560, height = 200, left = 46, right = 10, top = 16, bottom = 20;
  const known = points.filter(([, value]) => value !== null), values = [...known, ...dots].map(([, value]) => value);
  const root = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
  if (!values.length) return root;
  const low = Math.min(...values), span = Math.max(...values) - low || Math.abs(low) || 1;
  const first = points[0][0], last = Math.max(points[points.length - 1][0], first + 1);
  const within = (step) => Math.min(Math.max(step, first), last) - first;
  const x = (step) => left + (within(step) / (last - first)) * (width - left - right);
  const y = (value) => height - bottom - ((value - low) / span) * (height - top - bottom);
  for (const value of [0, 1, 2, 3].map((n) => low + (n * span) / 3)) {
    root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  root.append(svg("text", { x: left, y: height - 5 }, integer(first)),
    svg("text", { x: width - right, y: height - 5, "text-anchor": "end" }, integer(last)),
    svg("polyline", { class: "line", points: known.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") }),
    ...dots.map(([step, value]) => svg("circle", { class: "dot", cx: x(step), cy: y(value), r: 3.5 },
      svg("title", {}, `validation of step ${integer(step)}: ${number(value)}`))),
    ...marks.map(({ step, text }) => svg("g", {}, svg("title", {}, text),
      svg("line", { class: "mark", x1: x(step), x2: x(step), y1: top - 4, y2: height - bottom }))));
  const now = svg("text", { class: "now", x: width - right, y: top - 4, "text-anchor": "end" });
  root.append(now);
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect(), away = ([step]) => Math.abs(x(step) - at);
    const at = ((event.clientX - box.left) / box.width) * width;
    const [step, value] = known.reduce((best, point) => (away(point) < away(best) ? point : best), known[0] ?? dots[0]);
    now.textContent = `step ${integer(step)}: ${number(value)}`;
  });
  return root;
}

function curves(job) {
  const curve = job.curve;
  if (!curve?.steps.length) return null;
  const marks = (job.events ?? []).filter((event) => event.fault && !missing(event.step))
    .map((event) => ({ step: event.step, text: `${clock(event.at)} ${event.text}` }));
  const figures = Object.entries(curve.series).map(([name, values]) => {
    const dots = (job.validations ?? []).map(({ step, means }) => [step, means[name]]).filter(([, v]) => !missing(v));
    const newest = values.findLast((value) => value !== null);
    return h("figure", {}, h("figcaption", {}, h("span", {}, name), h("span", { class: "soft" }, number(newest))),
      chart(name, curve.steps.map((step, i) => [step, values[i]]), dots, marks));
  });
  const notes = [
    curve.width > 1 ? `each point is the mean of ${integer(curve.width)} steps` : "",
    curve.source === "looks" ? "as reported since this page began: the table is on another machine" : "",
    marks.length ? "┊ a fault" : "",
    (job.validations ?? []).length ? "○ a validation" : "",
  ];
  const done = job.validated ?? (job.validations ?? []).at(-1), open = job.validating ?? [];
  const means = Object.entries(done?.means ?? {}).map(([name, mean]) => `${name} ${number(mean)}`).join(", ");
  const validation = [
    done ? `Validation of step ${integer(done.step)}: ${means}` : "",
    open.length ? `validating step ${open.map(integer).join(", ")}` : "",
  ].filter(Boolean).join("; ");
  return [
    title("Loss and metrics"), h("div", { class: "charts" }, figures),
    h("p", { class: "soft small" }, notes.filter(Boolean).join("; ")), h("p", { id: "validation" }, validation),
  ];
}

function trainers(job) {
  const found = job.trainers ?? [], loading = job.loading ?? [], slots = job.slots ?? [];
  if (!found.length && !loading.length) return null;
  const free = slots.filter((slot) => !slot.trainer).map((slot) => slot.slot);
  const rows = found.map(({ id, host, pid, step, samples_per_second, slots: held, share, ...one }) => [
    [h("span", { class: "mono" }, id), one.straggler ? h("span", { class: "tag" }, "straggler") : "",
      h("span", { class: "bad small" }, one.unreached.length ? ` cannot reach ${one.unreached.join(", ")}` : ""),
      h("div", { class: "soft small" }, `${host}:${pid} ${one.waiting}`)],
    integer(step), integer(samples_per_second), held.join(", "), bar(share ?? {}, ACTIVITIES),
  ]);
  const columns = [
    ["trainer"], ["step", "number"], ["samples/s", "number"], [slots.length ? "slots" : ""],
    ["its time of late", "split"],
  ];
  const waits = `${free.length} of ${slots.length} slots wait for a trainer: ${free.join(", ")}`;
  return [
    title("Trainers", free.length ? waits : ""),
    table(columns, rows), legend(ACTIVITIES),
    loading.map(({ role, name, what, seconds }) =>
      h("p", { class: "soft small" }, `${role} ${name} loads ${what}, for ${duration(seconds)} so far`)),
  ];
}

function shards(job) {
  const found = job.shards ?? [], newest = job.checkpoint ?? {};
  if (!found.length) return newest.at ? [title("Checkpoint", saved(newest, job.now))] : null;
  const columns = [
    ["pserver"], ["version", "number"], ["updates/s", "number"], ["staleness, at most", "number"],
    ["checkpoint", "number"], ["process", "soft small wide"],
  ];
  const rows = [...Array(Math.max(job.shards_wanted ?? 0, found.length)).keys()].map((index) => {
    const shard = found.find((one) => one.shard === index);
    if (!shard) return [integer(index), h("span", { class: "bad" }, "is not there"), "", "", "", ""];
    const staleness = shard.staleness_max ? `${shard.staleness_mean.toFixed(1)}, ${shard.staleness_max}` : "";
    return [integer(index), integer(shard.version), number(Number(shard.per_second.toPrecision(3))), staleness,
      bytes(newest.shards?.[index]), `${shard.host}:${shard.pid}`];
  });
  return [
    title("Shards", saved(newest, job.now)), table(columns, rows),
    (job.coordinators ?? []).map(({ name, serving }) =>
      h("p", { class: "soft small" }, `coordinator ${name}: ${serving ? "serves" : "stands by"}`)),
  ];
}

function queue(job) {
  const { done, pending, todo } = job.queue ?? {};
  if (missing(todo)) return null;
  const words = { done: `${integer(done)} done`, pending: `${integer(pending)} pending`, todo: `${integer(todo)} to do` };
  return [title("Queue", `epoch ${integer((job.epoch ?? 0) + 1)}`), bar({ done, pending, todo }), legend(words)];
}

function events(job) {
  const found = (job.events ?? []).slice(-EVENTS).reverse();
  if (!found.length) return null;
  const redone = (event) => (event.redone >= 0.05 ? ` + ${duration(event.redone)} redone` : "");
  return [
    title("Events", job.events_kept > found.length ? `the newest ${found.length} of ${job.events_kept}` : ""),
    h("ol", { class: "events" }, found.map((event) => h("li", { class: event.fault ? "fault" : "" },
      h("time", { class: "soft small" }, clock(event.at)),
      h("span", { class: "small" }, h("span", { class: "kind" }, event.kind), ` ${event.who}`),
      h("span", { class: "text" }, event.text),
      h("span", { class: "cost small" }, missing(event.cost) ? "" : `cost ${duration(event.cost)}${redone(event)}`)))),
  ];
}

// -- what is drawn when -----------------------------------------------------------------------------------------------

const SECTIONS = { head, time, curves, trainers, shards, queue, events };
let state = null, answered = null;

function put(id, children) { // a section is left alone while it shows the same, and so are selected texts
  const fresh = fill($(id).cloneNode(false), {}, children ?? []);
  fresh.hidden = children === null;
  if (!fresh.isEqualNode($(id))) $(id).replaceWith(fresh);
}

function draw(told) {
  for (const [id, make] of Object.entries(SECTIONS)) put(id, make(told));
  const part = told.total_steps && told.step ? `${Math.floor((100 * told.step) / told.total_steps)} % ` : "";
  document.title = `${part}${mode(told)} · ${told.job ?? "graphft"}`;
  const links = ["status.json", "metrics"].map((link) => h("a", { href: link }, link));
  put("foot", [h("span", {}, `as of ${clock(told.now)}`), links]);
}

function away(text) {
  document.body.classList.toggle("stale", Boolean(text));
  $("away").hidden = !text;
  $("away").textContent = text;
}

async function look() {
  try {
    const response = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (!response.ok) throw new Error(await response.text());
    const told = await response.json();
    [state, answered] = [told.state, told.now];
    away(told.error ? `The job cannot be looked at now: ${told.error}` : "");
    draw(told);
  } catch (error) {
    if (["complete", "failed"].includes(state)) {
      $("foot").append(" · its launcher has ended");
      return;
    }
    const since = answered ? ` since ${clock(answered)}` : "";
    away(`No answer${since}: the launcher, or the page's process, has ended or is out of reach. What is below is old; `
      + "graphft page shows what became of the job.");
  }
  if (document.hidden) document.addEventListener("visibilitychange", look, { once: true });
  else setTimeout(look, EVERY);
}

look();
