/** One message on the page. A view is made once and then told what changed. */

import { make, iconButton, copyButton } from "./dom.js";
import { Markdown } from "./markdown.js";
import { TokenView } from "./tokens.js";
import { toolCalls } from "./calls.js";
import { count, place } from "./versions.js";

/** `actions`: {again, turn, edit, answer, fork, canFork, whole}: what the reader may want done; see chat.js. */
export class MessageView {
  constructor(message, mode, actions) {
    this.message = message;
    this.mode = mode;
    this.actions = actions;
    this.body = make("div", { class: "body" });
    this.foot = make("footer", { class: "foot" });
    const who = { user: mode === "text" ? "Your text" : "You", assistant: "Reply", tool: "Tool result" }[
      message.role
    ];
    const name = make("h2", { class: "unseen" }, who);
    this.node = make("article", { class: `message ${message.role} ${mode}` }, name, this.body, this.foot);
    this.showsTokens = true;
    this.update(false);
  }

  /** Show the message as it is now. While it is `live` there is nothing to do with it yet. */
  update(isLive) {
    this.node.classList.toggle("live", isLive);
    this.node.setAttribute("aria-busy", String(isLive));
    if (this.message.role === "assistant") this.updateReply(isLive);
    else this.text(this.message.content);
    if (!isLive) this.close();
  }

  updateReply(isLive) {
    const { message } = this;
    if (message.reasoning) this.reasoning(isLive);
    const hasTokens = message.tokens?.length > 0;
    if (hasTokens && this.showsTokens) this.tokens();
    else if (this.mode === "text") this.text(message.content);
    else this.markdown();
    if (message.tool_calls?.length) this.calls(isLive);
    this.node.classList.toggle("waits", isLive && !message.content && !message.reasoning && !hasTokens);
  }

  text(content) {
    this.plain ??= this.part(make("div", { class: "plain" }));
    if (this.plain.textContent !== content) this.plain.textContent = content;
  }

  markdown() {
    this.drawn ??= new Markdown(this.part(make("div", { class: "prose" })));
    this.drawn.show(this.message.content);
  }

  tokens() {
    const { fork, canFork } = this.actions;
    this.shaded ??= new TokenView(
      this.part(make("div", { class: "tokens" })),
      (at, text) => fork(this.message, at, text),
      () => canFork(this.message),
    );
    this.shaded.show(this.message.tokens);
  }

  reasoning(isLive) {
    if (!this.thought) {
      this.thoughtTitle = make("span");
      const summary = make("summary", {}, this.thoughtTitle);
      const inner = make("div", { class: "prose quiet" });
      this.thought = new Markdown(inner);
      this.body.prepend(make("details", { class: "reasoning" }, summary, inner));
    }
    const isThinking = isLive && !this.message.content;
    this.thoughtTitle.textContent = isThinking ? "Thinking…" : "Reasoning";
    this.thoughtTitle.classList.toggle("shimmer", isThinking);
    this.thought.show(this.message.reasoning);
  }

  calls(isLive) {
    this.asked?.remove();
    this.asked = toolCalls(this.message, isLive, this.actions.answer, this.actions.tools);
    this.body.append(this.asked);
  }

  part(node) {
    this.body.insertBefore(node, this.asked ?? null);
    return node;
  }

  close() {
    const { message, actions } = this;
    const buttons = [copyButton("Copy", () => message.content)];
    if (message.role === "assistant") {
      buttons.push(iconButton("again", "Regenerate", () => actions.again(message)));
      if (message.tokens?.length) buttons.push(this.tokensButton());
    }
    if (message.role === "user" || this.mode === "text") {
      buttons.push(iconButton("edit", "Edit", () => this.edit()));
    }
    const error = message.error ? this.failure(message.error) : null;
    this.foot.replaceChildren(
      ...(error ? [error] : []),
      make("div", { class: "acts" }, ...buttons, this.versions()),
      facts(message.stats),
    );
  }

  /** Which version this is, and the way to its neighbours; null where there is one alone. */
  versions() {
    const { message, actions } = this,
      all = count(message);
    if (all === 1) return null;
    const at = place(message);
    const step = (icon, label, by, isEnd) =>
      iconButton(icon, label, () => actions.turn(message, by), { disabled: isEnd });
    this.steps = [
      step("before", "Version before", -1, at === 1),
      step("after", "Version after", 1, at === all),
    ];
    const [before, after] = this.steps;
    const which = make("span", { class: "small num", role: "status" }, `${at} of ${all}`);
    return make("div", { class: "versions", role: "group", "aria-label": "Versions" }, before, which, after);
  }

  /** Keep the focus where versions are turned. */
  focusVersions(step) {
    const [before, after] = this.steps ?? [];
    const wanted = step < 0 ? before : after;
    (wanted?.disabled ? (step < 0 ? after : before) : wanted)?.focus();
  }

  tokensButton() {
    const label = this.showsTokens ? "Show as text" : "Show as tokens";
    return iconButton("tokens", label, () => this.flip(), { "aria-pressed": String(this.showsTokens) });
  }

  flip() {
    this.showsTokens = !this.showsTokens;
    for (const name of ["plain", "drawn", "shaded"]) {
      const old = this[name];
      (old?.node ?? old)?.remove();
      this[name] = undefined;
    }
    this.update(false);
    this.foot.querySelector("[aria-pressed]")?.focus();
  }

  failure(text) {
    const retry = make(
      "button",
      { type: "button", onclick: () => this.actions.again(this.message) },
      "Try again",
    );
    return make("div", { class: "failure", role: "alert" }, make("span", {}, text), retry);
  }

  edit() {
    const area = make("textarea", { class: "editor", "aria-label": "Edit the message" });
    area.value = this.mode === "text" ? this.actions.whole() : this.message.content;
    const done = (text) => {
      this.actions.edit(this.message, text);
    };
    const cancel = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
    };
    const sends = this.mode === "chat";
    const form = make(
      "form",
      {
        class: "edit",
        onsubmit: (event) => {
          event.preventDefault();
          done(area.value);
        },
        onkeydown: (event) => {
          if (event.key === "Escape") cancel();
          if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) form.requestSubmit();
        },
      },
      area,
      make(
        "div",
        { class: "edit-row" },
        make("button", { type: "button", onclick: cancel }, "Cancel"),
        make("button", { type: "submit", class: "primary" }, sends ? "Send" : "Keep"),
      ),
    );
    this.body.replaceWith(form);
    this.foot.hidden = true;
    area.style.setProperty("--rows", String(Math.min(area.value.split("\n").length + 1, 16)));
    area.focus();
  }
}

/** How long a reply took, in the words people compare. */
function facts(stats = {}) {
  const found = [];
  const add = (text, title) => found.push(make("span", { title }, text));
  if (stats.rate)
    add(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tok/s`, "Output tokens per second, after the first");
  if (stats.first_ms > 0)
    add(`first ${seconds(stats.first_ms)}`, "Time to first token, as this browser saw it");
  if (stats.tokens) add(`${stats.tokens} tok`, "Output tokens");
  if (stats.prompt) {
    const cached = stats.cached ? `, ${stats.cached} cached` : "";
    add(
      `prompt ${stats.prompt}${cached}`,
      "Tokens of the prompt, and how many did not have to be computed again",
    );
  }
  const ends = { length: "cut at the limit", stopped: "stopped", content_filter: "filtered" };
  if (ends[stats.finish]) add(ends[stats.finish], "Why it ended");
  return make("div", { class: "facts num small quiet" }, ...found);
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
