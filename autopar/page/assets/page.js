"use strict";
// Draws the page from its two JSON elements: the figures, and what is drawn besides.
const figures = JSON.parse(document.getElementById("autopar").textContent);
const drawn = JSON.parse(document.getElementById("drawn").textContent);
const PIECES = ["#3b7dd8", "#e8973a", "#2f9e77", "#d6453d", "#8f6ac8", "#b9a22c", "#4bb3c4", "#c4639d"];
const STACK = ["#3b7dd8", "#8f6ac8", "#2f9e77", "#4bb3c4", "#b9a22c", "#c4639d", "#e8973a", "#d6453d"];

// -- elements ----------------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "path", "line", "text", "title", "g"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}
const css = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const count = number => number.toLocaleString("en-US");

function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
    if (Math.abs(seconds) >= scale || unit === "µs") return `${(seconds / scale).toFixed(seconds ? 3 : 0)} ${unit}`;
}
function bytes(number) {
  if (number === null || number === undefined) return "–";
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (number >= scale) return `${(number / scale).toFixed(1)} ${unit}`;
  return `${Math.round(number)} bytes`;
}

function section(id, title, ...content) {
  document.getElementById("main").append(element("section", { id }, element("h2", {}, title), ...content));
  document.getElementById("nav").append(element("a", { href: `#${id}` }, title));
}
const LONG = 24; // letters of a remark that stands in its row; a longer one stands below it
function table(columns, rows, classes = []) {
  const names = Object.keys(columns);
  const numeric = name => (columns[name] === "number" ? { class: "number" } : columns[name] === "line" ? { class: "line" } : {});
  const head = element("tr", {}, ...names.map(name => element("th", numeric(name), name)));
  const body = rows.flatMap((row, k) => {
    const below = names.map((name, c) => (columns[name] === "remark" && (row[c] ?? "").length > LONG ? c : -1)).filter(c => c >= 0);
    const made = element("tr", { class: `${classes[k] ?? ""}${below.length ? " joined" : ""}` },
      ...names.map((name, c) => element("td", numeric(name), below.includes(c) ? "" : String(row[c] ?? ""))));
    return [made, ...below.map(c => element("tr", { class: "below" }, element("td", { colspan: names.length }, element("div", {}, row[c]))))];
  });
  const scroll = element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  const hint = element("div", { class: "hint", hidden: "" }, "the table goes on to the right: scroll it");
  new ResizeObserver(() => { hint.hidden = scroll.scrollWidth <= scroll.clientWidth + 1; }).observe(scroll);
  return element("div", {}, hint, scroll);
}

// -- layouts -----------------------------------------------------------------------------------------------------------

const MOST = 16; // rows and columns of a grid that are drawn
function grid(number) {
  const { text, mesh, split, pending } = drawn.grids[number];
  if (!mesh.length) return null;
  const sizes = mesh.map(([, size]) => size), names = mesh.map(([name]) => name);
  const rows = mesh.length > 1 ? sizes[0] : 1, columns = sizes.slice(mesh.length > 1 ? 1 : 0).reduce((a, b) => a * b, 1);
  const cell = 9, shownRows = Math.min(rows, MOST), shownColumns = Math.min(columns, MOST);
  const svg = element("svg", { class: "grid", width: shownColumns * (cell + 1), height: shownRows * (cell + 1), role: "img" },
    element("title", {}, `${text} on ${mesh.map(pair => pair.join("=")).join(" ")}: one cell a rank, one colour a piece`));
  for (let r = 0; r < shownRows; r++)
    for (let c = 0; c < shownColumns; c++) {
      let rest = r * columns + c;
      const at = {};
      for (let k = sizes.length - 1; k >= 0; k--) { at[names[k]] = rest % sizes[k]; rest = Math.floor(rest / sizes[k]); }
      const piece = split.reduce((so, axis) => so * sizes[names.indexOf(axis)] + at[axis], 0);
      const where = `rank ${r * columns + c} (${names.map(name => `${name}=${at[name]}`).join(" ")})`;
      const what = split.length ? `piece ${piece}` : "the whole value";
      const partial = pending.length ? `, a partial value over ${pending.join(" and ")}` : "";
      const box = { x: c * (cell + 1), y: r * (cell + 1), width: cell, height: cell };
      svg.append(element("rect", { ...box, fill: PIECES[piece % PIECES.length], "fill-opacity": split.length ? 0.9 : 0.35 },
        element("title", {}, `${where}: ${what}${partial}`)));
      if (pending.length) svg.append(element("path", { d: `M${box.x} ${box.y + cell}L${box.x + cell} ${box.y}`, stroke: css("ink"), "stroke-width": 1.5 }));
    }
  return svg;
}
const value = (label, number) => element("div", { class: "value" }, element("span", { class: "label" }, label), grid(number),
  element("span", { class: "type" }, drawn.grids[number].text));

