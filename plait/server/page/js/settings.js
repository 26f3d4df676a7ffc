/** The settings: a form whose every change is kept at once. An empty field leaves the choice to the model. */

import { knownKey, keepKey } from "./api.js";
import { make } from "./dom.js";
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

/** Draws the form into `form`. `onKey()` is called when the key changed. */
export class Settings {
  constructor(form, onKey) {
    this.form = form;
    this.values = store.settings();
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => this.changed(event.target));
    this.onKey = onKey;
    showScheme(store.look().scheme);
    this.render();
  }

  render() {
    const reset = make(
      "button",
      { type: "button", onclick: () => this.reset() },
      "Reset to the model's defaults",
    );
    this.form.replaceChildren(
      group("System prompt", [
        this.area("system", "System prompt", 3, "How the model should behave (chat only)", true),
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
    if (field.name === "scheme") {
      store.saveLook({ scheme: field.value });
      showScheme(field.value);
      return;
    }
    const value = field.type === "checkbox" ? field.checked : field.value;
    if (value === "" || value === false) delete this.values[field.name];
    else this.values[field.name] = value;
    field.setAttribute("aria-invalid", String(!field.checkValidity()));
    store.saveSettings(this.values);
  }

  reset() {
    this.values = {};
    store.saveSettings(this.values);
    this.render();
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
