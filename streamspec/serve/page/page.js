// The page: what its buttons and fields do. Requests are api.js's, answers answer.js's, the picture plot.js's.

import { ask, keepToken, models, Refused, takeToken } from "/page/api.js";
import { Answer, make, question, seconds } from "/page/answer.js";
import { keep, keeps, kept, remove, setKeeping } from "/page/history.js";
import { Plot } from "/page/plot.js";

const $ = (id) => document.getElementById(id);
const turns = []; // of {asked, question, answer}; the newest may be running
let conversation = null; // its {id, at}, once it has a turn
let running = null; // the AbortController of the answer under way
let recommended = new Map(); // of each model: whether it thinks, and its sampling, where the temperature was not moved
let moved = false; // whether it was
let shown = null; // the answer whose figures the panel has
const plot = new Plot($("plot"), look);

async function connect() {
  try {
    recommended = await models();
    const names = [...recommended.keys()];
    $("model").replaceChildren(...names.map((name) => new Option(name)));
    $("model").disabled = names.length < 2;
    choose();
    $("ask-token").close();
    $("wrong-token").hidden = true;
    complain("");
  } catch (error) {
    fail(error);
  }
}

/** Shows the model's name, and the sampling that the server begins with for it, which counts until the temperature is moved. */
function choose() {
  $("serving").textContent = $("serving").title = $("model").value;
  $("serving").hidden = false;
  const { sampling: { temperature, ...others }, thinks } = recommended.get($("model").value) ?? { sampling: { temperature: 0 } };
  $("effort-row").hidden = !thinks;
  moved = false;
  $("temperature").value = $("degrees").textContent = temperature;
  const off = { top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1 };
  const on = Object.entries(others).filter(([name, value]) => value !== off[name]);
  $("others").textContent = on.map(([name, value]) => `${name} ${value}`).join(", ");
  $("others").hidden = !on.length;
}

/** `prediction`: an earlier answer, which this one may repeat for the most part; `instead`: the turn that it replaces, and
 *  those after it. */
async function send(text, prediction, instead) {
  if (running || !text.trim()) return;
  complain("");
  if (!$("model").length) await connect(); // it was not there, or knew us not, when the page was opened
  if (!$("model").length) {
    $("message").value ||= text;
    return;
  }
  conversation ??= { id: crypto.randomUUID(), at: Date.now() };
  const dropped = turns.includes(instead) ? turns.splice(turns.indexOf(instead)) : [];
  for (const { question, answer } of dropped) {
    question.remove();
    answer.element.remove();
  }
  const turn = append(text);
  down(true);
  await run(turn, prediction, () => takeBack(turn, dropped));
}

/** Adds a turn: its message, and an answer that is still empty. */
function append(text) {
  $("empty").hidden = true;
  const turn = { asked: text, question: question(text), answer: new Answer($("model").length > 1 ? $("model").value : "") };
  const edit = make("button", "edit", "Edit");
  edit.type = "button";
  edit.addEventListener("click", () => rewrite(turn));
  turn.question.append(edit);
  turns.push(turn);
  $("conversation").append(turn.question, turn.answer.element);
  return turn;
}

/** Lets the message of `turn` be written anew; sending it drops what came after. */
function rewrite(turn) {
  if (running || turn.question.querySelector("form")) return;
  const form = make("form", "rewrite"), field = make("textarea", "");
  field.value = turn.asked;
  field.setAttribute("aria-label", "Message, written anew");
  const [resend, cancel] = ["Send again", "Cancel"].map((text) => make("button", "", text));
  resend.type = "submit";
  cancel.type = "button";
  form.append(field, resend, cancel);
  const close = () => {
    form.remove();
    turn.question.classList.remove("rewriting");
  };
  cancel.addEventListener("click", close);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !field.value.trim()) return;
    send(field.value, turn.answer.text, turn);
  });
  turn.question.classList.add("rewriting");
  turn.question.append(form);
  field.focus();
}

