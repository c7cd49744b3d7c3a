// Draws status.json, each second, as long as somebody looks. All texts go in as text: an event may hold anything.

import { chart, number } from "./charts.js";

const EVERY = 1000, PATIENCE = 15000, EVENTS = 60, MOST_SLOTS = 24;
const WORDS = {
  productive: "new steps", redone: "steps computed again", checkpointing: "checkpoints",
  validating: "waiting for validations", data: "waiting for data", straggler: "waiting for a straggler", recovering: "recovering", starting: "starting", idle: "idle",
};
const ACTIVITIES = { computing: "computes", data: "waits for data", shards: "waits for parameters", idle: "between batches, or idle" };
const MODES = {
  training: "Training", recovering: "Recovering", starting: "Starting", idle: "Waiting",
  checkpointing: "Writing the last checkpoint and the model", validating: "Waiting for a validation",
};
const $ = (id) => document.getElementById(id);

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "width") element.style.width = value; // not as an attribute: the policy refuses inline styles
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// -- words ------------------------------------------------------------------------------------------------------------

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.05) return seconds > 0 ? "< 0.1 s" : "0 s";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = seconds / 3600;
  return hours < 48 ? `${Math.floor(hours)} h ${Math.round((hours % 1) * 60)} min` : `${(hours / 24).toFixed(1)} days`;
}
const ago = (at, now) => (at ? `${duration(Math.max(0, now - at))} ago` : "–");
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const integer = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
const percent = (part) => (part > 0 && part < 5e-4 ? "< 0.1 %" : `${(100 * part).toFixed(part > 0 && part < 0.0995 ? 1 : 0)} %`);
function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (count < 999.5) return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

function mode(job) {
  if (job.state === "running") return job.time ? job.time.mode : "training";
  return job.state;
}

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
    default: return job.step === undefined || job.step === null ? "Nothing is known of it so far" : `Not known whether it runs; its newest checkpoint is at ${at}`;
  }
}

function end(job) {
  const time = job.time;
  if (job.state === "complete") return time ? `took ${duration(time.wall)}${time.seconds.idle > 0 ? ", with what was between the launches" : ""}` : "";
  if (job.state !== "running") return "";
  if (mode(job) === "recovering") {
    const cause = (job.events ?? []).findLast((event) => event.cost !== undefined);
    return (cause ? `for ${duration(cause.cost)}: ${cause.text}; ` : "") + "the time left is not known so long";
  }
  if (mode(job) === "checkpointing") return "done in a moment";
  if (!job.total_steps) return "time left: not known, its passes are asked for one by one";
  if (time === null) return "time left: not known";
  if (time.seconds_left === null) return "time left: not known yet";
  return `done in about ${duration(time.seconds_left)}, at ${clock(job.now + time.seconds_left)}`;
}

// -- sections ---------------------------------------------------------------------------------------------------------