function at(module) { // the transfers of a module
  const path = module.path.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
  return figures.transfers.filter(row => row.module === path && row.transfer !== "send");
}
const openedBy = size => size <= 80;
function tree(module, depth, all) {
  const inside = module.children.length || module.parameters.length || module.result !== null;
  const name = module.name || "the model", times = module.count > 1 ? ` × ${module.count}` : "";
  const cost = `ops ${time(module.seconds)}` + (module.transfers ? `, transfers ${time(module.transfers)}` : "");
  const own = element("details", module.children.length ? {} : { class: "leaf" },
    element("summary", {}, element("span", { class: "name" }, name), element("span", { class: "times" }, times),
      element("span", { class: "cost" }, cost)));
  if (inside && (all || depth < 2)) own.open = true;
  for (const [label, number] of module.parameters) own.append(value(label, number));
  if (module.result !== null) own.append(value("→", module.result));
  const lines = Map.groupBy ? Map.groupBy(at(module), row => row.source) : at(module).reduce((so, row) => so.set(row.source, [...(so.get(row.source) ?? []), row]), new Map());
  for (const [source, rows] of lines) // a line of the user stands once, below its transfers
    own.append(element("div", { class: "moved" }, ...rows.map(row => element("div", {}, `${row.times} × ${row.transfer}${row.axis ? ` over ${row.axis}` : ""} ` +
      `in ${row.phase}: ${bytes(row.bytes)}, ${time(row.seconds)}`)), source ? element("div", { class: "soft" }, `— ${source}`) : ""));
  for (const child of module.children) own.append(tree(child, depth + 1, all));
  return own;
}
const size = module => 1 + module.children.reduce((sum, child) => sum + size(child), 0);

// -- memory ------------------------------------------------------------------------------------------------------------

