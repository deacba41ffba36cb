const { charts, runs } = JSON.parse(at("data").textContent);
const view = { axis: "step", smoothing: 0, log: false, hidden: new Set(), range: null };
const LOSSES = ["loss", "nll"];
const DENSE = 400;
const drawn = new Set();

function colorOf(trace) {
  if (trace.run < 0) return color("muted");
  const own = color(`run-${trace.run % 8}`);
  return trace.shade === undefined ? own : mixed(own, color("grid"), 0.75 * trace.shade);
}

/** The exponential moving average of the present values, corrected for its start at 0. */
function smooth(values, decay) {
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = decay * mean + (1 - decay) * value;
    weight = decay * weight + (1 - decay);
    return mean / weight;
  });
}

function unitOfTime() {
  const ends = charts.flatMap((chart) => chart.traces.flatMap((trace) => trace.seconds?.slice(-1) ?? []));
  const last = Math.max(0, ...ends);
  if (last > 7200) return { size: 3600, name: "hours" };
  return last > 120 ? { size: 60, name: "minutes" } : { size: 1, name: "seconds" };
}

function horizontal(values) {
  if (view.axis !== "seconds") return values;
  const { size } = unitOfTime();
  return values.map((value) => (value === null ? null : value / size));
}

function lines(chart) {
  return chart.traces.filter((trace) => !view.hidden.has(trace.run)).flatMap((trace) => {
    const name = runs.length > 1 ? `${runs[trace.run]}, ${trace.name}` : trace.name;
    const lone = trace.y.filter((value) => value !== null).length < 2;
    const line = {
      type: "scatter", x: horizontal(trace[view.axis]), y: trace.y, name, mode: lone ? "markers" : "lines",
      line: { color: colorOf(trace), width: trace.y.length > DENSE ? 1 : 1.6 }, marker: { color: colorOf(trace), size: 5 },
      hovertemplate: `%{y:.5~g} at %{x:,.6~g}<extra>${escaped(name)}</extra>`,
    };
    if (trace.evaluation) {
      const marker = { color: colorOf(trace), size: 7, line: { color: color("page"), width: 1.5 } };
      return [{ ...line, mode: "lines+markers", line: { color: colorOf(trace), width: 1.6, dash: "dot" }, marker }];
    }
    if (!view.smoothing) return [line];
    const smoothed = { ...line, y: smooth(trace.mean ?? trace.y, view.smoothing), line: { ...line.line, width: 2 } };
    return [{ ...line, opacity: 0.25, hoverinfo: "skip", hovertemplate: undefined }, smoothed];
  });
}

function bars(chart) {
  return chart.traces.filter((trace) => !view.hidden.has(trace.run)).map((trace) => ({
    type: "scatter", mode: "lines", name: trace.name, x: trace.x, y: [...trace.y, 0], fill: "tozeroy",
    line: { color: colorOf(trace), width: 1.4, shape: "hv", dash: trace.run < 0 ? "dot" : "solid" },
    fillcolor: trace.run < 0 ? "transparent" : translucent(colorOf(trace), 0.14),
    hovertemplate: `%{y:.3~g} % from %{x:.4~g}<extra>${escaped(trace.name)}</extra>`,
  }));
}

function events(chart) {
  return chart.marks.filter((mark) => !view.hidden.has(mark.run) && mark[view.axis] !== null).map((mark) => {
    const [x] = horizontal([mark[view.axis]]);
    const shade = color(["resume", "stage"].includes(mark.kind) ? "muted" : "warning");
    const line = { color: shade, width: 1, dash: mark.label ? "solid" : "2px,3px" };
    const font = { color: shade, size: 11 };
    const label = { text: mark.label, textposition: "end", textangle: 0, xanchor: "left", yanchor: "top", font };
    return { type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line, label, opacity: 0.7 };
  });
}

/** The range of all curves, from 0 to the end of the longest run. */
function wholeRange() {
  const ends = charts.flatMap((one) => one.traces.flatMap((trace) => (one.kind === "lines" ? trace[view.axis] : [])));
  const last = ends.reduce((longest, value) => Math.max(longest, value ?? 0), 0);
  return horizontal([0, 1.015 * last || 1]);
}

/** A logarithmic axis: labels at 1, 2 and 5 of each power of ten, at the powers alone if these are many, or more. */
function logarithmic(chart) {
  const values = chart.traces.flatMap((trace) => trace.y).filter((value) => value > 0);
  const [low, high] = values.reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [1e300, 0]);
  if (!(high / low < 300)) return { type: "log", dtick: 1 };
  const powers = [-1, 0, 1, 2, 3].map((more) => Math.floor(Math.log10(low)) + more);
  const tickvals = powers.flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
  if (tickvals.filter((value) => low <= value && value <= high).length > 1) return { type: "log", tickvals };
  return { type: "log", tickvals: [0, 1, 2, 3].map((part) => Number((low + (part / 3) * (high - low)).toPrecision(3))) };
}

function hasNegative(chart) {
  return chart.traces.some((trace) => trace.y.some((value) => value < 0));
}

function isLarge(chart) {
  return chart.traces.some((trace) => trace.y.some((value) => value >= 1000));
}

