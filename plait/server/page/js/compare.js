/** Two replies to one message, side by side: by two models, or by one with two settings. One of them is kept. */

import { events } from "./api.js";
import { byId, make, say } from "./dom.js";
import { MessageView } from "./message.js";
import { Reply, emptyReply } from "./reply.js";
import { chatBody, textBody } from "./request.js";

const NAMES = ["Left", "Right"];
const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: "any", inputmode: "decimal" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any", inputmode: "decimal" }],
  ["max_tokens", "Max tokens", { min: 1, step: 1, inputmode: "numeric" }],
  ["seed", "Seed", { min: 0, step: 1, inputmode: "numeric" }],
];

/** One side: its model and settings, and the reply that they make. */
class Side {
  constructor(name, hooks) {
    this.name = name;
    this.hooks = hooks;
    this.message = null;
    this.fields = make("div", { class: "side-fields" });
    this.output = make("div", { class: "side-output", tabindex: "0", role: "region", "aria-label": `${name} reply` });
    const keep = { type: "button", disabled: true, onclick: () => hooks.keep(this) };
    this.keeps = make("button", keep, `Keep the ${name.toLowerCase()} reply`);
    const head = make("h3", {}, name);
    this.node = make("section", { class: "side", "aria-label": name }, head, this.fields, this.output, this.keeps);
  }

  /** Begin with these settings, and with the model of this name, where there are several. */
  reset(settings, names, model) {
    this.settings = { ...settings };
    this.model = model;
    this.empty();
    const rows = FIELDS.map(([field, label, limits]) => this.number(field, label, limits));
    const system = make("textarea", { rows: 2, oninput: (event) => this.set("system", event.target.value) });
    system.value = this.settings.system ?? "";
    this.fields.replaceChildren(
      ...(names.length > 1 ? [this.choice(names)] : []),
      make("div", { class: "numbers" }, ...rows),
      ...(this.hooks.isChat() ? [make("label", { class: "field" }, make("span", {}, "System prompt"), system)] : []),
    );
  }

  empty() {
    this.message = null;
    this.output.replaceChildren();
    this.keeps.disabled = true;
  }

  number(field, label, limits) {
    const oninput = (event) => {
      event.target.setAttribute("aria-invalid", String(!event.target.checkValidity()));
      this.set(field, event.target.value);
    };
    const input = make("input", { type: "number", placeholder: "default", ...limits, oninput });
    input.value = this.settings[field] ?? "";
    return make("label", { class: "field" }, make("span", {}, label), input);
  }

  choice(names) {
    const select = make("select", { onchange: (event) => (this.model = event.target.value) });
    select.append(...names.map((name) => make("option", { value: name }, name)));
    select.value = this.model;
    return make("label", { class: "field" }, make("span", {}, "Model"), select);
  }

  set(field, value) {
    if (value === "") delete this.settings[field];
    else this.settings[field] = value;
  }

  /** Fill the reply from a stream; an error is shown where the reply would be. */
  async run(before, signal) {
    const message = (this.message = emptyReply()),
      isChat = this.hooks.isChat();
    if (this.model) message.model = this.model;
    const refuse = () => say("Keep the reply first"); // what is done with a reply is done in the conversation
    const view = new MessageView(message, isChat ? "chat" : "text", {
      again: refuse,
      edit: refuse,
      answer: refuse,
      turn: refuse,
      fork: refuse,
      canFork: () => false,
      whole: () => message.content,
    });
    this.output.replaceChildren(view.node);
    this.keeps.disabled = true;
    view.update(true);
    const reply = new Reply(message, performance.now());
    try {
      const settings = { ...this.settings, model: this.model };
      const [path, body] = isChat
        ? ["v1/chat/completions", chatBody(before, settings)]
        : ["v1/completions", textBody(before, settings)];
      for await (const event of events(path, body, signal)) {
        reply.add(event, performance.now());
        this.draw(view);
      }
      reply.close();
    } catch (error) {
      reply.close(signal.aborted);
      if (!signal.aborted) message.error = error.message;
    }
    view.update(false);
    this.keeps.disabled = !message.content && !message.tool_calls.length;
  }

  /** At most one drawing per frame. */
  draw(view) {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (view.node.getAttribute("aria-busy") === "true") view.update(true);
    });
  }
}

export class Compare {
  /**
   * `hooks`: conversation(), settings(), model() of the conversation, names() of all models, draft() and
   * setDraft(text), whole(draft) with the files that go with it, kept({text, message, other, model, settings}).
   */
  constructor(hooks) {
    this.hooks = hooks;
    this.running = null;
    const isChat = () => hooks.conversation().mode === "chat";
    this.sides = NAMES.map((name) => new Side(name, { isChat, keep: (side) => this.keep(side) }));
    byId("compare-sides").append(...this.sides.map((side) => side.node));
    const form = byId("compare-form"),
      dialog = byId("compare");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    byId("compare-stop").addEventListener("click", () => this.stop());
    byId("compare-close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("cancel", (event) => {
      if (!this.running) return;
      event.preventDefault();
      this.stop();
    });
    dialog.addEventListener("close", () => {
      this.stop();
      if (!this.isKept) hooks.setDraft(byId("compare-text").value);
    });
  }

  open() {
    const { hooks } = this,
      names = hooks.names(),
      model = hooks.model();
    const other = names.find((name) => name !== model) ?? model;
    this.isKept = false;
    if (this.conversation !== hooks.conversation()) {
      this.conversation = hooks.conversation();
      this.sides[0].reset(hooks.settings(), names, model);
      this.sides[1].reset(hooks.settings(), names, other);
    }
    byId("compare-text").value = hooks.draft();
    byId("compare").showModal();
    byId("compare-text").focus();
  }

  async run() {
    const { messages, mode } = this.hooks.conversation(),
      draft = byId("compare-text").value;
    const text = this.hooks.whole(mode === "chat" ? draft.trim() : draft);
    if (this.running) return;
    if (text === "" && (mode === "chat" || messages.length === 0)) {
      byId("compare-text").focus();
      return;
    }
    this.text = text;
    const before = text === "" ? [...messages] : [...messages, { role: "user", content: text }];
    const abort = (this.running = new AbortController());
    this.showRunning(true);
    say("Both are replying");
    this.ended = Promise.all(this.sides.map((side) => side.run(before, abort.signal)));
    await this.ended;
    this.running = null;
    this.showRunning(false);
    say("Both replies are there");
  }

  stop() {
    this.running?.abort();
  }

  /** Take this reply into the conversation, and the other as another version of it. */
  async keep(side) {
    const { message, model, settings } = side,
      other = this.sides.find((one) => one !== side).message;
    this.stop();
    await this.ended;
    this.isKept = true;
    this.conversation = null; // the next comparison begins with what the conversation has then
    for (const one of this.sides) one.empty();
    byId("compare").close();
    const isWorthKeeping = other.content !== "" || other.tool_calls.length > 0;
    const name = side.name.toLowerCase();
    this.hooks.kept({ text: this.text, message, other: isWorthKeeping ? other : null, model, settings, name });
  }

  showRunning(isRunning) {
    byId("compare-run").hidden = isRunning;
    byId("compare-stop").hidden = !isRunning;
    byId(isRunning ? "compare-stop" : "compare-run").focus();
  }
}