function head(job) {
  const what = mode(job), part = job.total_steps && job.step !== null ? job.step / job.total_steps : null;
  const last = job.curve?.series.loss?.findLast((value) => value !== null) ?? null; // of a job that runs no more
  const figures = [
    ["loss", number(job.loss ?? last)],
    ...Object.entries(job.learning_rates ?? {}).slice(0, 2).map(([name, rate]) => [name, number(rate)]),
    ...Object.entries(job.metrics ?? {}).slice(0, 4).map(([name, value]) => [name, number(value)]),
    ["steps/s", what === "training" && job.time?.steps_per_second ? number(Number(job.time.steps_per_second.toPrecision(3))) : null],
    ["samples/s", job.samples_per_second ? integer(job.samples_per_second) : null],
    ["epoch", job.passes ? `${Math.min((job.pass ?? job.passes - 1) + 1, job.passes)} of ${integer(job.passes)}` : null],
    ["generation", job.generation ?? null],
  ].filter(([, value]) => value !== null && value !== "–");
  const notices = [
    [job.failure, "bad"],
    [job.etcd_full ? "etcd is full: its quota is used up, and the job waits." : "", "bad"],
    [job.waiting ? `It waits for ${job.waiting}.` : "", "mild"],
    ...Object.entries(job.without_room ?? {}).map(([place, names]) => [`${names.join(", ")}: ${place}`, "mild"]),
    [job.skipped_steps ? `${job.skipped_steps} steps were left out as not finite.` : "", "mild"],
    [job.discarded ? `${job.discarded} batches were discarded.` : "", "mild"],
    ...(job.lost ?? []).map((text) => [text, "mild"]),
    ...(job.curve?.unread ? [[job.curve.unread, "mild"]] : []),
    [job.continued ? `It went on in ${job.continued}.` : "", "mild"],
  ].filter(([text]) => text);
  return [
    h("div", { class: "row between" },
      h("h1", { class: "pill" }, h("span", { class: `dot ${what}`, "aria-hidden": "true" }), String(job.job ?? "graphft")),
      h("span", { class: "soft small mono" }, String(job.folder ?? ""))),
    h("p", { class: "headline" }, headline(job)),
    h("p", { class: "soft" , id: "end" }, end(job)),
    part === null ? "" : h("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * part), "aria-valuemin": 0, "aria-valuemax": 100 }, h("i", { width: `${100 * part}%` })),
    h("dl", { class: "figures" }, figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
    notices.map(([text, kind]) => h("p", { class: `notice ${kind}` }, String(text))),
    job.model ? h("p", { class: "small soft" }, "model: ", h("span", { class: "mono" }, String(job.model))) : "",
  ];
}

function stacked(parts, thin = false, label = "") {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  return h("div", { class: thin ? "bar thin" : "bar", role: "img", "aria-label": label },
    parts.filter(([, value]) => value > 0).map(([name, value]) => h("i", { class: `c-${name}`, width: `${(100 * value) / whole}%`, title: `${name}: ${percent(value / whole)}` })));
}

function time(job) {
  if (!job.time || !job.time.wall) return null;
  const { seconds, wall, goodput } = job.time, parts = Object.entries(seconds);
  const said = parts.filter(([, s]) => s > 0).map(([name, s]) => `${WORDS[name]} ${percent(s / wall)}`).join(", ");
  return [
    h("div", { class: "row between" }, h("h2", {}, "Where the time went"),
      goodput === null ? h("span", { class: "soft" }, `goodput in ${duration(wall)}: too short to tell`)
        : h("span", {}, h("span", { class: "goodput" }, percent(goodput)), h("span", { class: "soft" }, ` goodput in ${duration(wall)}`))),
    job.time.by_page ? h("p", { class: "soft small" }, `as this page has seen it since ${clock(job.time.began)}: no launcher keeps this job's time`) : "",
    stacked(parts, false, said),
    h("ul", { class: "legend" }, parts.map(([name, s]) => h("li", { class: s > 0 ? "" : "none" },
      h("b", { class: `c-${name}` }), h("span", {}, WORDS[name]), h("span", { class: "soft" }, duration(s)), h("span", {}, percent(s / wall))))),
  ];
}

const view = { log: false, hover: {} };
function curves(job) {
  const curve = job.curve;
  if (!curve || !curve.steps.length) return null;
  const marks = (job.events ?? []).filter((event) => event.fault && event.step !== null).map((event) => ({ step: event.step, text: `${clock(event.at)} ${event.text}` }));
  const wide = Math.max(280, $("curves").clientWidth - (innerWidth > 640 ? 36 : 26) || 600);
  const names = Object.keys(curve.series), two = wide > 690 && names.length > 1, pair = names.length === 2; // side by side
  const figures = Object.entries(curve.series).map(([name, values], index) => {
    const half = two && (index || pair), width = half ? (wide - 20) / 2 : wide;
    const height = half && !pair ? 160 : wide > 500 ? 240 : index ? 150 : 210;
    const newest = values.findLast((value) => value !== null);
    return h("figure", {},
      h("figcaption", {}, h("span", {}, name), h("span", { class: "soft" }, newest === undefined ? "" : number(newest))),
      chart({
        points: curve.steps.map((step, i) => [step, values[i]]), dots: dots(job, name), marks, width, height, log: view.log && values.every((v) => v === null || v > 0),
        label: `${name} over steps, now ${number(newest ?? null)}`, hover: view.hover[name], onHover: (step) => { view.hover[name] = step; },
      }));
  });
  const notes = [
    curve.width > 1 ? `each point is the mean of ${integer(curve.width)} steps` : "",
    curve.source === "looks" ? "as the first pserver reported it since this page began: its table is on another machine" : "",
    curve.behind ? "a part of its table is still to be read" : "",
    curve.nonfinite ? `${integer(curve.nonfinite)} values were not finite` : "",
    marks.length ? "▼ a fault" : "",
    (job.validations ?? []).length ? "○ a validation" : "",
  ].filter(Boolean).join("; ");
  return [
    h("div", { class: "row between" }, h("h2", {}, figures.length > 1 ? "Loss and metrics" : "Loss"),
      h("button", { type: "button", "aria-pressed": String(view.log), onclick: () => { view.log = !view.log; drawn.delete("curves"); draw(shown); } }, "log scale")),
    h("div", { class: `charts${two ? " two" : ""}${pair ? " pair" : ""}` }, figures),
    h("p", { class: "soft small" }, notes),
    validation(job),
  ];
}

const dots = (job, name) => (job.validations ?? []).map(({ step, means }) => [step, means[name] ?? null]).filter(([, value]) => value !== null);

function validation(job) {
  const found = job.validated ?? (job.validations ?? []).at(-1), open = job.validating ?? [];
  if (!found && !open.length) return "";
  const said = found ? Object.entries(found.means).map(([name, mean]) => `${name} ${mean === null ? "not finite" : number(mean)}`).join(", ") || "not made" : "";
  return h("p", { id: "validation" }, found ? `Validation of step ${integer(found.step)}: ${said}` : "",
    open.length ? h("span", { class: "soft" }, `${found ? "; " : ""}validating step ${open.map(integer).join(", ")}`) : "");
}

function trainers(job) {
  const found = job.trainers ?? [], loading = job.loading ?? [], slots = job.slots ?? [];
  if (!found.length && !loading.length) return null;
  const grid = slots.length <= MOST_SLOTS ? slots : [];
  const free = slots.filter((slot) => !slot.trainer).map((slot) => slot.slot);
  const rows = found.map((trainer) => {
    const share = trainer.share ?? {};
    const said = Object.keys(ACTIVITIES).filter((name) => share[name]).map((name) => `${ACTIVITIES[name]} ${percent(share[name])}`).join(", ");
    const notes = [
      trainer.straggler ? h("span", { class: "tag late" }, "straggler") : "",
      trainer.waiting ? h("span", { class: "warn small" }, ` ${trainer.waiting}`) : "",
      trainer.unreached.length ? h("span", { class: "bad small" }, ` cannot reach ${trainer.unreached.join(", ")}`) : "",
    ];
    const [number_, ...rest] = trainer.id.split("-");
    return h("tr", {}, h("td", { class: "who" }, h("span", { class: "mono" }, number_, h("span", { class: "wide soft" }, rest.length ? `-${rest.join("-")}` : "")), " ", notes, h("div", { class: "soft small wide" }, `${trainer.host}:${trainer.pid}`)),
      h("td", { class: "number" }, integer(trainer.step)), h("td", { class: "number" }, integer(trainer.samples_per_second)),
      h("td", { class: "split" }, stacked(Object.keys(ACTIVITIES).map((name) => [name, share[name] ?? 0]), true, said)),
      grid.length ? grid.map((slot) => h("td", { class: "slot" }, h("i", { class: slot.trainer === trainer.id ? "held" : "free", title: `slot ${slot.slot}` }))) : slots.length ? h("td", {}, trainer.slots.join(", ")) : "");
  });
  return [
    h("h2", {}, slots.length ? "Slots × trainers" : "Trainers"),
    found.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "trainer"), h("th", { class: "number" }, "step"), h("th", { class: "number" }, "samples/s"), h("th", {}, "its time of late"),
      grid.length ? grid.map((slot) => h("th", { class: "slot" }, String(slot.slot))) : slots.length ? h("th", {}, "slots") : "")), h("tbody", {}, rows))) : "",
    h("ul", { class: "legend inline small soft" }, Object.entries(ACTIVITIES).map(([name, words]) => h("li", {}, h("b", { class: `c-${name}` }), words))),
    free.length && found.length ? h("p", { class: "bad small" }, `${free.length} of ${slots.length} slots wait for a trainer: ${free.slice(0, 20).join(", ")}`) : "",
    loading.map((one) => h("p", { class: "soft small" }, `${one.role} ${one.name} loads ${one.what}, for ${duration(one.seconds)} so far`)),
  ];
}

