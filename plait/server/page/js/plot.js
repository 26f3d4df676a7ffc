/** Small plots of the last minutes, drawn as SVG. The newest value stands at the right. */

import { draw, make } from "./dom.js";

const WIDTH = 300,
  HEIGHT = 56,
  PAD = 3;

/** Lines over time. `lines`: [{name, kind}], kind a class; the first is filled. `unit(value)` -> text. */
export class Plot {
  constructor(title, lines, unit, length) {
    this.lines = lines;
    this.unit = unit;
    this.length = length;
    this.paths = lines.map(({ kind }) => draw("path", { class: `line ${kind}` }));
    this.area = draw("path", { class: `area ${lines[0].kind}` });
    this.cursor = draw("path", { class: "cursor" });
    this.svg = draw(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", class: "plot" },
      this.area,
      ...this.paths,
      this.cursor,
    );
    this.values = lines.map(() => make("strong", { class: "num" }, "–"));
    this.top = make("span", { class: "top-mark num quiet" });
    const names = lines.map(({ name, kind }, i) =>
      make("span", { class: `key ${kind}` }, name, " ", this.values[i]),
    );
    this.title = title;
    const head = make(
      "div",
      { class: "plot-head" },
      make("h4", {}, title),
      make("div", { class: "keys" }, ...names),
    );
    this.node = make(
      "figure",
      { class: "plot-box" },
      head,
      make("div", { class: "plot-frame" }, this.svg, this.top),
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  /** `series`: one list of numbers or nulls for each line, oldest first. */
  show(series) {
    this.series = series;
    const most = Math.max(...series.flat().filter((value) => value !== null), 0);
    this.most = ceiling(most);
    series.forEach((values, i) => this.paths[i].setAttribute("d", this.path(values)));
    this.area.setAttribute("d", this.filled(series[0]));
    this.top.textContent = most > 0 ? this.unit(this.most) : "";
    this.label(this.at ?? null);
    const latest = this.lines.map(({ name }, i) => `${name} ${this.text(series[i].at(-1))}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: now ${latest}`);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    this.at = event && Math.round(((event.clientX - box.left) / box.width) * (this.length - 1));
    this.label(this.at);
  }

  label(at) {
    if (!this.series) return;
    const isLive = at === null;
    this.cursor.setAttribute("d", isLive ? "" : `M${this.x(at)} 0V${HEIGHT}`);
    this.series.forEach((values, i) => {
      const from = this.length - values.length;
      this.values[i].textContent = this.text(isLive ? values.findLast((v) => v !== null) : values[at - from]);
    });
  }

  text(value) {
    return value === null || value === undefined ? "–" : this.unit(value);
  }
  x(at) {
    return ((at / (this.length - 1)) * WIDTH).toFixed(1);
  }
  y(value) {
    return (HEIGHT - PAD - (value / (this.most || 1)) * (HEIGHT - 2 * PAD)).toFixed(1);
  }

  path(values) {
    let text = "",
      pen = "M";
    values.forEach((value, i) => {
      if (value === null) {
        pen = "M";
        return;
      }
      text += `${pen}${this.x(this.length - values.length + i)} ${this.y(value)}`;
      pen = "L";
    });
    return text;
  }

  filled(values) {
    const known = values.map((value) => value ?? 0);
    if (known.length < 2) return "";
    return `${this.path(known)}V${HEIGHT}H${this.x(this.length - known.length)}Z`;
  }
}

/** A bar in parts, with a legend that says each part's number. */
export class Bar {
  constructor(title, parts) {
    this.title = title;
    this.parts = parts.map(({ name, kind }) => ({
      name,
      kind,
      node: make("span", { class: `part ${kind}` }),
      number: make("strong", { class: "num" }),
    }));
    this.bar = make("div", { class: "stack", role: "img" }, ...this.parts.map((part) => part.node));
    this.total = make("span", { class: "num quiet small" });
    const keys = this.parts.map(({ name, kind, number }) =>
      make("span", { class: `key ${kind}` }, name, " ", number),
    );
    this.node = make(
      "div",
      { class: "bar-box" },
      make("div", { class: "plot-head" }, make("h4", {}, title), this.total),
      this.bar,
      make("div", { class: "keys" }, ...keys),
    );
  }

  show(counts) {
    const all = this.parts.reduce((sum, { name }) => sum + (counts[name] ?? 0), 0);
    this.node.hidden = all === 0;
    this.total.textContent = whole(all);
    for (const { name, node, number } of this.parts) {
      const count = counts[name] ?? 0;
      node.style.setProperty("--share", String(all ? count / all : 0));
      number.textContent = whole(count);
    }
    this.bar.setAttribute(
      "aria-label",
      `${this.title}: ${this.parts.map(({ name }) => `${counts[name] ?? 0} ${name}`).join(", ")}`,
    );
  }
}

/** A round number not below this one, so that a plot's scale is calm. */
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * power >= value) * power;
}

export const whole = (value) => Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
export const time = (s) =>
  s < 0.001
    ? `${(s * 1e6).toFixed(0)} µs`
    : s < 0.01
      ? `${(s * 1000).toFixed(1)} ms`
      : s < 1
        ? `${(s * 1000).toFixed(0)} ms`
        : `${s.toFixed(s < 10 ? 2 : 0)} s`;
export const bytes = (n) =>
  n < 1024
    ? `${n} B`
    : n < 2 ** 20
      ? `${(n / 1024).toFixed(0)} KiB`
      : n < 2 ** 30
        ? `${(n / 2 ** 20).toFixed(0)} MiB`
        : `${(n / 2 ** 30).toFixed(1)} GiB`;
