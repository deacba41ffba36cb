"use strict";
const TOP = 5;
const SHOWN = 10;
const TASKS = {
  seq2seq: { name: "Translation", asked: "Text to translate", start: "Translate" },
  decoder_lm: { name: "Language model", asked: "Text to continue", start: "Continue" },
  classifier: { name: "Classification", asked: "Text to classify", start: "Classify" },
};
const CHAT = { name: "Chat", asked: "Text to answer", start: "Send" };
const at = (id) => document.getElementById(id);
const number = (id) => (at(id).value === "" ? null : Number(at(id).value));
const percent = (p) => (p > 0 && p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);
const visible = (text) => text.replaceAll(" ", "▁").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
let info = null;
let running = null;
let given = "";
let outputs = [];
let turns = [];

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** Returns the English name of a language; its code if it is not a BCP 47 tag. */
function languageOf(code) {
  try {
    return new Intl.DisplayNames("en", { type: "language" }).of(code.replaceAll("_", "-"));
  } catch {
    return code;
  }
}

/** Fills the page with what the model is. */
async function learn() {
  info = await (await request("info")).json();
  const task = info.chat ? CHAT : TASKS[info.family];
  const classes = info.labels?.length ? ` into ${info.labels.length} classes` : "";
  const names = info.language_names ?? {};
  for (const field of ["source_language", "target_language"]) offerLanguages(at(field), names[field]);
  at("languages").hidden = !Object.keys(names).length;
  const pair = info.languages ? `, ${info.languages.map(languageOf).join(" to ")}` : "";
  document.title = at("title").textContent = info.model;
  at("task").textContent = task.name + classes + pair;
  at("asked").textContent = task.asked;
  at("start").textContent = task.start;
  at("settings").hidden = info.family === "classifier";
  at("width").hidden = info.family !== "seq2seq";
  at("heat").hidden = info.family !== "decoder_lm";
  const scores = info.metrics?.length ? [`Scores on the ${info.split} split`] : [];
  at("facts").textContent = [...scores, ...(info.facts ?? [])].join(" · ");
  at("metrics").replaceChildren(...(info.metrics ?? []).map(metric));
  at("examples").hidden = !info.examples?.length;
  at("examples-title").textContent = `Examples of the ${info.split} split`;
  for (const chip of at("examples").querySelectorAll("button")) chip.remove();
  at("examples").append(...(info.examples ?? []).map(chip));
}

/** Fills the menu of a field that names a language; hides it if requests do not need the field. */
function offerLanguages(menu, names = {}) {
  const options = Object.entries(names).sort(([, one], [, other]) => one.localeCompare(other));
  menu.replaceChildren(...options.map(([value, textContent]) => make("option", { value, textContent })));
  menu.parentElement.hidden = !options.length;
}

/** Returns the fields of a request that name its languages. */
function languages() {
  return Object.fromEntries(Object.keys(info.language_names ?? {}).map((field) => [field, at(field).value]));
}

function metric({ title, value, signature }) {
  return make("div", { title: signature }, make("dt", { textContent: title }), make("dd", { textContent: value }));
}

function chip(example) {
  const button = make("button", { type: "button", textContent: example.text.trim(), title: example.text, dir: "auto" });
  button.addEventListener("click", () => {
    at("text").value = example.text;
    for (const field of Object.keys(languages())) at(field).value = example[field] ?? at(field).value;
    work(generate);
  });
  return button;
}

async function request(route, body) {
  const headers = at("key").value ? { Authorization: `Bearer ${at("key").value}` } : {};
  const sent = body && { method: "POST", body: JSON.stringify(body), signal: running.signal };
  const response = await fetch(route, { ...sent, headers: { ...headers, "Content-Type": "application/json" } });
  if (response.status === 401) at("access").hidden = false;
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response;
}

async function generate() {
  outputs = [];
  at("outputs").replaceChildren();
  at("result").hidden = at("reference").hidden = at("legend").hidden = true;
  if (info === null) await learn();
  const text = given = at("text").value;
  at("outputs").ariaBusy = "true";
  if (info.family === "classifier") await classify(text);
  else await read(await request(...asked(text)));
  at("outputs").ariaBusy = "false";
  showReference(text);
  if (info.chat) keepTurns(text);
  else if (info.attention) for (const output of outputs) offerAttention(output, text);
  else at("shown").replaceChildren(make("p", { className: "muted small", textContent: `No attention: ${info.no_attention}.` }));
}