function legend(rows) {
  return element("div", { class: "legend" }, ...rows.map(([name, colour]) =>
    element("span", {}, element("i", { style: `background:${colour}` }), name)));
}
function sized(draw) { // a picture in the pixels of the screen, drawn anew when its width changes
  const frame = element("div", { class: "frame" });
  let drawnWidth = 0;
  new ResizeObserver(() => {
    const width = Math.round(frame.clientWidth);
    if (width && width !== drawnWidth) { drawnWidth = width; frame.replaceChildren(draw(width)); }
  }).observe(frame);
  return frame;
}
const phaseColours = { forward: "forward", backward: "backward", update: "weight" };
const phaseColour = phase => css(phaseColours[phase] ?? "start");
function phasesOf(points) { // runs of one phase: its name, and its first point
  return points.flatMap((point, p) => (p && point.phase === points[p - 1].phase ? [] : [[point.phase, p]]));
}
function regionsOf(runs, width) { // without the runs of a few ops inside of another phase
  const regions = [];
  for (const [phase, begin, end] of runs) {
    const last = regions.at(-1);
    if (last && (last[0] === phase || end - begin < width * 0.03)) last[2] = end;
    else regions.push([phase, begin, end]);
  }
  return regions;
}
function memoryChart({ kinds, points }) {
  const tip = element("p", { class: "soft" }, "Point at the picture to read an op.");
  const phases = [...new Set(points.map(point => point.phase))];
  return [legend(kinds.map((kind, k) => [kind, STACK[k % STACK.length]])), sized(width => memoryPicture(kinds, points, width, tip)),
    legend(phases.map(phase => [phase, phaseColour(phase)])), tip];
}
function memoryPicture(kinds, points, width, tip) {
  const height = 260, left = 70, base = height - 30;
  const most = Math.max(...points.map(point => point.bytes.reduce((a, b) => a + b, 0))) || 1;
  const x = k => left + (width - left) * k / Math.max(1, points.length - 1), y = number => base - (base - 10) * number / most;
  const svg = element("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" },
    element("title", {}, "bytes of a rank from op to op, by kind"));
  let below = points.map(() => 0);
  kinds.forEach((kind, k) => {
    const above = points.map((point, p) => below[p] + point.bytes[k]);
    const d = "M" + above.map((number, p) => `${x(p).toFixed(1)} ${y(number).toFixed(1)}`).join("L") +
      "L" + below.map((number, p) => `${x(p).toFixed(1)} ${y(number).toFixed(1)}`).reverse().join("L") + "Z";
    svg.append(element("path", { d, fill: STACK[k % STACK.length], "fill-opacity": 0.85 }, element("title", {}, kind)));
    below = above;
  });
  const label = (tx, ty, text, anchor = "start") =>
    element("text", { x: tx, y: ty, fill: css("soft"), "font-size": 12, "text-anchor": anchor }, text);
  for (const part of [0, 0.5, 1]) svg.append(label(left - 6, y(most * part) + 4, bytes(most * part), "end"));
  const runs = phasesOf(points).map(([phase, p], k, all) => [phase, x(p), k + 1 < all.length ? x(all[k + 1][1]) : width]);
  for (const [phase, begin, end] of runs) // a strip in the colour of each phase
    svg.append(element("rect", { x: begin, y: base + 3, width: Math.max(end - begin, 0.5), height: 6, fill: phaseColour(phase) }, element("title", {}, phase)));
  regionsOf(runs, width).forEach(([phase, begin, end], k) => { // and its name
    if (k) svg.append(element("line", { x1: begin, x2: begin, y1: 10, y2: base, stroke: css("soft"), "stroke-dasharray": "3 3" }));
    if (end - begin >= 7 * phase.length) svg.append(label((begin + end) / 2, height - 6, phase, "middle"));
  });
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const p = Math.round(((event.clientX - box.left) / box.width * width - left) / (width - left) * (points.length - 1));
    const point = points[Math.min(points.length - 1, Math.max(0, p))];
    tip.textContent = `${point.op} in ${point.module || "the model"}, ${point.phase}: ` +
      kinds.map((kind, k) => [kind, point.bytes[k]]).filter(row => row[1]).map(([kind, n]) => `${kind} ${bytes(n)}`).join(", ");
  });
  return svg;
}
function stepsChart(rows) { // the memory of the ranks of a pipeline over time
  return [legend(rows.map((row, k) => [`position ${row.rank}`, PIECES[k % PIECES.length]])), sized(width => stepsPicture(rows, width))];
}
function stepsPicture(rows, width) {
  const height = 220, left = 70, base = height - 22;
  const end = Math.max(...rows.map(row => row.times.at(-1) ?? 0)) || 1;
  const most = Math.max(...rows.map(row => row.fixed + Math.max(0, ...row.bytes))) || 1;
  const x = t => left + (width - left) * t / end, y = number => base - (base - 10) * number / most;
  const svg = element("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" },
    element("title", {}, "bytes of the ranks of the pipeline over time"));
  rows.forEach((row, k) => {
    let d = "", last = null;
    row.times.forEach((t, p) => {
      const level = y(row.fixed + row.bytes[p]).toFixed(1);
      d += last === null ? `M${x(t).toFixed(1)} ${level}` : `H${x(t).toFixed(1)}V${level}`;
      last = level;
    });
    svg.append(element("path", { d, fill: "none", stroke: PIECES[k % PIECES.length], "stroke-width": 1.5 }));
  });
  for (const part of [0, 0.5, 1]) svg.append(element("text", { x: left - 6, y: y(most * part) + 4, fill: css("soft"), "font-size": 12, "text-anchor": "end" }, bytes(most * part)));
  return svg;
}

// -- timelines ---------------------------------------------------------------------------------------------------------

