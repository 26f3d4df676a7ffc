/**
 * Tools of MCP servers: which of the operator's list this conversation uses, and each call with the user's consent.
 *
 * A conversation keeps `servers` (labels) and `allowed` (`label/tool`: allowed without asking again). Every word of a
 * server is text and nothing else, as all that `make` makes.
 */

import { askJson } from "./api.js";
import { byId, iconButton, make, say } from "./dom.js";
import { ownTools } from "./request.js";

const PLAIN = /^[A-Za-z0-9_-]{1,64}$/,
  REFUSED = "The user refused this call.",
  MOST_ROUNDS = 16; // calls that were allowed for good follow each other so often without a word of the user

export class McpTools {
  /** `hooks`: conversation(), settings(), draw(), keep() after a change of the conversation. */
  constructor(hooks) {
    this.hooks = hooks;
    this.labels = [];
    this.tools = new Map(); // label -> its tools
    this.names = new Map(); // name of a function -> {label, tool}
    this.rounds = 0;
    this.button = iconButton("tool", "Tools of MCP servers", () => this.open(), { id: "mcp-open", hidden: true });
    byId("attach").after(this.button);
    this.dialog = make("dialog", { class: "dialog mcp", "aria-labelledby": "mcp-title" });
    document.body.append(this.dialog);
  }

  /** Learn which servers there are. */
  async load() {
    this.labels = (await askJson("v1/mcp/servers")).data.map((one) => one.label);
    this.button.hidden = this.labels.length === 0;
    this.show();
    this.arrive();
  }

  /** Have the tools of the conversation, and show which of its calls wait for consent. */
  async arrive() {
    const conversation = this.hooks.conversation();
    if (this.used.every((label) => this.tools.has(label))) return;
    try {
      await this.ready();
    } catch {
      return; // the next request says why
    }
    if (this.hooks.conversation() === conversation) this.hooks.draw();
  }

  /** The servers that this conversation uses and that may still be used. */
  get used() {
    return (this.hooks.conversation().servers ?? []).filter((label) => this.labels.includes(label));
  }

  /** Show on the button whether the conversation has tools. */
  show() {
    this.button.setAttribute("aria-pressed", String(this.used.length > 0));
  }

  /** Have the tools of the servers in use. Raises ApiError. */
  async ready() {
    for (const label of this.used) await this.list(label);
    this.name();
  }

  async list(label) {
    if (!this.tools.has(label)) {
      const { data } = await askJson("v1/mcp/tools", { body: { server: label } });
      this.tools.set(label, data);
    }
    return this.tools.get(label);
  }

  /** Give each tool a name that no other has, nor a tool of the settings: else its server's label is before it. */
  name() {
    const taken = ownNames(this.hooks.settings());
    const all = this.used.flatMap((label) => (this.tools.get(label) ?? []).map((tool) => ({ label, tool })));
    const count = (name) => all.filter((one) => one.tool.name === name).length;
    this.names = new Map();
    for (const one of all) {
      const plain = one.tool.name;
      const isFree = PLAIN.test(plain) && count(plain) === 1 && !taken.includes(plain);
      const stem = isFree ? plain : `${one.label}__${plain.replace(/[^A-Za-z0-9_-]+/g, "_")}`.slice(0, 60);
      let name = stem;
      const isTaken = () => this.names.has(name) || taken.includes(name) || (name !== plain && count(name) > 0);
      for (let number = 2; isTaken(); number++) name = `${stem}_${number}`;
      this.names.set(name, one);
    }
  }

  /** The tools as functions of a request. */
  functions() {
    this.name();
    return [...this.names].map(([name, { tool }]) => ({
      type: "function",
      function: { name, description: tool.description, parameters: tool.input_schema },
    }));
  }

  /** Which tool of which server a function is; undefined: it is none of theirs. */
  find(name) {
    return this.names.get(name);
  }

  isAllowed(name) {
    const found = this.find(name);
    return found !== undefined && (this.hooks.conversation().allowed ?? []).includes(path(found));
  }

  /** Whether the calls of a reply may go on without asking: all are allowed for good, and not too many in a row. */
  goesOn(calls) {
    return calls.length > 0 && calls.every((call) => this.isAllowed(call.name)) && ++this.rounds <= MOST_ROUNDS;
  }