function shards(job) {
  const found = job.shards ?? [], saved = job.checkpoint ?? {};
  if (!found.length) {
    if (!saved.at) return null;
    return [h("h2", {}, "Checkpoint"), h("p", {}, `step ${integer(saved.step)}, ${ago(saved.at, job.now)}, ${bytes(saved.bytes)}`)];
  }
  const missing = [...Array(job.shards_wanted ?? 0).keys()].filter((index) => !found.some((shard) => shard.shard === index));
  const stale = found.some((shard) => shard.staleness.some((n) => n));
  return [
    h("div", { class: "row between" }, h("h2", {}, "Shards"), h("span", { class: "soft small" },
      saved.step ? `checkpoint of step ${integer(saved.step)}` + (saved.at ? `, ${ago(saved.at, job.now)}, ${bytes(saved.bytes)}` : "") : "no checkpoint so far")),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "pserver"), h("th", { class: "number" }, "version"), h("th", { class: "number" }, "updates/s"),
      stale ? h("th", { class: "number" }, "staleness, mean") : "", stale ? h("th", { class: "number" }, "at most") : "", h("th", { class: "number" }, "checkpoint"), h("th", { class: "wide" }, "process"))),
      h("tbody", {}, missing.map((index) => h("tr", {}, h("td", { class: "bad" }, String(index)), h("td", { class: "bad", colspan: 7 }, "is not there"))), found.map((shard) => h("tr", {}, h("td", {}, String(shard.shard)), h("td", { class: "number" }, integer(shard.version)),
        h("td", { class: "number" }, number(Number((shard.per_second ?? 0).toPrecision(3)))),
        stale ? h("td", { class: "number" }, shard.staleness_mean.toFixed(1)) : "", stale ? h("td", { class: "number" }, integer(shard.staleness_max)) : "",
        h("td", { class: "number" }, bytes(saved.shards?.[String(shard.shard)])), h("td", { class: "soft small wide" }, `${shard.host}:${shard.pid}`)))))),
    (job.coordinators ?? []).map((one) => h("p", { class: "soft small" }, `coordinator ${one.name}: ${one.serving ? "serves" : "stands by"}`)),
  ];
}

