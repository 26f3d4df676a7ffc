/** The settings: a form whose every change is kept at once. An empty field leaves the choice to the model. */

import { knownKey, keepKey } from "./api.js";
import { make } from "./dom.js";
import { notify } from "./notices.js";
import * as store from "./store.js";

const NUMBERS = [
  ["temperature", "Temperature", "0 is greedy", 0, 2, 0.05],
  ["top_p", "Top p", "share of probability kept", 0, 1, 0.01],
  ["top_k", "Top k", "tokens kept, 0: no limit", 0, 1000, 1],
  ["min_p", "Min p", "share of the best kept", 0, 1, 0.01],
  ["max_tokens", "Max tokens", "of a reply", 1, null, 1],
  ["seed", "Seed", "same seed, same text", 0, null, 1],
  ["repetition_penalty", "Repetition", "penalty, 1: none", 0, 2, 0.05],
  ["presence_penalty", "Presence", "penalty, 0: none", -2, 2, 0.1],
  ["frequency_penalty", "Frequency", "penalty, 0: none", -2, 2, 0.1],
];

// What templates of models that reason ask for; others do not look at it.
const THINKING = [
  ["", "As the model likes"],
  ["on", "Think first"],
  ["off", "Reply at once"],
];

const SCHEMES = [
  ["", "As the system"],
  ["light", "Light"],
  ["dark", "Dark"],
];

/**
 * Draws the form into `form`. `onKey()` is called when the key changed, `onOwn()` when settings of the open
 * conversation did: it may have its own in place of those of all.
 */
