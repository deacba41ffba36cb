const LABELS = 48;

/** An axis with the texts of tokens as labels, at most LABELS of them. */
function tokenAxis(tokens) {
  const every = Math.ceil(tokens.length / LABELS);
  const places = tokens.map((_, place) => place).filter((place) => place % every === 0);
  const font = { color: color("text"), size: 11 };
  return {
    tickmode: "array", tickvals: places, ticktext: places.map((place) => escaped(tokens[place])), tickfont: font,
    ticks: "", ticklabelstandoff: 4, automargin: true, showgrid: false, zeroline: false, showline: false,
  };
}

/** A heat map; with negative values, its colors are symmetric around 0. */
function heat(z, more) {
  const colorbar = { thickness: 8, outlinewidth: 0, len: 1, tickfont: { color: color("muted"), size: 11 } };
  const [low, zmax] = z.flat().reduce(([least, most], one) => [Math.min(least, one ?? 0), Math.max(most, Math.abs(one ?? 0))], [0, 0]);
  const zmin = low < 0 ? -zmax : 0;
  const middle = [low < 0 ? 0.5 : 0, color("surface")];
  const colorscale = low < 0 ? [[0, color("run-1")], middle, [1, color("accent")]] : [middle, [1, color("accent")]];
  return { type: "heatmap", z, zmin, zmax, colorscale, colorbar, xgap: 1, ygap: 1, hoverongaps: false, ...more };
}

function layout(more) {
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("text") };
  const hoverlabel = { bgcolor: color("surface"), bordercolor: color("rule"), font: { color: color("text") } };
  return { ...STYLE, plot_bgcolor: color("rule"), font, hoverlabel, margin: { l: 8, r: 8, t: 8, b: 8 }, dragmode: false, ...more };
}