function queue(job) {
  const counts = Object.entries(job.queue ?? {});
  if (!counts.length) return null;
  const order = ["done", "pending", "todo"], parts = order.filter((name) => name in job.queue).map((name) => [name, job.queue[name]]);
  return [
    h("div", { class: "row between" }, h("h2", {}, "Queue"), h("span", { class: "soft small" }, `chunks of epoch ${integer((job.pass ?? 0) + 1)}`)),
    stacked(parts, true, counts.map(([name, n]) => `${n} ${name}`).join(", ")),
    h("ul", { class: "legend inline" }, parts.map(([name, n]) => h("li", {}, h("b", { class: `c-${name}` }), h("span", {}, `${integer(n)} ${name}`)))),
  ];
}

function events(job) {
  const found = (job.events ?? []).slice(-EVENTS).reverse();
  if (!found.length) return null;
  return [
    h("div", { class: "row between" }, h("h2", {}, "Events"), h("span", { class: "soft small" }, job.events_kept > found.length ? `the newest ${found.length} of ${job.events_kept}` : "")),
    h("ol", { class: "events" }, found.map((event) => h("li", { class: event.fault ? "fault" : "" },
      h("time", { class: "soft small" }, clock(event.at)),
      h("span", { class: "small" }, h("span", { class: "kind" }, event.kind), h("span", { class: "soft" }, ` ${event.who}`)),
      h("span", { class: "text" }, event.text),
      h("span", { class: "cost small warn" }, event.cost === undefined ? "" : `cost ${duration(event.cost)}` + (event.redone >= 0.05 ? ` + ${duration(event.redone)} redone` : "")))))
  ];
}

