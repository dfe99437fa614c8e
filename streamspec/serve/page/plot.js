// Draws the steps of an answer: a grey bar as high as the tree, in it the accepted tokens, over all the running tokens per step.
// `steps`: a list of {rows, accepted, committed, tau}.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 18, RIGHT = 4, TOP = 8, BOTTOM = 16;
const FEWEST = 24; // steps that the width has room for, so that the first bars are not as wide as the picture

export class Plot {
  /** `looked(step)` is called with the step looked at, counted from 1, or null. */
  constructor(svg, looked) {
    this.svg = svg;
    this.looked = looked;
    this.steps = [];
    this.at = null;
    new ResizeObserver(() => this.draw()).observe(svg);
    svg.addEventListener("pointermove", (event) => this.look(this.#under(event.offsetX)));
    svg.addEventListener("pointerleave", () => this.look(null));
    svg.addEventListener("blur", () => this.look(null));
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !this.steps.length) return;
      event.preventDefault();
      const from = this.at ?? (by > 0 ? 0 : this.steps.length + 1);
      this.look(Math.min(Math.max(from + by, 1), this.steps.length));
    });
  }

  show(steps) {
    if (steps !== this.steps) this.at = null;
    this.steps = steps;
    this.draw();
  }

  look(step) {
    if (step === this.at) return;
    this.at = step;
    this.draw();
    this.looked(step);
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const most = Math.max(4, ...this.steps.map((step) => Math.max(step.rows, step.committed)));
    const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / most);
    const count = Math.max(FEWEST, this.steps.length);
    const pitch = (width - LEFT - RIGHT) / count;
    const gap = pitch > 4 ? 1 : 0;
    const bars = (value) => this.steps.map((step, i) => value(step) && bar(LEFT + i * pitch, y(value(step)), pitch - gap, y(0))).filter(Boolean).join("");
    const line = this.steps.map((step, i) => `${i ? "L" : "M"}${(LEFT + (i + 0.5) * pitch).toFixed(1)} ${y(step.tau).toFixed(1)}`).join("");
    const parts = [];
    for (const tick of ticks(most)) {
      parts.push(shape("path", { class: "grid", d: `M${LEFT} ${y(tick).toFixed(1)}H${width - RIGHT}` }));
      parts.push(words(tick, LEFT - 5, y(tick) + 3.5, "end"));
    }
    if (this.at !== null) parts.push(shape("path", { class: "at", d: bar(LEFT + (this.at - 1) * pitch - 0.5, TOP, pitch - gap + 1, y(0)) }));
    parts.push(shape("path", { class: "rows", d: bars((step) => step.rows) }));
    parts.push(shape("path", { class: "accepted", d: bars((step) => step.accepted) }));
    if (this.steps.length) parts.push(shape("path", { class: "tau", d: this.steps.length > 1 ? line : `${line}h1` }));
    if (this.steps.length) parts.push(words("step 1", LEFT, height - 3, "start"));
    if (this.steps.length > 6) parts.push(words(this.steps.length, LEFT + this.steps.length * pitch, height - 3, "end"));
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", this.summary || "No steps yet");
  }

  get summary() {
    if (!this.steps.length) return "";
    const mean = (name) => (this.steps.reduce((sum, step) => sum + step[name], 0) / this.steps.length).toFixed(1);
    return `${this.steps.length} ${this.steps.length === 1 ? "step" : "steps"}: ${mean("rows")} rows, ${mean("accepted")} accepted on average`;
  }

  describe(step) {
    const { rows, accepted, committed } = this.steps[step - 1];
    return `step ${step}: ${rows} ${rows === 1 ? "row" : "rows"}, ${accepted} accepted, ${committed} ${committed === 1 ? "token" : "tokens"}`;
  }

  #under(x) {
    const pitch = (this.svg.clientWidth - LEFT - RIGHT) / Math.max(FEWEST, this.steps.length);
    const step = Math.floor((x - LEFT) / pitch) + 1;
    return step >= 1 && step <= this.steps.length ? step : null;
  }
}

function bar(x, top, width, bottom) {
  return `M${x.toFixed(1)} ${bottom.toFixed(1)}V${top.toFixed(1)}h${width.toFixed(2)}V${bottom.toFixed(1)}z`;
}

function ticks(most) {
  const step = [1, 2, 5, 10, 20, 50].find((size) => most / size <= 4) ?? 100;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function words(text, x, y, anchor) {
  const element = shape("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}
