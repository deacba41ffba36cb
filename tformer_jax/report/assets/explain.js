const { figures } = JSON.parse(at("data").textContent);
const drawn = new Set();

function drawHeat(place, { z, x, y, texts }) {
  const height = Math.min(150 + 22 * y.length, 900);
  place.style.height = `${height}px`;
  const named = y.map((row, r) => x.map((column, c) => `${escaped(row)} → ${escaped(column)}${texts ? `: ${escaped(texts[r][c])}` : ""}`));
  const cells = texts ? { text: texts.map((row) => row.map(escaped)), texttemplate: "%{text}", showscale: false } : {};
  const trace = heat(z, { hovertext: named, hovertemplate: `%{hovertext}${texts ? "" : "<br>%{z:.4~g}"}<extra></extra>`, ...cells });
  if (texts) Object.assign(trace, { zmin: 2 * trace.zmin, zmax: 2 * trace.zmax });  // pale, for the texts
  const xaxis = { ...tokenAxis(x), side: "top", tickangle: -50, tickvals: x.map((_, at) => at), fixedrange: true };
  const yaxis = { ...tokenAxis(y), autorange: "reversed", fixedrange: true };
  return Plotly.react(place, [trace], layout({ height, xaxis, yaxis }), CONFIG);
}

/** The labels of each curve's points, without those that would cover an earlier one; equal points share one. */
function labels(curves, width, height, square) {
  const [across, down] = ["x", "y"].map((axis) => curves.flatMap((curve) => curve[axis]));
  const size = (values) => Math.max(...values) - Math.min(...values) || 1;
  const sizes = [across, down].map((values) => size(square ? across.concat(down) : values));
  const letter = 7 / width * sizes[0];
  const line = 14 / height * sizes[1];
  const reach = (text, one) => letter * Math.max(text.length + one.texts.join(" / ").length, 5) / 2;
  const placed = [];
  const found = curves.map(({ x, y, texts }) => texts?.map((text, point) => {
    const cover = placed.find((one) => Math.abs(one.x - x[point]) < reach(text, one) && Math.abs(one.y - y[point]) < line);
    if (cover && cover.x === x[point] && !cover.texts.includes(text)) cover.texts.push(text);
    if (cover) return null;
    placed.push({ x: x[point], y: y[point], texts: [text] });
    return placed.at(-1);
  }));
  return found.map((row) => row?.map((one) => (one ? escaped(one.texts.join(" / ")) : "")));
}

function drawLines(place, { curves, x, y, log, square }) {
  const height = square ? 420 : 340;
  place.style.height = `${height}px`;
  const texts = labels(curves, place.clientWidth - 100, height - 120, square);
  const traces = curves.map((curve, number) => ({
    type: "scatter", mode: curve.texts ? "lines+markers+text" : "lines", name: escaped(curve.name), x: curve.x, y: curve.y,
    text: texts[number], textposition: "top center", textfont: { size: 11 }, cliponaxis: false,
    line: { color: color(`run-${number % 8}`), width: 1.6, dash: ["solid", "dash", "dot", "dashdot"][number % 4] },
    hovertemplate: `%{y:.5~g} at %{x:.5~g}<extra>${escaped(curve.name)}</extra>`,
  }));
  const axis = { gridcolor: color("grid"), zerolinecolor: color("rule"), linecolor: color("rule"), tickfont: { color: color("muted") }, automargin: true };
  const title = (text) => ({ text: escaped(text), font: { size: 12, color: color("muted") }, standoff: 6 });
  const type = (name) => (log.includes(name) ? { type: "log", dtick: 1 } : {});
  const xaxis = { ...axis, title: title(x), ...type("x") };
  const yaxis = { ...axis, title: title(y), ...type("y"), ...(square ? { scaleanchor: "x" } : {}) };
  const legend = { orientation: "h", y: -0.25, font: { size: 11 } };
  const margin = { l: 8, r: texts.some(Boolean) ? 40 : 8, t: 16, b: 8 };
  const more = { height, margin, xaxis, yaxis, plot_bgcolor: "transparent", showlegend: curves.length > 1, legend };
  return Plotly.react(place, traces, layout(more), CONFIG);
}

function draw(place) {
  const figure = figures[Number(place.dataset.figure)];
  return figure.kind === "heat" ? drawHeat(place, figure) : drawLines(place, figure);
}

async function show(place) {
  await library;
  await draw(place);
  drawn.add(place);
}

async function begin() {
  const places = [...document.querySelectorAll(".figure")];
  followTheme(() => { for (const place of drawn) draw(place); });
  followPrinting((begins) => { for (const place of places) show(place).then(() => sizeForPrint(place, begins)); });
  showPlace();
  const first = places.filter(isInView);
  whenNear(places.filter((place) => !first.includes(place)), show);
  await Promise.all(first.map(show));
  root.dataset.drawn = performance.now();
}

begin();
