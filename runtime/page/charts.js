// A curve over steps as inline SVG: axes, marks of faults, and the value under the pointer.

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children); // strings become text, never markup
  return element;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 7 : 4 });
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const digit of high / low > 50 ? [1] : [1, 2, 5]) {
      const at = digit * 10 ** power;
      if (at >= low && at <= high) found.push(at);
    }
  return found.length > 1 ? found : [low, high];
}

// `points`: [step, value or null]. `dots`: [step, value] of validations. `marks`: [{step, text}]. `hover`: the step that the pointer is at, kept by the caller.
export function chart({ points, dots = [], marks, width, height, log, label, hover, onHover }) {
  const values = [...points, ...dots].map(([, value]) => value).filter((value) => value !== null && (!log || value > 0));
  const root = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  if (!values.length) return root;
  const left = 46, right = 10, top = 16, bottom = 20;
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { const pad = Math.abs(low) * 0.05 || 1; if (!log) low -= pad; high += pad; }
  if (log && low === high) high = low * 2;
  const first = points[0][0], last = Math.max(points[points.length - 1][0], first + 1);
  const x = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const scale = log ? Math.log10 : (value) => value;
  const y = (value) => top + ((scale(high) - scale(value)) / (scale(high) - scale(low))) * (height - top - bottom);

  for (const at of log ? decades(low, high) : ticks(low, high, height > 180 ? 5 : 4)) {
    root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(at), y2: y(at) }));
    root.append(svg("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, number(at)));
  }
  for (const at of ticks(first, last, width / 110).filter(Number.isInteger))
    root.append(svg("text", { x: x(at), y: height - 5, "text-anchor": x(at) > width - 30 ? "end" : "middle" }, at.toLocaleString("en")));

  const runs = [[]]; // a value that is missing parts the line
  for (const [step, value] of points) {
    if (value === null || (log && value <= 0)) runs.push([]);
    else runs[runs.length - 1].push([x(step), y(value)]);
  }
  for (const run of runs.filter((run) => run.length)) {
    const path = run.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
    if (run.length === 1) root.append(svg("circle", { class: "at", cx: run[0][0], cy: run[0][1], r: 3 }));
    else {
      root.append(svg("path", { class: "area", d: `${path}L${run[run.length - 1][0].toFixed(1)} ${height - bottom}L${run[0][0].toFixed(1)} ${height - bottom}Z` }));
      root.append(svg("path", { class: "line", d: path }));
    }
  }
  for (const [step, value] of dots.filter(([, value]) => !log || value > 0)) {
    const at = Math.min(Math.max(step, first), last);
    root.append(svg("circle", { class: "dot", cx: x(at), cy: y(value), r: 3.5 }, svg("title", {}, `validation of step ${step.toLocaleString("en")}: ${number(value)}`)));
  }
  for (const { step, text } of marks) {
    if (step < first || step > last) continue;
    const at = x(step);
    root.append(svg("g", {}, svg("title", {}, text),
      svg("line", { class: "mark", x1: at, x2: at, y1: top - 4, y2: height - bottom }),
      svg("path", { class: "flag", d: `M${at - 5} ${top - 12}h10l-5 8z` })));
  }
  const cross = svg("g");
  root.append(cross);
  const show = (step) => {
    cross.replaceChildren();
    if (step === null || step === undefined) return;
    let best = null;
    for (const point of points) if (point[1] !== null && (best === null || Math.abs(point[0] - step) < Math.abs(best[0] - step))) best = point;
    if (best === null || (log && best[1] <= 0)) return;
    const [a, b] = [x(best[0]), y(best[1])];
    cross.append(svg("line", { class: "cross", x1: a, x2: a, y1: top, y2: height - bottom }), svg("circle", { class: "at", cx: a, cy: b, r: 4 }));
    const end = a > width / 2;
    cross.append(svg("text", { class: "now", x: end ? a - 8 : a + 8, y: Math.max(top + 10, b - 8), "text-anchor": end ? "end" : "start" }, `step ${best[0].toLocaleString("en")}: ${number(best[1])}`));
  };
  const move = (event) => {
    const box = root.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const step = first + ((at - left) / (width - left - right)) * (last - first);
    onHover(step);
    show(step);
  };
  root.addEventListener("pointermove", move);
  root.addEventListener("pointerdown", move);
  root.addEventListener("pointerleave", () => { onHover(null); show(null); });
  show(hover);
  return root;
}
