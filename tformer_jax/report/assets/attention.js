const { attentions, norms } = JSON.parse(at("data").textContent);
const redraws = new Map();

/** Resolves to the weights and the mask of an attention. */
async function unpackedWeights(one) {
  const [weights, mask] = await Promise.all(["weights", "mask"].map((part) => unpacked(`${part}-${one.name}`).arrayBuffer()));
  return { weights: new Uint16Array(weights), mask: new Uint8Array(mask) };
}
const loaded = Object.fromEntries(attentions.map((one) => [one.name, painted.then(() => unpackedWeights(one))]));

/** The weights of one layer and head by query and key; null where the mask hides the key. */
function matrix(one, { weights, mask }, layer, head) {
  const [T, S] = [one.queries.length, one.keys.length];
  const first = (layer * one.heads.length + head) * T * S;
  return one.queries.map((_, t) => one.keys.map((_, s) => {
    const bit = (layer * T + t) * S + s;
    const visible = mask[bit >> 3] & (128 >> (bit & 7));
    const weight = weights[first + t * S + s];
    return visible || weight ? weight / 65535 : null;
  }));
}

function pairs(one) {
  return one.queries.map((query) => one.keys.map((key) => `${escaped(query)} → ${escaped(key)}`));
}

async function drawMap(one) {
  const [layer, head] = ["layer", "head"].map((name) => Number(at(`${one.name}-${name}`).value));
  const z = matrix(one, await loaded[one.name], layer, head);
  const height = Math.min(Math.max(120 + 22 * one.queries.length, 220), 900);
  const place = at(`map-${one.name}`);
  place.style.height = `${height}px`;
  const xaxis = { ...tokenAxis(one.keys), side: "top", tickangle: -50 };
  const yaxis = { ...tokenAxis(one.queries), autorange: "reversed" };
  const trace = heat(z, { text: pairs(one), hovertemplate: "%{text}<br>%{z:.4f}<extra></extra>" });
  await Plotly.react(place, [trace], layout({ height, xaxis, yaxis }), CONFIG);
}

/** Draws all heads of a layer as small heat maps; a click on one shows it large. */
async function drawHeads(one, layer) {
  const packed = await loaded[one.name];
  const count = one.heads.filter((name) => /^\d+$/.test(name)).length;
  const columns = Math.min(count, innerWidth < 700 ? 2 : 4);
  const rows = Math.ceil(count / columns);
  const hover = { text: pairs(one), hovertemplate: "%{text}<br>%{z:.3f}<extra></extra>" };
  const traces = [];
  const axes = {};
  for (let head = 0; head < count; head += 1) {
    const suffix = head ? String(head + 1) : "";
    const hidden = { showticklabels: false, ticks: "", showgrid: false, zeroline: false, fixedrange: true };
    axes[`xaxis${suffix}`] = { ...hidden, title: { text: `head ${head}`, font: { size: 11, color: color("muted") }, standoff: 2 } };
    axes[`yaxis${suffix}`] = { ...hidden, autorange: "reversed" };
    const place = { xaxis: `x${suffix}`, yaxis: `y${suffix}`, showscale: false, xgap: 0, ygap: 0 };
    traces.push(heat(matrix(one, packed, layer, head), { ...place, ...hover }));
  }
  const place = at(`heads-${one.name}-${layer}`);
  const height = 170 * rows;
  place.style.height = `${height}px`;
  const grid = { rows, columns, pattern: "independent", xgap: 0.08, ygap: 0.25 };
  const first = !redraws.has(place.id);
  await Plotly.react(place, traces, layout({ height, grid, ...axes, margin: { l: 8, r: 8, t: 8, b: 24 } }), CONFIG);
  if (first) place.on("plotly_click", ({ points: [point] }) => choose(one, layer, point.curveNumber));
}

function choose(one, layer, head) {
  at(`${one.name}-layer`).value = layer;
  at(`${one.name}-head`).value = head;
  at(`map-${one.name}`).scrollIntoView({ block: "center" });
  redraw(`map-${one.name}`);
}

async function drawNorms(stack, part) {
  const { rows, values } = stack[part];
  const place = at(`norms-${stack.name}-${part}`);
  const height = 110 + 22 * rows.length;
  place.style.height = `${height}px`;
  const text = rows.map((row) => stack.tokens.map((token) => `${row}, ${escaped(token)}`));
  const trace = heat(values, { text, hovertemplate: "%{text}<br>%{z:.4~g}<extra></extra>" });
  const xaxis = { ...tokenAxis(stack.tokens), tickangle: -50 };
  await Plotly.react(place, [trace], layout({ height, xaxis, yaxis: tokenAxis(rows) }), CONFIG);
}

async function redraw(id) {
  await library;
  if (redraws.has(id)) await redraws.get(id)();
}

async function show(element) {
  const { kind, layer, stack, part } = element.dataset;
  const one = attentions.find(({ name }) => name === (kind ?? element.id.replace("map-", "")));
  let draw = () => drawMap(one);
  if (stack) draw = () => drawNorms(norms.find(({ name }) => name === stack), part);
  if (layer) draw = () => drawHeads(one, Number(layer));
  await library;
  await draw();
  redraws.set(element.id, draw);
}

async function begin() {
  const charts = [...document.querySelectorAll(".map, .heads, .norms")];
  followTheme(() => { for (const draw of redraws.values()) draw(); });
  followPrinting((begins) => { for (const element of charts) show(element).then(() => sizeForPrint(element, begins)); });
  showPlace();
  for (const one of attentions) {
    for (const name of ["layer", "head"]) at(`${one.name}-${name}`).addEventListener("change", () => redraw(`map-${one.name}`));
  }
  const first = charts.filter((element) => element.matches(".map") && isInView(element));
  whenNear(charts.filter((element) => !first.includes(element)), show);
  await Promise.all(first.map(show));
  root.dataset.drawn = performance.now();
}

begin();