function timelineChart({ names, kinds, tracks }) {
  const colours = { compute: css("compute"), start: css("start"), message: css("message"), exposed: css("exposed"),
    forward: css("forward"), backward: css("backward"), "weight gradient": css("weight") };
  const lanes = [];
  for (const track of tracks) {
    lanes.push({ title: track.name + (track.left ? ` (the first ${count(track.lanes.reduce((s, l) => s + l.slices.length, 0))} of ${count(track.left)} more)` : "") });
    for (const lane of track.lanes) if (lane.slices.length) lanes.push(lane);
  }
  const lastEnd = Math.max(...lanes.flatMap(lane => (lane.slices ?? []).slice(-50).map(s => s[1] + s[2])),
    ...lanes.map(lane => (lane.slices ?? []).reduce((m, s) => Math.max(m, s[1] + s[2]), 0)));
  const ROW = 22, height = lanes.length * ROW + 24;
  const canvas = element("canvas", { class: "chart", style: `height:${height}px`, role: "img", "aria-label": "timeline of a step" });
  const tip = element("div", { id: "tip" }, "Drag to move, use the buttons or Ctrl and the wheel to zoom, point at a slice to read it.");
  let from = 0, to = lastEnd * 1.01 || 1;
  const left = () => Math.min(120, canvas.clientWidth * 0.25);
  const scale = () => (canvas.clientWidth - left()) / (to - from);
  function draw() {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (!width) return;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    lanes.forEach((lane, k) => {
      const top = k * ROW;
      pen.fillStyle = css("soft");
      if (!lane.slices) { pen.font = "bold 12px system-ui, sans-serif"; pen.fillText(lane.title, 4, top + ROW / 2); pen.font = "11px system-ui, sans-serif"; return; }
      pen.fillText(lane.name.slice(0, 18), 4, top + ROW / 2);
      pen.save(); pen.beginPath(); pen.rect(left(), top, width - left(), ROW); pen.clip();
      let last = -1;
      for (const [name, begin, span, kind] of lane.slices) {
        if (begin + span < from || begin > to) continue;
        const x = left() + (begin - from) * scale(), w = Math.max(span * scale(), 0.6);
        if (x + w < last + 0.4 && kinds[kind] !== "exposed") continue; // narrower than what was drawn there
        pen.fillStyle = colours[kinds[kind]]; pen.fillRect(x, top + 3, w, ROW - 6); last = x + w;
        if (w > 34) { pen.fillStyle = "#fff"; pen.fillText(names[name].slice(0, Math.floor(w / 6)), x + 3, top + ROW / 2); }
      }
      pen.restore();
    });
    pen.fillStyle = css("soft");
    const ticks = Math.max(1, Math.min(4, Math.floor((width - left()) / 100))); // as many as have room
    canvas.dataset.ticks = ticks;
    for (let k = 0; k <= ticks; k++) {
      const t = from + (to - from) * k / ticks, x = left() + (t - from) * scale();
      pen.textAlign = k === 0 ? "left" : k === ticks ? "right" : "center"; pen.fillText(time(t / 1e6), x, height - 10);
    }
    pen.textAlign = "left";
  }
  function zoom(factor, around = (from + to) / 2) {
    from = Math.max(0, around - (around - from) * factor); to = Math.min(lastEnd * 1.01 || 1, around + (to - around) * factor); draw();
  }
  const timeAt = event => from + (event.clientX - canvas.getBoundingClientRect().left - left()) / scale();
  canvas.addEventListener("wheel", event => { if (!event.ctrlKey && !event.metaKey) return; event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event)); }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = [event.clientX, from, to]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointercancel", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    if (held) {
      const by = Math.max((held[0] - event.clientX) / scale(), -held[1]);
      from = held[1] + by; to = held[2] + by; draw(); return;
    }
    const lane = lanes[Math.floor((event.clientY - canvas.getBoundingClientRect().top) / ROW)], t = timeAt(event);
    const found = lane?.slices?.findLast(s => s[1] <= t && t <= s[1] + s[2]);
    if (found) tip.textContent = `${names[found[0]]}: ${kinds[found[3]]}, ${time(found[2] / 1e6)}, from ${time(found[1] / 1e6)} on`;
  });
  const button = (text, act) => { const made = element("button", { type: "button" }, text); made.addEventListener("click", act); return made; };
  const tools = element("div", { class: "tools" }, button("+", () => zoom(0.5)), button("−", () => zoom(2)),
    button("all", () => { from = 0; to = lastEnd * 1.01 || 1; draw(); }));
  const used = kinds.filter((kind, k) => lanes.some(lane => lane.slices?.some(s => s[3] === k)));
  new ResizeObserver(draw).observe(canvas);
  const words = { compute: "computation", start: "start of a message", message: "communication", exposed: "exposed communication" };
  return [legend(used.map(kind => [words[kind] ?? kind, colours[kind]])), tools, canvas, tip];
}

// -- the page ----------------------------------------------------------------------------------------------------------

const perRun = drawn.runs.split(" of ")[0]; // a call, or a step
const moved = figures.transfers.reduce((sum, row) => sum + row.bytes, 0);
const summed = drawn.pipeline_memory ? "in its slots" : "its ops and transfers added up";
const cards = [[time(figures.seconds), `${drawn.runs} on ${figures.machine.name}, ${summed}`], [bytes(figures.memory), "memory of a rank at the peak"],
  [bytes(moved), drawn.pipeline_memory ? "moved in a step, all stages together" : `received by a rank in ${perRun}`]];
if (figures.bound !== null) cards.splice(1, 0, [time(figures.bound), "bound: no plan adds up to less"]);
if (drawn.communication) cards.push([time(drawn.communication.makespan), "the same in the order of the timeline"],
  [time(drawn.communication.exposed), "exposed communication, computed"]);
