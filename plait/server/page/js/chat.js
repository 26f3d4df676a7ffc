/** The open conversation: what is sent, how replies arrive, and what can be done with each message. */

import { events, askJson } from "./api.js";
import { make, say } from "./dom.js";
import { MessageView } from "./message.js";
import { notify } from "./notices.js";
import { chatBody, sampling, textBody } from "./request.js";
import { Reply, emptyReply } from "./reply.js";
import * as store from "./store.js";
import { replaces, turned } from "./versions.js";

const NEAR_PX = 80,
  TITLE_CHARS = 60;

export class Chat {
  /** `hooks`: tools: McpTools, settings() -> values, changed() after every change, busy(bool), refused(ApiError), rate(tok/s). */
  constructor(scroll, transcript, hooks) {
    this.scroll = scroll;
    this.transcript = transcript;
    this.hooks = hooks;
    this.running = null;
    this.conversation = store.newConversation("chat");
    store.onOther((found) => this.meetOther(found));
  }

  get isBusy() {
    return this.running !== null;
  }
  get isEmpty() {
    return this.conversation.messages.length === 0;
  }

  /** Show a conversation; one that was being written to is stopped first. */
  open(conversation) {
    if (this.isBusy) {
      this.stop();
      this.running = null;
      this.hooks.busy(false);
    }
    this.conversation = conversation;
    this.hooks.tools.name();
    this.render();
    this.follow(true);
    this.hooks.changed();
    this.hooks.tools.arrive();
  }

  /**
   * Another tab went on with the open conversation: show what it made. Where this tab writes, too, both stay,
   * because whoever kept theirs last would have undone the other's.
   */
  meetOther(found) {
    const { conversation } = this;
    if (found.id !== conversation.id || conversation.isGone) return;
    if (!this.isBusy && !this.transcript.querySelector("textarea")) {
      const isNear = this.isNear();
      this.conversation = found;
      this.hooks.tools.name();
      this.render();
      if (isNear) this.follow(true);
      this.hooks.changed();
    } else if (isEarlier(found.messages, conversation.messages)) {
      Object.assign(conversation, { title: found.title, folder: found.folder });
    } else {
      conversation.id = store.newId();
      this.keep();
      notify("Another tab went on with this conversation; this tab keeps its own as another one", { ms: 0 });
    }
  }

  render() {
    const { messages, mode } = this.conversation;
    this.transcript.className = `transcript ${mode}`;
    this.views = new Map(messages.map((message) => [message, this.view(message)]));
    this.transcript.replaceChildren(...[...this.views.values()].map((view) => view.node));
  }

  /** Send what was written; in a completion, nothing written means: go on. */
  async send(text) {
    if (this.isBusy) return;
    const { messages, mode } = this.conversation;
    if (text === "" && (mode === "chat" || messages.length === 0)) return;
    if (text !== "") this.push({ role: "user", content: text });
    this.hooks.tools.rounds = 0;
    await this.reply();
  }

  stop() {
    this.running?.abort();
  }

  /** Take a question and a reply that were made elsewhere; `other`: another reply to it, which becomes a version. */
  adopt(text, message, other) {
    if (text !== "") this.push({ role: "user", content: text });
    this.push(other === null ? message : replaces(message, other, []));
    this.views.get(message).update(false);
    this.follow(true);
    this.keep();
  }

  /** Write the last reply again, if there is one. */
  async againLast() {
    const last = this.conversation.messages.at(-1);
    if (last?.role === "assistant") await this.again(last);
  }

  /** Write the reply again: it and everything after it becomes an earlier version. */
  async again(message) {
    if (this.isBusy) return;
    const after = this.cut(message);
    const isWorthKeeping = message.content || message.tool_calls?.length || message.versions?.length;
    await this.reply(isWorthKeeping ? replaces(emptyReply(), message, after) : emptyReply());
  }

