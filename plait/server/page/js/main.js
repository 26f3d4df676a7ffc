/** The page: what is where, and who tells whom. */

import { askJson, health, keepKey, knownKey } from "./api.js";
import { drawBraid } from "./braid.js";
import { Chat } from "./chat.js";
import { Conversations } from "./conversations.js";
import { Attachments } from "./attachments.js";
import { byId, make, placeIcons } from "./dom.js";
import { Engine } from "./engine.js";
import { takeLatest } from "./notices.js";
import { McpTools } from "./mcp.js";
import { Models } from "./models.js";
import { Panels } from "./panels.js";
import { Settings } from "./settings.js";
import { whole } from "./plot.js";
import * as store from "./store.js";

const SOON_MS = 400,
  LATER_MS = 5000;
const WORDS = {
  chat: {
    label: "Message",
    hint: "",
    title: "What shall we talk about?",
    text: "Every word is computed on this server.",
    ideas: [
      "Why is the sky blue? Answer in two sentences.",
      "Write a haiku about a river.",
      "Explain recursion to a child.",
    ],
  },
  text: {
    label: "Text to continue",
    hint: "Ctrl + Enter",
    title: "Begin, and the model goes on.",
    text: "It continues whatever stands on the page.",
    ideas: ["Once upon a time", "And it came to pass", "The sea is"],
  },
};

const STATES = {
  loading: "The model is loading",
  stopping: "The server is stopping",
  unhealthy: "The engine is not well",
  away: "The server does not answer",
};

class Page {
  constructor() {
    placeIcons(document);
    for (const svg of document.querySelectorAll(".braid")) drawBraid(svg);
    this.hasChat = true;
    this.state = "away";
    this.settings = new Settings(byId("settings"), () => this.meet(), () => this.keepOwn());
    this.models = new Models((name) => this.choose(name));
    this.engine = new Engine(byId("engine"), (sample) => this.sampled(sample));
    this.panels = new Panels((open) => this.engine.watch(open === "engine" && this.state === "ok"));
    this.tools = new McpTools({
      conversation: () => this.chat.conversation,
      settings: () => this.settings.values,
      keep: () => this.keepOwn(),
      draw: () => this.chat.isBusy || this.chat.render(),
    });
    this.chat = new Chat(byId("scroll"), byId("transcript"), {
      tools: this.tools,
      settings: () => ({ ...this.settings.values, model: this.models.sent(this.chat.conversation.model) }),
      changed: () => this.changed(),
      busy: (isBusy) => this.showBusy(isBusy),
      refused: (error) => this.refused(error),
      rate: (rate) => this.showRate(rate),
    });
    this.conversations = new Conversations({
      current: () => this.chat.conversation,
      open: (conversation) => this.open(conversation),
      start: (mode) => this.start(mode),
    });
    this.attachments = new Attachments(byId("composer"), () => this.fit());
    this.listen();
    this.chat.open(store.load(store.look().conversation) ?? this.chat.conversation);
    this.check();
  }

