/** A reply as its tokens, shaded by how sure the model was; a chosen one shows what else could have stood there. */

import { make } from "./dom.js";

/** The tokens as nodes in `node`. `onFork(position, text)`: the reader wants another word there. */
export class TokenView {
  constructor(node, onFork, canFork) {
    this.node = node;
    this.onFork = onFork;
    this.canFork = canFork; // asked when it matters: a reply that grows may turn out to hold a tool call
    this.count = 0;
    this.chosen = null;
    this.card = null;
    node.addEventListener("click", (event) => this.choose(event.target.closest(".token")));
    node.addEventListener("keydown", (event) => this.move(event));
    node.addEventListener("focusout", (event) => {
      // Gone to somewhere else on the page: what lies over the text closes.
      if (event.relatedTarget && !node.contains(event.relatedTarget)) this.close(false);
    });
  }

  /** Show the tokens; those that are there already stay. */
  show(tokens) {
    this.tokens = tokens;
    for (; this.count < tokens.length; this.count++)
      this.node.append(this.token(tokens[this.count], this.count));
  }

  token({ text, p }, at) {
    const name = `${visible(text)}, ${percent(p)}`;
    const settings = {
      class: `token p${shade(p)}`,
      role: "button",
      tabindex: at ? "-1" : "0",
      "aria-label": name,
    };
    const node = make("span", { ...settings, title: percent(p) }, text);
    node.dataset.at = at;
    return node;
  }

  move(event) {
    const at = Number(event.target.dataset?.at);
    if (!event.target.classList.contains("token")) {
      if (event.key === "Escape") this.close(true);
      return;
    }
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) this.focus(at + step, event.target);
    else if (event.key === "Enter" || event.key === " ") this.choose(event.target);
    else if (event.key === "Escape") this.close(true);
    else return;
    event.preventDefault();
  }

  focus(at, from) {
    const next = this.node.querySelector(`.token[data-at="${at}"]`);
    if (!next) return;
    from.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  choose(node) {
    if (!node) return;
    const wasChosen = this.chosen === node;
    this.close(false);
    if (wasChosen) return;
    this.chosen = node;
    node.classList.add("chosen");
    this.card = this.alternatives(Number(node.dataset.at));
    node.after(this.card);
    this.place(node);
    this.card.querySelector("button:not(:disabled)")?.focus({ preventScroll: true });
    this.card.scrollIntoView({ block: "nearest" });
  }

  /** Under the token's first line, and never beyond the right edge of the text. */
  place(node) {
    const box = (this.card.offsetParent ?? this.node).getBoundingClientRect(),
      line = node.getClientRects()[0];
    const left = Math.min(line.left - box.left, box.width - this.card.offsetWidth);
    this.card.style.left = `${Math.max(left, 0)}px`;
    this.card.style.top = `${line.bottom - box.top + 6}px`;
  }

  close(returnsFocus) {
    this.card?.remove();
    this.chosen?.classList.remove("chosen");
    if (returnsFocus) this.chosen?.focus();
    this.card = this.chosen = null;
  }

  alternatives(at) {
    const { text, p, top } = this.tokens[at];
    const known = top.some((one) => one.text === text) ? top : [...top, { text, p }];
    const rows = known.map((one) => this.row(one, one.text === text, at));
    const rest = 1 - known.reduce((sum, one) => sum + one.p, 0);
    const more = make(
      "div",
      { class: "quiet small" },
      `Everything else ${percent(Math.max(rest, 0))}`,
      this.canLeave(at) ? ". Choose one to go on from it." : "",
    );
    return make(
      "div",
      { class: "alternatives", role: "group", "aria-label": "What could have stood here" },
      ...rows,
      more,
    );
  }

  /** Whether the text before a token can be said again: half characters have no text of their own. */
  canLeave(at) {
    return this.canFork() && this.tokens.slice(0, at).every(({ text }) => text === "" || isWhole(text));
  }

  row({ text, p }, isTaken, at) {
    const bar = make("span", { class: "bar" });
    bar.style.setProperty("--share", p.toFixed(4));
    const parts = [
      bar,
      make("span", { class: "alt-text" }, visible(text)),
      make("span", { class: "num alt-p" }, percent(p)),
    ];
    const canFork = this.canLeave(at) && !isTaken && isWhole(text);
    const settings = { type: "button", class: isTaken ? "alt taken" : "alt", disabled: !canFork };
    const hint = isTaken ? "the token that was taken" : canFork ? "Go on from this one instead" : "";
    return make("button", { ...settings, title: hint, onclick: () => this.onFork(at, text) }, ...parts);
  }
}

/** White space made visible, so that tokens can be told apart. */
export function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}

export const percent = (p) =>
  p >= 0.9995
    ? "100 %"
    : p >= 0.1
      ? `${(100 * p).toFixed(0)} %`
      : p >= 0.001
        ? `${(100 * p).toFixed(1)} %`
        : "< 0.1 %";

const isWhole = (text) => text !== "" && !text.includes("\ufffd") && !text.startsWith("bytes:");
const shade = (p) => (p > 0.9 ? 0 : p > 0.6 ? 1 : p > 0.3 ? 2 : p > 0.1 ? 3 : 4);