  /** Show another version of a message, with what came after it. */
  turn(message, step) {
    if (this.isBusy) return;
    const { messages } = this.conversation,
      at = messages.indexOf(message);
    const shown = turned(message, messages.slice(at + 1), step);
    if (shown === null) return;
    messages.splice(at, messages.length - at, ...shown);
    this.render();
    this.views.get(shown[0]).focusVersions(step);
    this.keep();
  }

  async edit(message, text) {
    if (this.isBusy) return;
    const { conversation } = this;
    if (conversation.mode === "text") {
      conversation.messages = text ? [{ role: "user", content: text }] : [];
      this.render();
      this.keep();
      return;
    }
    const after = this.cut(message);
    this.push(replaces({ role: "user", content: text }, message, after));
    await this.reply();
  }

  /** Settle the tool calls as the user has decided, in their order, and have the model go on. */
  async answer(message, decisions) {
    if (this.isBusy) return;
    const results = await this.settle(message, decisions);
    if (results === null) return;
    message.answered = true;
    this.views.get(message).update(false);
    message.tool_calls.forEach((call, i) =>
      this.push({ role: "tool", tool_call_id: call.id, content: results[i] }),
    );
    await this.reply();
  }

  /** What the calls came to; null: the user has stopped them, or opened another conversation. */
  async settle(message, decisions) {
    const abort = (this.running = new AbortController()),
      results = [];
    this.hooks.busy(true);
    try {
      for (const [i, call] of message.tool_calls.entries())
        results.push(await this.hooks.tools.settle(call, decisions[i], abort.signal));
    } catch (error) {
      if (!abort.signal.aborted) throw error;
    }
    if (this.running !== abort) return null;
    this.running = null;
    this.hooks.busy(false);
    if (!abort.signal.aborted) return results;
    this.views.get(message)?.update(false);
    return null;
  }

  /** Go on from another token than the one taken: what stood before it stays, and the model continues. */
  async fork(message, at, text) {
    if (this.isBusy) return;
    const kept = message.tokens.slice(0, at);
    const forked = { ...emptyReply(), content: kept.map((one) => one.text).join("") + text };
    const taken = message.tokens[at].top.find((one) => one.text === text);
    forked.tokens = [...kept, { ...message.tokens[at], text, p: taken.p }];
    this.cut(message);
    await this.run(forked, async (settings, before) => {
      if (this.conversation.mode === "text")
        return ["v1/completions", textBody([...before, forked], settings)];
      return ["v1/completions", await continued(before, forked.content, settings)];
    });
  }

  async reply(message = emptyReply()) {
    const isText = this.conversation.mode === "text";
    await this.run(message, async (settings, before) =>
      isText
        ? ["v1/completions", textBody(before, settings)]
        : ["v1/chat/completions", await this.withTools(chatBody(before, settings))],
    );
    const calls = message.tool_calls ?? [],
      { tools } = this.hooks;
    const isOpen = this.views.has(message) && !message.error && message.stats.finish === "tool_calls";
    if (isOpen && tools.goesOn(calls)) await this.answer(message, calls.map(() => "once"));
  }

  /** The body with the tools of MCP servers that the conversation uses. */
  async withTools(body) {
    const { tools } = this.hooks;
    await tools.ready();
    const all = [...(body.tools ?? []), ...tools.functions()];
    return all.length ? { ...body, tools: all } : body;
  }

  /** Fill `message` from a stream. `plan(settings, messages before it)` -> [path, body]. */
  async run(message, plan) {
    const before = [...this.conversation.messages],
      conversation = this.conversation;
    const abort = (this.running = new AbortController()),
      reply = new Reply(message, performance.now());
    this.push(message);
    this.hooks.busy(true);
    say("The model is replying");
    try {
      const settings = this.hooks.settings();
      if (settings.model) message.model = settings.model;
      const [path, body] = await plan(settings, before);
      reply.begun = performance.now();
      for await (const event of events(path, body, abort.signal)) {
        reply.add(event, performance.now());
        this.refresh(message, reply);
      }
      reply.close();
    } catch (error) {
      reply.close(abort.signal.aborted);
      if (!abort.signal.aborted) this.failed(message, error);
    }
    if (this.running === abort) {
      // else another conversation was opened, and this one ended unseen
      this.running = null;
      this.hooks.busy(false);
    }
    this.views.get(message)?.update(false);
    this.follow();
    this.keep(conversation);
    say(message.error ?? `Reply: ${message.content.slice(0, 1000)}`);
  }