  listen() {
    const draft = byId("draft");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    draft.addEventListener("keydown", (event) => this.typed(event));
    draft.addEventListener("input", () => this.fit());
    byId("stop").addEventListener("click", () => this.chat.stop());
    byId("new").addEventListener("click", () => this.start(this.chat.conversation.mode));
    byId("mode").addEventListener("change", (event) => this.start(event.target.value));
    byId("latest").addEventListener("click", () => this.chat.follow(true));
    byId("scroll").addEventListener(
      "scroll",
      () => {
        byId("latest").hidden = this.chat.isEmpty || this.chat.isNear();
      },
      { passive: true },
    );
    byId("keys-open").addEventListener("click", () => byId("keys").showModal());
    byId("keys-close").addEventListener("click", () => byId("keys").close());
    byId("key-save").addEventListener("click", () => this.giveKey());
    byId("key").addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        this.giveKey();
      }
    });
    document.addEventListener("keydown", (event) => {
      const isOver = event.target.closest?.("dialog"); // which closes by itself
      if (event.key === "Escape" && !event.defaultPrevented && !isOver && !this.panels.escape())
        this.chat.stop();
      if (isUndo(event) && takeLatest()) event.preventDefault();
      if ((event.ctrlKey || event.metaKey) && this.act(event)) event.preventDefault();
    });
    addEventListener("pagehide", () => {
      if (this.chat.isBusy) this.chat.keep();
    });
  }

  /** What keys do anywhere on the page, with Ctrl or Command; see the dialog. */
  act({ key, altKey }) {
    if (key === "/") byId("keys").showModal();
    else if (key === "." && !altKey) this.panels.show(this.panels.open ? null : "settings", true);
    else if (key === "k" && !altKey) {
      this.panels.showSidebar(true);
      byId("search").focus();
    } else if (key.toLowerCase() === "n" && altKey) this.start(this.chat.conversation.mode);
    else return false;
    return true;
  }

  /** Enter sends where there is a keyboard to break lines with Shift; text that is continued has lines of its own. */
  typed(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    const isPlain =
      !event.shiftKey &&
      !event.altKey &&
      this.chat.conversation.mode === "chat" &&
      matchMedia("(pointer: fine)").matches;
    if (!isPlain && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.send();
  }

  send() {
    if (this.state !== "ok" || this.chat.isBusy) return;
    const draft = byId("draft"),
      text = this.chat.conversation.mode === "chat" ? draft.value.trim() : draft.value;
    draft.value = "";
    this.chat.send(this.attachments.take(text));
  }

  start(mode) {
    const { model } = this.chat.conversation;
    this.chat.open({ ...store.newConversation(this.hasChat ? mode : "text"), ...(model ? { model } : {}) });
    this.panels.closeSidebarIfOver();
    byId("draft").focus();
  }

  /** Ask how the server is: often until it is there, then now and then. */
  async check() {
    const found = await health();
    const before = this.state;
    this.state = found.status;
    if (found.status === "ok" && before !== "ok") await this.meet();
    if (found.status !== before || found.status !== "ok") this.showState(found);
    if (this.models.areSeveral && before === "ok") await this.meet();
    const isSoon = found.status !== "ok" || this.chat.isBusy || this.models.isLoading(this.chat.conversation.model);
    setTimeout(() => this.check(), isSoon ? SOON_MS : LATER_MS);
  }

  /** Go on with another model of the server; it is loaded when it is asked. */
  async choose(name) {
    const { conversation } = this.chat;
    conversation.model = name;
    if (!this.chat.isEmpty) this.chat.keep();
    await this.meet();
    byId("draft").focus();
  }

  /** Learn the model's name, its context, and whether it has a chat template. */
  async meet() {
    if (this.state !== "ok") return;
    try {
      const chosen = this.chat.conversation.model;
      this.models.show((await askJson("v1/models")).data, chosen);
      const model = this.models.card(chosen);
      if (model.status.value === "loaded") this.hasChat = await canChat(this.models.sent(chosen));
      this.context = model.max_model_len;
      document.title = `${model.id} · Plait`;
      byId("version").textContent = (await askJson("version")).version;
      await this.tools.load();
      byId("key-row").hidden = true;
    } catch (error) {
      this.refused(error);
    }
    if (!this.hasChat && this.chat.isEmpty) this.chat.open(store.newConversation("text"));
    this.changed();
  }

  refused(error) {
    if (error.status !== 401) return;
    byId("key-row").hidden = false;
    byId("key-said").textContent = knownKey() ? error.message : "";
    byId("key").focus();
    this.chat.follow(true);
  }

  giveKey() {
    keepKey(byId("key").value.trim());
    byId("key").value = "";
    this.settings.render();
    this.meet();
  }

  showState({ status, progress = {} }) {
    const isOk = status === "ok",
      bar = byId("loading-bar");
    byId("dot").className = `dot is-${status}`;
    byId("dot").title = status;
    byId("loading-title").textContent = STATES[status] ?? status;
    byId("loading-text").textContent =
      progress.text ?? (status === "away" ? "This page goes on by itself when it is back." : "");
    bar.hidden = status !== "loading";
    if (progress.total) {
      bar.max = progress.total;
      bar.value = progress.done;
    } else bar.removeAttribute("value");
    this.engine.watch(isOk && this.panels.open === "engine");
    this.changed();
  }

  /** Everything that depends on the conversation and the server's state. */
  changed() {
    const { conversation, isEmpty } = this.chat,
      words = WORDS[conversation.mode],
      isOk = this.state === "ok";
    byId("loading").hidden = isOk || !isEmpty;
    byId("welcome").hidden = !isOk || !isEmpty;
    byId("welcome-title").textContent = words.title;
    byId("welcome-text").textContent = words.text;
    byId("suggestions").replaceChildren(
      ...words.ideas.map((idea) =>
        make("button", { type: "button", onclick: () => this.chat.send(idea) }, idea),
      ),
    );
    byId("draft-label").textContent = words.label;
    byId("draft").placeholder =
      conversation.mode === "chat"
        ? "Message"
        : isEmpty
          ? "Text to continue"
          : "More text, or nothing: just go on";
    byId("hint").textContent = isOk ? words.hint : (STATES[this.state] ?? this.state);
    byId("hint").classList.toggle("typing", isOk);
    this.settings.show(conversation);
    this.tools.show();
    this.showContext();
    byId("send").disabled = !isOk;
    for (const radio of byId("mode").querySelectorAll("input")) {
      radio.checked = radio.value === conversation.mode;
      radio.disabled = radio.value === "chat" && !this.hasChat;
      radio.parentElement.title = radio.disabled ? "This model has no chat template" : "";
    }
    if (!isEmpty) store.saveLook({ conversation: conversation.id });
    this.conversations.show();
  }

  /** Keep a conversation's own settings; one without messages is not kept yet, and takes them along. */
  keepOwn() {
    if (!this.chat.isEmpty) this.chat.keep();
  }

  /** How much of the context the conversation has filled, as its last reply counted. */
  showContext() {
    const last = this.chat.conversation.messages.findLast((message) => message.stats?.prompt);
    const used = last ? `${whole(last.stats.prompt + last.stats.tokens)} of ` : "";
    byId("model-facts").textContent = this.context ? `${used}${whole(this.context)} tokens` : "";
  }

  open(conversation) {
    this.chat.open(conversation);
    if (this.models.areSeveral) this.meet();
    this.panels.closeSidebarIfOver();
  }

  showBusy(isBusy) {
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    if (!isBusy) this.showRate(null);
  }

  showRate(rate) {
    byId("rate").textContent = rate ? `${whole(rate)} tok/s` : "";
  }

  sampled({ running, rate }) {
    if (!this.chat.isBusy) this.showRate(running ? rate : null);
  }

  fit() {
    const draft = byId("draft");
    draft.style.height = "auto";
    draft.style.height = `${Math.min(draft.scrollHeight, innerHeight * 0.4)}px`;
  }
}

/** Ctrl+Z or Command+Z, where it does not belong to a field that is being written in. */
function isUndo({ key, ctrlKey, metaKey, shiftKey, target }) {
  return key === "z" && (ctrlKey || metaKey) && !shiftKey && !target.matches?.("input, textarea");
}

/** Whether the model has a chat template: only that refusal means no. */
async function canChat(model) {
  try {
    await askJson("tokenize", { body: { model, messages: [{ role: "user", content: "Hello" }] } });
    return true;
  } catch (error) {
    if (error.status === 401) throw error;
    return error.code !== "bad_template";
  }
}

new Page();