async function again() {
  const turn = turns.at(-1);
  if (running || !turn) return;
  complain("");
  const old = turn.answer;
  turn.answer = new Answer($("model").length > 1 ? $("model").value : "");
  old.element.replaceWith(turn.answer.element);
  $("message").focus();
  await run(turn, old.text, () => {
    turn.answer.element.replaceWith(old.element);
    turn.answer = old;
    if (turn === turns.at(-1)) show(old);
  });
}

/** Asks for the answer of `turn`; `undo` is called where none came. */
async function run(turn, prediction, undo) {
  const answer = turn.answer, body = { ...request(), ...(prediction && { prediction: { type: "content", content: prediction } }) };
  let follow = true;
  running = new AbortController();
  busy(true);
  show(answer, body.speculate);
  try {
    for await (const chunk of ask(body, running.signal)) {
      follow = atEnd();
      answer.push(chunk);
      show(answer, body.speculate);
      down(follow);
    }
    answer.end();
    $("status").textContent = answer.text;
  } catch (error) {
    follow = atEnd();
    answer.end(error.name === "AbortError" ? "stopped" : "broken off");
    if (error.name !== "AbortError") fail(error);
    if (!answer.text && !answer.reasoning) undo();
  } finally {
    running = null;
    busy(false);
    show(shown, body.speculate);
    down(follow);
    save();
  }
}

/** Keeps the conversation in the browser, as far as it has answers. */
function save() {
  if (!conversation || !turns.length) return;
  const said = turns.map(({ asked, answer }) => ({
    asked,
    pieces: answer.pieces.map((piece) => piece.text),
    drafted: answer.pieces.map((piece) => Number(piece.drafted)).join(""),
    ...(answer.reasoning && { reasoning: answer.reasoning }),
  }));
  keep({ ...conversation, at: Date.now(), title: turns[0].asked.slice(0, 80), system: $("system").value, turns: said });
  list();
}

/** Shows a kept conversation, which then goes on. */
function open(old) {
  if (running) return;
  begin();
  conversation = { id: old.id };
  $("system").value = old.system ?? "";
  for (const { asked, pieces, drafted, reasoning } of old.turns) append(asked).answer.restore(pieces, drafted, reasoning);
  busy(false);
  show(turns.at(-1)?.answer ?? null);
  panel(false);
  list();
  down(true);
}

/** Lists the conversations that are kept. */
function list() {
  $("keep").checked = keeps();
  $("kept").replaceChildren(...kept().map((old) => {
    const item = make("li", ""), name = make("button", "title", old.title), away = make("button", "", "Delete");
    name.type = away.type = "button";
    name.setAttribute("aria-current", old.id === conversation?.id);
    away.setAttribute("aria-label", `Delete ${old.title}`);
    name.addEventListener("click", () => open(old));
    away.addEventListener("click", () => {
      remove(old.id);
      list();
    });
    item.append(name, away);
    return item;
  }));
}

/** Of the conversation up to the answer under way. */
function request() {
  const messages = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  for (const turn of turns) {
    messages.push({ role: "user", content: turn.asked });
    const { text, reasoning } = turn.answer;
    if (turn !== turns.at(-1)) messages.push({ role: "assistant", content: text, ...(reasoning && { reasoning_content: reasoning }) });
  }
  const temperature = Number($("temperature").value), most = Number($("most").value);
  const effort = $("effort-row").hidden ? "" : $("effort").value;
  const asked = { ...(moved && { temperature }), ...(most > 0 && { max_tokens: most }), ...(effort && { reasoning_effort: effort }) };
  return { model: $("model").value, messages, speculate: $("speculate").checked, ...asked };
}