  failed(message, error) {
    message.error = error.message;
    this.hooks.refused(error);
  }

  /** At most one drawing per frame, however fast tokens come. */
  refresh(message, reply) {
    if (this.frame) return;
    const { running } = this;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (this.running !== running) return; // it has ended, and perhaps the next one runs already
      const isNear = this.isNear();
      this.views.get(message)?.update(true);
      this.hooks.rate(reply.rate());
      if (isNear) this.follow(true);
    });
  }

  push(message) {
    const { conversation } = this;
    conversation.messages.push(message);
    if (!conversation.title && message.role === "user") conversation.title = titled(message.content);
    const view = this.view(message);
    this.views ??= new Map();
    this.views.set(message, view);
    this.transcript.append(view.node);
    if (message.role === "assistant") view.update(true);
    this.follow(true);
    this.keep();
  }

  /** Take a message and all after it away; returns those after it. */
  cut(message) {
    const { messages } = this.conversation,
      cut = messages.splice(messages.indexOf(message));
    for (const gone of cut) {
      this.views.get(gone)?.node.remove();
      this.views.delete(gone);
    }
    const last = messages.at(-1);
    if (last?.answered && last.role === "assistant") last.answered = false;
    return cut.slice(1);
  }

  /** Whether a reply can be written on as plain text: not if the template or a parser had a part in it. */
  canFork(message) {
    const { tools, thinking } = this.hooks.settings();
    const isPlain = !message.reasoning && !message.tool_calls?.length;
    const hasTools = tools?.trim() || this.hooks.tools.used.length > 0;
    return this.conversation.mode === "text" || (isPlain && !hasTools && !thinking);
  }

  view(message) {
    return new MessageView(message, this.conversation.mode, {
      again: (one) => this.again(one),
      edit: (one, text) => this.edit(one, text),
      answer: (one, decisions) => this.answer(one, decisions),
      tools: this.hooks.tools,
      turn: (one, step) => this.turn(one, step),
      fork: (one, at, text) => this.fork(one, at, text),
      canFork: (one) => !this.isBusy && this.canFork(one),
      whole: () => this.conversation.messages.map((one) => one.content).join(""),
    });
  }

  /** Keep the conversation in the browser; a browser without room says so, and the talk goes on. */
  keep(conversation = this.conversation) {
    if (conversation.isGone) return;
    conversation.updated = Date.now();
    try {
      store.save(conversation);
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
      this.transcript.append(
        make(
          "p",
          { class: "notice", role: "alert" },
          "This browser has no room for more conversations; delete some to keep this one.",
        ),
      );
    }
    this.hooks.changed();
  }

  isNear() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }

  follow(always = false) {
    if (always || this.isNear()) this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

/** The body that continues a reply from `begun`: the conversation's tokens and those of the beginning, as a prompt. */
async function continued(before, begun, settings) {
  const { messages } = chatBody(before, settings);
  const { model } = settings;
  const prompt = await askJson("tokenize", { body: { model, messages } });
  const more = await askJson("tokenize", {
    body: { model, prompt: begun, add_special_tokens: false, parse_special: false },
  });
  const room = prompt.max_model_len - prompt.tokens.length - more.tokens.length;
  const body = { ...textBody([], settings), prompt: [...prompt.tokens, ...more.tokens] };
  return { ...body, max_tokens: sampling(settings).max_tokens ?? Math.max(room, 1) };
}

/** Whether another tab has what this one kept a while ago: all messages, and the beginning of the last. */
function isEarlier(theirs, ours) {
  const isLast = (i) => i === theirs.length - 1;
  return theirs.every(({ role, content }, i) => {
    if (ours[i]?.role !== role) return false;
    return isLast(i) ? ours[i].content.startsWith(content) : ours[i].content === content;
  });
}

function titled(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}