function asked(text) {
  const common = { stream: true, logprobs: info.logprobs ? TOP : null, ...languages() };
  const [n, length] = [number("count"), number("length")];
  if (info.family === "seq2seq") {
    const aligned = info.attention ? { alignments: true } : {};
    return ["translate", { text, n_best: n, beams: number("beams"), max_new_tokens: length, ...aligned, ...common }];
  }
  if (info.chat) {
    const shown = info.logprobs ? { logprobs: true, top_logprobs: TOP } : { logprobs: false };
    const sampling = { n, max_tokens: length, temperature: number("temperature") };
    return ["v1/chat/completions", { messages: [...turns, { role: "user", content: text }], stream: true, ...sampling, ...shown }];
  }
  return ["v1/completions", { prompt: text, n, max_tokens: length, temperature: number("temperature"), ...common }];
}

async function read(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The server closed the connection.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      show(JSON.parse(data));
    }
  }
}

function show(event) {
  if (event.error) throw new Error(event.error.message);
  for (const piece of event.choices ?? [event]) {
    const output = outputAt(piece.rank ?? piece.index);
    output.text += piece.text ?? piece.delta?.content ?? "";
    if (piece.logprobs) showTokens(output, piece.logprobs.content ? byToken(piece.logprobs.content) : piece.logprobs);
    else output.line.textContent = output.text;
    if (typeof piece.score === "number") output.score.textContent = `score ${piece.score.toFixed(4).replace("-", "−")}`;
    if (piece.alignment) showSources(output, piece.alignment);
    if (piece.finish_reason === "length") output.cut.textContent = "truncated at the maximum length";
  }
}

/** Returns the log-probabilities of a chat completion in the form of those of a completion. */
function byToken(content) {
  const top = content.map((one) => Object.fromEntries(one.top_logprobs.map((other) => [other.token, other.logprob])));
  return { tokens: content.map((one) => one.token), token_logprobs: content.map((one) => one.logprob), top_logprobs: top };
}

/** Adds a message and the first answer to the conversation, which the next message continues. */
function keepTurns(text) {
  turns.push({ role: "user", content: text }, { role: "assistant", content: outputs[0].text });
  at("turns").replaceChildren(...turns.map(({ role, content }) => make("li", { className: role, textContent: content, dir: "auto" })));
  at("turns").hidden = at("anew").hidden = false;
  at("text").value = "";
}

function beginAnew() {
  turns = [];
  at("turns").replaceChildren();
  at("outputs").replaceChildren();
  at("turns").hidden = at("anew").hidden = at("result").hidden = true;
}

function outputAt(place) {
  while (outputs.length <= place) {
    const output = { text: "", line: make("p", { dir: "auto" }), notes: make("div", { className: "notes" }) };
    for (const name of ["score", "cut"]) output[name] = make("small", { className: "muted" });
    output.notes.append(output.score, output.cut);
    output.item = make("li", {}, output.line, output.notes);
    outputs.push(output);
    at("outputs").append(output.item);
  }
  at("result").hidden = false;
  return outputs[place];
}

/** Replaces the text of an output by its tokens, each with the color of its probability. */
function showTokens(output, { tokens, token_logprobs: scores, top_logprobs: top }) {
  let end = 0;
  output.line.role = "listbox";
  output.line.ariaLabel = "Tokens";
  output.line.ariaOrientation = "horizontal";
  output.steps = tokens.map((token, place) => {
    const p = Math.exp(scores[place]);
    const written = token !== "" && output.text.startsWith(token, end);
    const step = { before: output.text.slice(0, end), token, p, top: top[place] };
    step.node = make("span", { role: "option", tabIndex: -1, ariaSelected: "false", className: level(p) });
    step.node.ariaLabel = `${visible(token)}, ${percent(p)}`;
    if (written) step.node.textContent = token;
    else step.node.classList.add("special");
    step.node.dataset.name = token;
    step.node.addEventListener("focus", () => select(output, place));
    end += written ? token.length : 0;
    return step;
  });
  output.line.replaceChildren(...output.steps.map((step) => step.node));
  output.line.addEventListener("keydown", (event) => move(event, output));
  if (!output.steps.length) return;
  const least = output.steps.reduce((best, step, place) => (step.p < output.steps[best].p ? place : best), 0);
  if (output === outputs[0]) select(output, least);
  else output.steps[least].node.tabIndex = 0;
  at("legend").hidden = false;
}

/** Shows the source below an output, and marks its words that are aligned with the word under the pointer. */
function showSources(output, alignment) {
  const links = alignment.split(" ").map((link) => link.split("-").map(Number));
  const words = given.split(/\s+/).filter(Boolean).map((textContent) => make("span", { textContent }));
  output.item.append(make("div", { className: "muted sources", dir: "auto" }, ...words.flatMap((word) => [word, " "])));
  for (const { node, before, token } of output.steps ?? []) {
    const place = (before + token).trim().split(/\s+/).length - 1;
    const mark = () => {
      words.forEach((word, n) => word.classList.toggle("aligned", links.some(([source, target]) => source === n && target === place)));
    };
    node.addEventListener("mouseenter", mark);
    node.addEventListener("focus", mark);
  }
}