function layout(chart) {
  const shared = chart.kind === "lines";
  const time = unitOfTime();
  const titles = { step: "step", tokens: "tokens", seconds: time.name };
  const axis = { gridcolor: color("grid"), linecolor: color("rule"), zeroline: false, tickfont: { color: color("muted") } };
  const title = { text: shared ? titles[view.axis] : chart.unit, font: { size: 12, color: color("muted") }, standoff: 6 };
  const xaxis = { ...axis, title, showgrid: false, showline: true, ticks: "outside", ticklen: 4, tickcolor: color("rule") };
  if (shared) xaxis.range = view.range ?? wholeRange();
  const rangemode = chart.zero ? "tozero" : hasNegative(chart) ? "normal" : "nonnegative";
  const exponentformat = isLarge(chart) ? "SI" : "e";  // 20k tokens/s, but a learning rate of 2e-5
  const yaxis = { ...axis, automargin: true, nticks: 6, exponentformat, rangemode };
  const values = chart.traces.flatMap((trace) => trace.y).filter((value) => value !== null);
  const constant = values[0] > 0 && values.every((value) => value === values[0]);
  if (constant) yaxis.range = [0, 2 * values[0]];  // by default, 2e-5 would lie at 0 of an axis up to 1
  if (chart.log || (view.log && LOSSES.includes(chart.key))) Object.assign(yaxis, logarithmic(chart), { range: undefined });
  return {
    ...STYLE, xaxis, yaxis, margin: { l: 44, r: 16, t: 8, b: 40 }, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("text") },
    hoverlabel: { bgcolor: color("surface"), bordercolor: color("rule"), font: { color: color("text") }, namelength: -1 },
    shapes: events(chart),
  };
}

function draw(chart) {
  const traces = chart.kind === "lines" ? lines(chart) : bars(chart);
  return Plotly.react(at(`chart-${chart.key}`), traces, layout(chart), CONFIG);
}

function drawAll() {
  return Promise.all(charts.filter((chart) => drawn.has(chart.key)).map(draw));
}

/** Draws a chart for the first time. */
async function show(chart) {
  await library;
  if (drawn.has(chart.key)) return;
  drawn.add(chart.key);
  await draw(chart);
  follow(chart);
}

/** Shows the same part of the horizontal axis in all charts that share it. */
function zoom(range) {
  view.range = range;
  for (const chart of charts.filter((one) => one.kind === "lines" && drawn.has(one.key))) draw(chart);
}

function follow(chart) {
  const plot = at(`chart-${chart.key}`);
  if (chart.kind !== "lines") return;
  plot.on("plotly_relayout", (change) => {
    if (change["xaxis.range[0]"] !== undefined) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
    else if (change["xaxis.autorange"] || change["xaxis.range"]) zoom(null);
  });
  plot.addEventListener("keydown", (event) => {
    const [low, high] = plot._fullLayout.xaxis.range;
    const width = high - low;
    const moves = {
      ArrowLeft: [low - width / 8, high - width / 8], ArrowRight: [low + width / 8, high + width / 8],
      "+": [low + width / 8, high - width / 8], "-": [low - width / 6, high + width / 6], 0: null,
    };
    const key = event.key === "=" ? "+" : event.key;
    if (event.ctrlKey || event.metaKey || event.altKey || !(key in moves)) return;
    event.preventDefault();
    zoom(moves[key]);
  });
}

async function resize(chart, begins) {
  await show(chart);
  await draw(chart);
  await sizeForPrint(at(`chart-${chart.key}`), begins, { height: begins ? 220 : null });
}

async function save(button) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await unpacked(button.dataset.from).text()], { type: "text/csv" }));
  link.download = button.dataset.file;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Keeps the reader's choices when the browser reloads the report of a run in progress. */
function keepChoices() {
  const key = `choices ${location.pathname}`;
  const kept = JSON.parse(sessionStorage.getItem(key));
  sessionStorage.removeItem(key);
  if (kept) {
    Object.assign(view, kept.view, { hidden: new Set(kept.hidden) });
    if (kept.theme) root.dataset.theme = kept.theme;
    document.querySelector(`input[name=axis][value=${view.axis}]`).checked = true;
    at("smoothing").value = at("smoothing-value").textContent = view.smoothing;
    at("log").checked = view.log;
    for (const input of document.querySelectorAll("input[name=run]")) input.checked = !view.hidden.has(Number(input.value));
  }
  if (!document.querySelector("meta[http-equiv=refresh]")) return;
  addEventListener("pagehide", () => {
    sessionStorage.setItem(key, JSON.stringify({ view, hidden: [...view.hidden], theme: root.dataset.theme }));
  });
}

function listen() {
  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.addEventListener("change", () => { view.axis = input.value; view.range = null; drawAll(); });
  }
  for (const input of document.querySelectorAll("input[name=run]")) {
    input.addEventListener("change", () => { view.hidden[input.checked ? "delete" : "add"](Number(input.value)); drawAll(); });
  }
  at("smoothing").addEventListener("input", (event) => {
    view.smoothing = Number(event.target.value);
    at("smoothing-value").textContent = event.target.value;
    drawAll();
  });
  at("log").addEventListener("change", (event) => { view.log = event.target.checked; drawAll(); });
  followPrinting((begins) => { for (const chart of charts) resize(chart, begins); });
  for (const button of document.querySelectorAll("[data-file]")) button.addEventListener("click", () => save(button));
}

async function begin() {
  keepChoices();
  followTheme(drawAll);
  listen();
  showPlace();
  const inView = charts.filter((chart) => isInView(at(`chart-${chart.key}`)));
  whenNear(document.querySelectorAll(".plot"), (plot) => show(charts.find(({ key }) => plot.id === `chart-${key}`)));
  await Promise.all(inView.map(show));
  root.dataset.drawn = performance.now();
}

begin();