  /** What a call came to. `decision`: "once", "always", "no", or what the user has written in place of the tool. */
  async settle(call, decision, signal) {
    if (typeof decision === "object") return decision.text;
    const found = this.find(call.name);
    if (decision === "no" || !found) return REFUSED;
    if (decision === "always") this.allow(path(found));
    try {
      const body = { server: found.label, name: found.tool.name, arguments: JSON.parse(call.arguments || "{}") };
      const { text, is_error: failed } = await askJson("v1/mcp/call", { body, signal });
      return failed ? `The call failed: ${text}` : text;
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return `The call failed: ${error.message}`;
    }
  }

  allow(tool) {
    const conversation = this.hooks.conversation();
    conversation.allowed = [...new Set([...(conversation.allowed ?? []), tool])];
    this.hooks.keep();
  }

  open() {
    const close = make("button", { type: "button", class: "primary", onclick: () => this.dialog.close() }, "Close");
    this.dialog.replaceChildren(
      make("h2", { id: "mcp-title" }, "Tools"),
      make(
        "p",
        { class: "quiet small" },
        "The model may call tools of these servers in this conversation. Each call is shown first, and made when you allow it.",
      ),
      ...this.labels.map((label) => this.row(label)),
      ...this.allowances(),
      make("div", { class: "dialog-row" }, close),
    );
    this.dialog.showModal();
  }

  row(label) {
    const box = make("input", { type: "checkbox", onchange: () => this.use(label, box, list) });
    box.checked = this.used.includes(label);
    const list = make("ul", { class: "mcp-tools small" });
    if (box.checked) this.fill(label, list);
    return make("div", {}, make("label", { class: "check" }, box, make("span", {}, label)), list);
  }

  async use(label, box, list) {
    const conversation = this.hooks.conversation(),
      others = (conversation.servers ?? []).filter((one) => one !== label);
    conversation.servers = box.checked ? [...others, label] : others;
    if (!box.checked) list.replaceChildren();
    else await this.fill(label, list);
    this.show();
    this.hooks.keep();
  }

  async fill(label, list) {
    try {
      const tools = await this.list(label);
      list.replaceChildren(
        ...tools.map((tool) => make("li", {}, make("code", {}, tool.name), ` ${tool.description}`)),
      );
      say(`${label} has ${tools.length} tools`);
    } catch (error) {
      list.replaceChildren(make("li", { role: "alert" }, error.message));
    }
  }

  /** What was allowed for good, and the way back. */
  allowances() {
    const allowed = this.hooks.conversation().allowed ?? [];
    if (allowed.length === 0) return [];
    const forget = () => {
      this.hooks.conversation().allowed = [];
      this.hooks.keep();
      this.dialog.close();
      this.open();
    };
    const names = make("p", { class: "small" }, "Called without asking: ", make("code", {}, allowed.join(", ")));
    return [names, make("button", { type: "button", onclick: forget }, "Ask again for each")];
  }
}

function ownNames(settings) {
  try {
    return ownTools(settings).map((tool) => tool.function?.name);
  } catch {
    return []; // no JSON, which the next request says
  }
}

const path = ({ label, tool }) => `${label}/${tool.name}`;

/** The question whether a call may be made; `onDecide` gets "once", "always" or "no". */
export function consent(call, { label, tool }, onDecide) {
  const button = (text, decision, kind = "") =>
    make("button", { type: "button", class: kind, onclick: () => decide(decision, text) }, text);
  const decide = (decision, text) => {
    node.replaceChildren(make("p", { class: "small quiet" }, `${tool.name}: ${text}`));
    onDecide(decision);
  };
  const node = make(
    "div",
    { class: "consent", role: "group", "aria-label": `Consent to ${tool.name}` },
    make("p", {}, "Call ", make("code", {}, tool.name), " of ", make("code", {}, label), " with these arguments?"),
    make(
      "div",
      { class: "consent-row" },
      button("Allow once", "once", "primary"),
      button("Always in this conversation", "always"),
      button("Refuse", "no"),
    ),
  );
  return node;
}