const level = (p) => (p >= 0.9 ? "p0" : p >= 0.5 ? "p1" : p >= 0.1 ? "p2" : "p3");

function move(event, output) {
  const last = output.steps.length - 1;
  const right = getComputedStyle(output.line).direction === "rtl" ? -1 : 1;
  const places = { ArrowLeft: output.place - right, ArrowRight: output.place + right, Home: 0, End: last };
  if (!(event.key in places)) return;
  event.preventDefault();
  output.steps[Math.min(Math.max(places[event.key], 0), last)].node.focus();
}

/** Shows the most probable tokens of one step. */
function select(output, place) {
  output.place = place;
  output.steps.forEach(({ node }, index) => {
    node.ariaSelected = String(index === place);
    node.tabIndex = index === place ? 0 : -1;
  });
  const { before, token, p, top } = output.steps[place];
  const rows = Object.entries(top).map(([name, value]) => ({ name: visible(name), p: Math.exp(value), chosen: name === token }));
  if (!rows.some((row) => row.chosen)) rows.push({ name: visible(token), p, chosen: true });
  rows.sort((one, other) => other.p - one.p);
  const rest = Math.max(1 - rows.reduce((sum, row) => sum + row.p, 0), 0);
  const after = before ? ` after “${before.length > 40 ? "…" : ""}${before.slice(-40)}”` : "";
  const caption = `Token ${place + 1} of ${output.steps.length}${after}`;
  const found = bars([...rows, { name: "all others", p: rest, other: true }], caption, "token");
  output.table?.remove();
  output.notes.before(found);
  output.table = found;
}

/** Returns a table of probabilities with bars. */
function bars(rows, caption, kind = "") {
  const table = make("table", {}, ...(caption ? [make("caption", { textContent: caption })] : []));
  for (const { name, p, chosen, other } of rows) {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${100 * p}%`;
    const heading = make("th", { scope: "row", textContent: name, title: name, className: other ? "" : kind });
    const cells = [heading, make("td", {}, bar), make("td", { textContent: percent(p) })];
    table.append(make("tr", { className: chosen ? "chosen" : other ? "rest" : "" }, ...cells));
  }
  return table;
}

async function classify(text) {
  const [{ label, probs }] = (await (await request("classify", { input: text })).json()).data;
  const rows = info.labels.map((name, place) => ({ name, p: probs[place], chosen: name === label }));
  rows.sort((one, other) => other.p - one.p);
  const rest = rows.splice(SHOWN).reduce((sum, row) => sum + row.p, 0);
  const output = outputAt(0);
  output.text = output.line.textContent = label;
  output.notes.before(bars(rest ? [...rows, { name: "all others", p: rest, other: true }] : rows));
}

/** Shows the reference of an example of the run. */
function showReference(text) {
  const named = Object.entries(languages());
  const isShown = (one) => one.text === text && named.every(([field, code]) => one[field] === code);
  const example = info.examples?.find(isShown);
  if (!example) return;
  const heading = make("span", { className: "muted small", textContent: `Reference of the ${info.split} split` });
  at("reference").replaceChildren(heading, make("bdi", { textContent: example.reference }));
  at("reference").hidden = false;
}

function offerAttention(output, text) {
  const button = make("button", { type: "button", textContent: "Show attention" });
  const result = info.family === "classifier" ? "" : output.text;
  button.addEventListener("click", () => work(() => showAttention(text, result)));
  output.notes.append(button);
}

/** Shows what the model attends to, in a frame that cannot reach this page or the server. */
async function showAttention(text, output) {
  const frame = make("iframe", { title: "Attention", sandbox: "allow-scripts" });
  frame.srcdoc = await (await request("attention", { text, output, ...languages() })).text();
  at("shown").replaceChildren(frame);
  frame.scrollIntoView();
}

async function work(task) {
  if (running) return;
  running = new AbortController();
  at("error").textContent = "";
  at("shown").replaceChildren();
  at("status").textContent = "Working …";
  at("start").disabled = true;
  at("stop").disabled = false;
  try {
    await task();
    at("status").textContent = "Done.";
  } catch (error) {
    if (error.name === "AbortError") at("status").textContent = "Stopped.";
    else fail(error);
  } finally {
    running = null;
    at("outputs").ariaBusy = "false";
    at("start").disabled = false;
    at("stop").disabled = true;
  }
}

function fail(error) {
  at("status").textContent = "";
  at("error").textContent = error instanceof TypeError ? "The server does not respond." : error.message;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  work(generate);
});
at("key").addEventListener("change", () => work(learn));
at("anew").addEventListener("click", beginAnew);
at("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && event.ctrlKey) at("form").requestSubmit();
});
learn().catch(fail);