function list(found) {
  return [h("h2", {}, "Jobs"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "job"), h("th", {}, "state"), h("th", { class: "number" }, "step"), h("th", { class: "wide" }, "folder"))),
    h("tbody", {}, found.map((job) => h("tr", {}, h("td", {}, h("a", { href: `job/${encodeURIComponent(job.link)}/` }, String(job.link))),
      h("td", {}, h("span", { class: "pill" }, h("span", { class: `dot ${job.state === "running" ? "training" : job.state}` }), job.state)),
      h("td", { class: "number" }, integer(job.step) + (job.total_steps ? ` of ${integer(job.total_steps)}` : "")), h("td", { class: "soft small mono wide" }, String(job.folder ?? "")))))))];
}

// -- what is drawn when ------------------------------------------------------------------------------------------------

const SECTIONS = {
  head: [head, null], time: [time, (job) => [job.time]], curves: [curves, (job) => [job.curve, innerWidth, (job.events ?? []).length, job.validated, job.validating, job.validations]],
  trainers: [trainers, (job) => [job.trainers, job.loading, job.slots]], shards: [shards, null], queue: [queue, (job) => [job.queue, job.pass]],
  events: [events, (job) => [job.events]],
};
const drawn = new Map(); // what a section shows: it is left alone while that stays, and so are selected texts
let shown = null;

function draw(job) {
  if (!job) return;
  shown = job;
  for (const [id, [make, uses]] of Object.entries(SECTIONS)) {
    const key = uses ? JSON.stringify(uses(job)) : null;
    if (key !== null && drawn.get(id) === key) continue;
    drawn.set(id, key);
    const element = $(id);
    element.hidden = false; // its width is asked for
    const children = make(job);
    element.hidden = children === null;
    element.replaceChildren(...(children ?? []).flat().filter((child) => child !== ""));
  }
  const part = job.total_steps && job.step ? `${Math.floor((100 * job.step) / job.total_steps)} % ` : "";
  document.title = `${part}${mode(job)} · ${job.job ?? "graphft"}`;
}

function drawList(told) {
  $("head").replaceChildren(h("h1", {}, "graphft"));
  $("jobs").hidden = false;
  $("jobs").replaceChildren(...list(told.jobs));
  document.title = `${told.jobs.length} jobs · graphft`;
}

function foot(told) {
  const links = ["status.json", ...(location.pathname === "/" ? ["metrics"] : [])];
  $("foot").replaceChildren(h("span", {}, `as of ${clock(told.now)}`), ...links.map((link) => h("a", { href: link }, link)),
    ...(location.pathname === "/" ? [] : [h("a", { href: "../../" }, "all jobs")]));
}

function away(text) {
  document.body.classList.toggle("stale", Boolean(text));
  $("away").hidden = !text;
  $("away").textContent = text;
}

let answered = null;
async function look() {
  const stop = new AbortController(), timer = setTimeout(() => stop.abort(), PATIENCE);
  try {
    const response = await fetch("status.json", { cache: "no-store", signal: stop.signal });
    if (!response.ok) throw new Error(await response.text());
    const told = await response.json();
    answered = told.now;
    away(told.error ? `The job cannot be looked at now: ${told.error}` : "");
    if (told.jobs) drawList(told);
    else draw(told);
    foot(told);
  } catch (error) {
    const over = shown && ["complete", "failed"].includes(shown.state);
    if (over) $("foot").append(" · its launcher has ended");
    else away(`No answer${answered ? ` since ${clock(answered)}` : ""}: the launcher, or the page's process, has ended or is out of reach. What is below is old; graphft page shows what became of the job.`);
    if (over) return;
  } finally {
    clearTimeout(timer);
  }
  if (document.hidden) document.addEventListener("visibilitychange", look, { once: true });
  else setTimeout(look, EVERY);
}

addEventListener("resize", () => draw(shown));
look();
