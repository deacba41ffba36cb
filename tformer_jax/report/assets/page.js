"use strict";
const at = (id) => document.getElementById(id);
const root = document.documentElement;
const STYLE = { paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false, hovermode: "closest" };
const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };

/** Resolves once the browser has painted the text. */
const painted = new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });

/** Resolves once plotly.js is loaded, which begins after the first paint. */
const library = painted.then(async () => {
  root.dataset.painted = performance.now();
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly").text();
  document.head.append(script);
});

/** Decompresses the element `id`, which holds gzip in base64, to a Response. */
function unpacked(id) {
  const letters = atob(at(id).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place += 1) bytes[place] = letters.charCodeAt(place);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

/** Calls `show` with each element when it comes near the part of the page in view, and with the others bit by bit. */
function whenNear(elements, show) {
  const waiting = new Set(elements);
  const first = (element) => {
    near.unobserve(element);
    return waiting.delete(element) ? show(element) : undefined;
  };
  const near = new IntersectionObserver((seen) => {
    for (const { target } of seen.filter((one) => one.isIntersecting)) first(target);
  }, { rootMargin: "200px" });
  for (const element of elements) near.observe(element);
  const rest = async () => {
    const [next] = waiting;
    if (!next) return;
    await first(next);
    setTimeout(rest, 20);
  };
  library.then(() => setTimeout(rest, 300));
}

function isInView(element) {
  return element.getBoundingClientRect().top < innerHeight;
}

function color(name) {
  return getComputedStyle(root).getPropertyValue(`--${name}`).trim();
}

/** Mixes two colors written as #rrggbb. */
function mixed(from, to, share) {
  const [a, b] = [from, to].map((hex) => [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16)));
  return `rgb(${a.map((value, index) => Math.round(value + share * (b[index] - value))).join(",")})`;
}

function translucent(hex, opacity) {
  return mixed(hex, hex, 0).replace("rgb", "rgba").replace(")", `,${opacity})`);
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function nameTheme() {
  at("theme").textContent = isDark() ? "Light" : "Dark";
  at("theme").setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colors`);
}

/** Calls `redraw` when the reader or the system switches between light and dark. */
function followTheme(redraw) {
  nameTheme();
  at("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { nameTheme(); redraw(); });
}

/** Marks the link to the section in view. */
function showPlace() {
  const links = [...document.querySelectorAll("nav.page li a")];
  const sections = [...document.querySelectorAll("main > section")];
  const inView = new Set();
  const watch = new IntersectionObserver((changed) => {
    for (const { target, isIntersecting } of changed) inView[isIntersecting ? "add" : "delete"](target);
    const last = sections.findLast((section) => inView.has(section));
    for (const link of last ? links : []) link.toggleAttribute("aria-current", link.hash === `#${last.id}`);
  }, { rootMargin: "-10% 0px -80% 0px" });
  for (const section of sections) watch.observe(section);
}

/** Gives a chart the width of its column on paper, or again that of its place on the screen. */
function sizeForPrint(place, begins, more = {}) {
  const width = place.closest(".charts > :not(.wide)") ? 330 : 680;
  return Plotly.relayout(place, { ...(begins ? { width } : { width: null, autosize: true }), ...more });
}

/** Calls `resize` when printing begins (true) or ends; on paper, the page is light and all its details are open. */
function followPrinting(resize) {
  const change = (begins) => {
    if (begins === (root.dataset.printing === "yes")) return;
    root.dataset.printing = begins ? "yes" : "no";
    if (begins) root.dataset.screenTheme = root.dataset.theme ?? "";
    const theme = begins ? "light" : root.dataset.screenTheme;
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    for (const fold of document.querySelectorAll("details")) {
      if (begins) fold.dataset.open = fold.open ? "yes" : "no";
      fold.open = begins || fold.dataset.open === "yes";
    }
    resize(begins);
  };
  matchMedia("print").addEventListener("change", (event) => change(event.matches));
  addEventListener("beforeprint", () => change(true));
  addEventListener("afterprint", () => change(false));
}