export class Settings {
  constructor(form, onKey, onOwn) {
    this.form = form;
    this.shared = store.settings();
    this.conversation = {};
    this.onOwn = onOwn;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => this.changed(event.target));
    this.onKey = onKey;
    showScheme(store.look().scheme);
    this.render();
  }

  get values() {
    return this.conversation.settings ?? this.shared;
  }

  /** Show the settings of this conversation. */
  show(conversation) {
    if (conversation === this.conversation) return;
    const before = this.values;
    this.conversation = conversation;
    if (this.values !== before) this.render();
  }

  save() {
    if (this.conversation.settings) this.onOwn();
    else store.saveSettings(this.shared);
  }

  /** Take the settings of all for this conversation, to change them there alone; or go back to those of all. */
  own(isOwn) {
    if (isOwn) this.conversation.settings = { ...this.shared };
    else delete this.conversation.settings;
    this.onOwn();
    this.render();
    this.form.elements.own.focus();
  }

  /** Have these settings for this conversation alone. */
  takeOwn(values) {
    this.conversation.settings = values;
    this.onOwn();
    this.render();
  }

  render() {
    const own = this.check("own", "For this conversation alone", "Others keep the settings of all.");
    own.querySelector("input").checked = Boolean(this.conversation.settings);
    const reset = make(
      "button",
      { type: "button", onclick: () => this.reset() },
      "Reset to the model's defaults",
    );
    this.form.replaceChildren(
      own,
      group("System prompt", [
        this.area("system", "System prompt", 3, "How the model should behave (chat only)", true),
        this.prompts(),
      ]),
      group("Sampling", [
        make("div", { class: "numbers" }, ...NUMBERS.map((row) => this.number(...row))),
        this.area("stop", "Stop strings, one per line", 2, ""),
      ]),
      group("Reasoning", [this.choice("thinking", "Whether the model thinks before it replies", THINKING)]),
      group("Probabilities", [
        this.check(
          "probabilities",
          "Show each token's alternatives",
          "Click a token to see what else it could have been. Costs a little speed.",
        ),
        make(
          "div",
          { class: "numbers" },
          this.number("top_logprobs", "Alternatives", "per token", 1, 20, 1, "5"),
        ),
      ]),
      group("Tools", [
        this.area("tools", "Tools, as a JSON list", 3, '[{"type": "function", "function": {"name": …}}]'),
      ]),
      group("Colours", [this.choice("scheme", "Light or dark", SCHEMES, store.look().scheme)]),
      group("API key", [this.key()]),
      reset,
    );
  }

  changed(field) {
    if (field.name === "key") {
      keepKey(field.value.trim());
      this.onKey();
      return;
    }
    if (field.name === "own") {
      this.own(field.checked);
      return;
    }
    if (field.name === "prompt") {
      this.usePrompt(field.value);
      return;
    }
    if (field.name === "scheme") {
      store.saveLook({ scheme: field.value });
      showScheme(field.value);
      return;
    }
    const value = field.type === "checkbox" ? field.checked : field.value;
    if (value === "" || value === false) delete this.values[field.name];
    else this.values[field.name] = value;
    field.setAttribute("aria-invalid", String(!field.checkValidity()));
    this.save();
  }

  reset() {
    if (this.conversation.settings) this.conversation.settings = {};
    else this.shared = {};
    this.save();
    this.render();
  }

  /** Prompts that are kept by name: take one, keep this one, forget one. */
  prompts() {
    const all = store.prompts(),
      names = Object.keys(all).sort(),
      used = names.find((name) => all[name] === this.values.system) ?? "";
    const options = [["", names.length ? "Kept prompts" : "No prompt is kept yet"], ...names.map((name) => [name, name])];
    const button = (label, onclick, disabled) => make("button", { type: "button", onclick, disabled }, label);
    return make(
      "div",
      { class: "prompts" },
      this.choice("prompt", "Kept prompts", options, used),
      button("Keep", () => this.keepPrompt(), false),
      button("Forget", () => this.forgetPrompt(used), used === ""),
    );
  }

  usePrompt(name) {
    const text = store.prompts()[name];
    if (text === undefined) return;
    this.values.system = text;
    this.save();
    this.render();
    this.form.elements.prompt.focus();
  }

  /** Its first line is its name. */
  keepPrompt() {
    const text = (this.values.system ?? "").trim(),
      name = text.split("\n")[0].slice(0, 60);
    if (!name) {
      notify("There is no system prompt to keep");
      return;
    }
    this.values.system = text;
    store.savePrompts({ ...store.prompts(), [name]: text });
    this.save();
    this.render();
    this.form.elements.prompt.focus();
  }

  forgetPrompt(name) {
    const { [name]: text, ...rest } = store.prompts();
    store.savePrompts(rest);
    this.render();
    this.form.elements.prompt.focus();
    const run = () => {
      store.savePrompts({ ...store.prompts(), [name]: text });
      this.render();
    };
    notify(`Forgot “${name}”`, { action: { label: "Undo", name: `Undo forgetting ${name}`, run } });
  }

  number(name, label, hint, min, max, step, placeholder = "default") {
    // Whole numbers need another keyboard than fractions; `any` lets a value stand between two steps.
    const mode = step === 1 ? "numeric" : "decimal";
    const settings = {
      type: "number",
      name,
      min,
      max,
      step: step === 1 ? 1 : "any",
      placeholder,
      inputmode: mode,
    };
    const input = make("input", settings);
    input.value = this.values[name] ?? "";
    return make(
      "label",
      { class: "field", title: hint },
      make("span", {}, label),
      input,
      make("small", { class: "quiet" }, hint),
    );
  }

  choice(name, label, options, value = this.values[name]) {
    const nodes = options.map(([value, text]) => make("option", { value }, text));
    const select = make("select", { name }, ...nodes);
    select.value = value ?? "";
    return make("label", { class: "field" }, make("span", { class: "unseen" }, label), select);
  }

  area(name, label, rows, placeholder, isTitled = false) {
    const area = make("textarea", {
      name,
      rows,
      placeholder,
      spellcheck: name === "system" ? "true" : "false",
    });
    area.value = this.values[name] ?? "";
    return make("label", { class: "field" }, make("span", { class: isTitled ? "unseen" : "" }, label), area);
  }

  check(name, label, hint) {
    const box = make("input", { type: "checkbox", name });
    box.checked = Boolean(this.values[name]);
    return make(
      "label",
      { class: "check" },
      box,
      make("span", {}, label, make("small", { class: "quiet" }, hint)),
    );
  }

  key() {
    const input = make("input", {
      type: "password",
      name: "key",
      autocomplete: "off",
      placeholder: "only if the server asks for one",
    });
    input.value = knownKey();
    return make(
      "label",
      { class: "field" },
      make("span", { class: "unseen" }, "API key"),
      input,
      make("small", { class: "quiet" }, "Kept until this tab closes."),
    );
  }
}

/** Light or dark for this page alone; empty: as the system has it. */
function showScheme(scheme) {
  if (scheme) document.documentElement.dataset.scheme = scheme;
  else delete document.documentElement.dataset.scheme;
}

const group = (title, nodes) => make("fieldset", {}, make("legend", {}, title), ...nodes);
