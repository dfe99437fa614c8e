// Shows the turns of the conversation: an answer grows token by token and keeps the figures of its steps.
// Whatever a model or a person wrote goes through textContent.

import { markTokens, render } from "/page/markdown.js";

const ENDS = { length: "cut at max tokens", timeout: "out of time", cancelled: "stopped" };

export function make(tag, name, text = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
}

export function question(text) {
  const turn = make("article", "turn question");
  turn.append(make("h2", "unseen", "You"), make("p", "text", text));
  return turn;
}

/** A button that copies what `text()` gives. */
export function copyButton(text, label = "Copy") {
  const button = make("button", "copy", label);
  button.type = "button";
  button.addEventListener("click", async () => {
    let done = "Copied";
    await navigator.clipboard.writeText(text()).catch(() => { done = "Not copied: the browser forbids it"; });
    button.textContent = done;
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

export class Answer {
  /** `model`: shown above it; "" for none. */
  constructor(model) {
    this.element = make("article", "turn answer running");
    this.thought = make("details", "thought"); // what the model thinks first, folded
    this.thought.hidden = true;
    this.thinking = make("p", "reasoning");
    this.thought.append(make("summary", "quiet", "Thinking"), this.thinking);
    this.body = make("p", "text"); // the tokens as they came; beside it the same as Markdown
    this.rendered = make("div", "rendered");
    this.note = make("p", "note quiet");
    this.actions = make("div", "actions");
    this.element.append(make("h2", model ? "quiet" : "unseen", model || "Answer"), this.thought, this.body, this.rendered, this.note, this.actions);
    this.text = this.shown = this.reasoning = "";
    this.pieces = []; // of {text, drafted, step}, the tokens
    this.waiting = 0; // the frame that will render, if one was asked for
    this.fenced = false; // inside a block of code
    this.steps = []; // of {rows, accepted, committed, tau}
    this.tokens = 0;
    this.drafted = 0;
    this.rate = 0;
    this.tau = null;
    this.first = null; // seconds until the first token
    this.record = null; // the server's, once it is complete
    this.ended = "";
    this.began = performance.now();
  }

  /** A chunk of the stream. */
  push(chunk) {
    const said = chunk.streamspec;
    const content = chunk.choices[0].delta.content;
    this.first ??= said.committed ? (performance.now() - this.began) / 1000 : null;
    this.tokens += said.committed;
    this.drafted += said.accepted;
    this.rate = said.tokens_per_second || this.rate;
    if (said.rows > 1) this.tau = said.tokens_per_step;
    if (said.rows > 0) this.steps.push({ rows: said.rows, accepted: said.accepted, committed: said.committed, tau: said.tokens_per_step });
    this.#think(chunk.choices[0].delta.reasoning_content);
    said.tokens.forEach((text, i) => this.#token(text, said.drafted[i]));
    this.text += content;
    if (chunk.choices[0].finish_reason) {
      this.record = said;
      this.ended = ENDS[said.finish_reason] ?? "";
    }
  }

  /** Nothing follows. `why`: where something else than its own end ended it. */
  end(why = "") {
    this.ended ||= why;
    this.element.classList.remove("running");
    this.thought.firstChild.textContent = "Thought";
    this.note.textContent = [this.ended, ...this.#figures()].filter(Boolean).join(" · ");
    this.#render();
    for (const frame of this.rendered.querySelectorAll("pre")) frame.after(copyButton(() => frame.textContent, "Copy code"));
    if (this.text) this.actions.append(copyButton(() => this.text));
  }

  /** Shows an answer of a kept conversation: its tokens, and which of them were `drafted` ("0" or "1" each). */
  restore(pieces, drafted, reasoning) {
    this.#think(reasoning);
    pieces.forEach((text, i) => this.#token(text, drafted[i] === "1"));
    this.text = this.shown;
    this.end();
  }

  /** Shows which tokens a step brought; none for null. */
  mark(step) {
    for (const token of this.element.querySelectorAll(".looked-at")) token.classList.remove("looked-at");
    if (step !== null) for (const token of this.element.querySelectorAll(`[data-step="${step}"]`)) token.classList.add("looked-at");
  }

  get known() {
    return this.record && `${this.record.reused_tokens} of ${this.record.prompt_tokens}`;
  }

  #think(text) {
    if (!text) return;
    this.reasoning += text;
    this.thinking.append(text);
    this.thought.hidden = false;
  }

  #token(text, drafted) {
    if (!text) return;
    const before = this.fenced;
    this.shown += text;
    this.fenced = this.shown.split("```").length % 2 === 0;
    const name = `token${drafted ? " drafted" : ""}${before || this.fenced ? " code" : ""}`;
    const token = make("span", name, drafted ? text.match(/^\s*/)[0] : text);
    if (drafted) token.append(make("span", "ink", text.trimStart())); // a mark begins with the word, not with the space before it
    token.dataset.step = this.steps.length; // 0: the call that read the prompt
    this.body.append(token);
    this.pieces.push({ text, drafted, step: this.steps.length });
    this.waiting ||= requestAnimationFrame(() => this.#render());
  }

  #render() {
    cancelAnimationFrame(this.waiting);
    this.waiting = 0;
    this.rendered.replaceChildren(...render(this.shown));
    markTokens(this.rendered, this.pieces.map((piece) => piece.text), (span, number) => {
      span.className = this.pieces[number].drafted ? "drafted ink" : "";
      span.dataset.step = this.pieces[number].step;
      return span;
    });
  }

  #figures() {
    if (!this.tokens) return [];
    const plural = this.tokens === 1 ? "token" : "tokens";
    return [
      `${this.tokens} ${plural}, ${this.drafted} drafted`,
      this.rate && `${this.rate.toFixed(1)} tokens/s`,
      this.tau !== null && `${this.tau.toFixed(2)} per step`,
      `first after ${seconds(this.first)}`,
      this.record && `prompt: ${this.known} cached`,
    ];
  }
}

export function seconds(time) {
  return time < 1 ? `${Math.round(1000 * time)} ms` : `${time.toFixed(1)} s`;
}