/** A turn without an answer is none: its message goes back to where it was written, and those that it replaced return. */
function takeBack(turn, dropped) {
  const at = turns.indexOf(turn);
  if (at < 0) return;
  turns.splice(at, 1, ...dropped);
  turn.question.remove();
  turn.answer.element.remove();
  for (const { question, answer } of dropped) $("conversation").append(question, answer.element);
  if (!dropped.length) $("message").value ||= turn.asked;
  show(turns.at(-1)?.answer ?? null);
  $("empty").hidden = turns.length > 0;
}

function begin() {
  running?.abort();
  conversation = null;
  turns.length = 0;
  $("conversation").replaceChildren($("empty"));
  $("empty").hidden = false;
  complain("");
  show(null);
  $("message").focus();
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("conversation").setAttribute("aria-busy", is);
  if (is) $("status").textContent = "Answering";
  $("again")?.remove();
  if (is || !turns.length) return;
  const button = document.createElement("button");
  button.id = "again";
  button.type = "button";
  button.textContent = "Regenerate";
  button.addEventListener("click", again);
  turns.at(-1).answer.actions.append(button);
}

/** The figures of an answer in the panel. `speculate`: whether it was asked for. */
function show(answer, speculate = true) {
  if (answer !== shown) shown?.mark(null);
  shown = answer;
  $("rate").textContent = answer?.rate ? answer.rate.toFixed(1) : "";
  $("tokens").textContent = answer?.tokens || "–";
  $("per-step").textContent = answer?.tau ? answer.tau.toFixed(2) : "–";
  $("first").textContent = answer?.first ? seconds(answer.first) : "–";
  $("known").textContent = answer?.known || "–";
  const said = answer?.record?.speculation ?? (answer && !speculate ? "off (switched off below)" : "");
  $("speculation").textContent = said && `speculation: ${said}`;
  plot.show(answer?.steps ?? []);
  if (plot.at === null) $("readout").textContent = running ? "" : plot.summary;
}

function look(step) {
  $("readout").textContent = step === null ? plot.summary : plot.describe(step);
  shown?.mark(step);
}

/** One line above the message, or none. */
function complain(line) {
  $("error").textContent = line;
  $("error").hidden = !line;
}

function fail(error) {
  if (!(error instanceof Refused)) console.error(error);
  if (error.status === 401) {
    if ($("ask-token").open) $("wrong-token").hidden = false;
    else $("ask-token").showModal();
  } else complain(error.message.split("\n")[0]);
}

function atEnd() {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  return scrollHeight - scrollTop - clientHeight < 40;
}

function down(follow) {
  if (follow) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function panel(open) {
  document.body.classList.toggle("panel-open", open);
  $("open-panel").setAttribute("aria-expanded", open);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const text = $("message").value;
  $("message").value = "";
  send(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("message").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("ask-token").open) return;
  if (document.body.classList.contains("panel-open")) panel(false);
  else running?.abort();
});
$("new").addEventListener("click", begin);
$("open-panel").addEventListener("click", () => panel(!document.body.classList.contains("panel-open")));
$("colours").addEventListener("change", () => document.body.classList.toggle("uncoloured", !$("colours").checked));
$("markdown").addEventListener("change", () => document.body.classList.toggle("source", !$("markdown").checked));
$("keep").addEventListener("change", () => {
  setKeeping($("keep").checked);
  save();
  list();
});
$("temperature").addEventListener("input", () => {
  moved = true;
  $("degrees").textContent = $("temperature").value;
  $("others").hidden = !Number($("temperature").value) || !$("others").textContent; // 0: greedy, all is off
});
$("model").addEventListener("change", choose);
$("serving").addEventListener("click", () => $("serving").setAttribute("aria-expanded", $("serving").ariaExpanded !== "true"));
$("conversation").addEventListener("pointerover", (event) => {
  const inside = shown?.element.contains(event.target);
  plot.look(inside ? Number(event.target.dataset.step) || null : null);
});
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value.trim());
  $("token").value = "";
  $("wrong-token").hidden = true;
  connect();
});
addEventListener("hashchange", () => takeToken() && connect());

takeToken();
connect();
list();