document.getElementById("cards").append(...cards.map(([number, words]) => element("div", { class: "card" }, element("b", {}, number), element("span", {}, words))));
document.getElementById("about").textContent = `mesh ${drawn.mesh.map(axis => axis.join("=")).join(" ")}` +
  (drawn.certificate ? `; ${drawn.certificate}` : "; the plan was not searched, so there is no bound") + (figures.machine.note ? `; ${figures.machine.note}` : "");

section("model", "The model and its layouts",
  element("p", { class: "soft" }, "Each grid has a cell for each rank; cells of one colour hold the same piece. A pale grid is a value that is whole on every rank, a stroke a partial sum. Modules that are alike are one row."),
  element("div", { class: "tree" }, tree(drawn.tree, 0, openedBy(size(drawn.tree)))));
section("transfers", "Transfers", figures.transfers.length ? table(
  { in: "", transfer: "", axis: "", phase: "", module: "", times: "number", bytes: "number", time: "number", line: "line" },
  figures.transfers.map(row => [row.part, row.transfer, row.axis, row.phase, row.module || "the model", count(row.times), bytes(row.bytes), time(row.seconds), row.source]))
  : element("p", {}, "There are none: no value has to move."));
if (drawn.memory || drawn.pipeline_memory || Object.keys(drawn.peaks).length)
  section("memory", "Memory of a rank", ...(drawn.memory ? memoryChart(drawn.memory) : []), ...(drawn.pipeline_memory ? stepsChart(drawn.pipeline_memory) : []),
    table({ phase: "", kind: "", "bytes at the peak": "number" }, Object.entries(drawn.peaks).flatMap(([phase, kinds]) =>
      Object.entries(kinds).filter(row => row[1]).map(([kind, number], k) => [k ? "" : phase, kind, count(number)]))));
if (drawn.timeline) {
  const made = drawn.communication;
  section("timeline", drawn.pipeline_memory ? "Slots of the pipeline" : "Timeline",
    made ? element("p", { class: "soft" }, `computed: ${time(made.makespan)}, bound of all orders ${time(made.bound)}, exposed communication ${time(made.exposed)}; durations: ${made.source}. ` +
      `The price of the plan, ${time(figures.seconds)}, adds up its ops and transfers one after the other; here they are in the order in which they run, where communication hides behind computation and may slow it.`) : "",
    ...timelineChart(drawn.timeline));
}
if (drawn.certificate || drawn.alternatives.length || drawn.explained.length) {
  const best = Math.min(...drawn.alternatives.map(row => row.seconds ?? Infinity));
  section("plans", "The plan and its alternatives", drawn.certificate ? element("p", {}, drawn.certificate) : "",
    drawn.alternatives.length ? table({ plan: "", [perRun]: "number", "of best": "number", memory: "number", remark: "remark" },
      drawn.alternatives.map(row => [row.name, time(row.seconds), row.seconds === null ? "–" : (row.seconds / best).toFixed(2), bytes(row.memory), row.note]),
      drawn.alternatives.map(row => (row.seconds === best ? "best" : ""))) : "",
    ...drawn.explained.flatMap(({ name, rows }) => [element("h3", {}, `other layouts of ${name}, with everything else chosen anew`),
      table({ layout: "line", [perRun]: "number", more: "number" }, rows.map(([layout, seconds, chosen]) =>
        [layout + (chosen ? "  ← the plan's" : ""), time(seconds), `+${((seconds / rows[0][1] - 1) * 100).toFixed(2)} %`]),
        rows.map(row => (row[2] ? "best" : "")))]));
}
if (drawn.decisions.length) section("decisions", "What was decided", ...drawn.decisions.flatMap(({ topic, notes }) =>
  [element("h3", {}, topic), element("ul", {}, ...notes.map(([name, note]) => element("li", {}, name ? `${name}: ${note}` : note)))]));
section("passes", "Passes", table({ pass: "", ms: "number", inserted: "number", removed: "number", commits: "number", "bytes per axis": "" },
  drawn.passes.map(row => [row.name, row.ms.toFixed(1), row.inserted, row.removed, row.commits, Object.entries(row.bytes).map(([axis, n]) => `${axis} ${count(n)}`).join(", ")])));
if (drawn.programs.length) section("programs", "Programs", ...drawn.programs.map(({ name, times, text }) =>
  element("details", {}, element("summary", {}, `${name}${times > 1 ? `, ${times} times a step` : ""}`), element("pre", {}, text))));
document.documentElement.dataset.drawn = "yes";
