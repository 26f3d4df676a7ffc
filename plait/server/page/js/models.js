/** Which model replies, where the server has several: a list with the state of each. */

import { byId, make } from "./dom.js";

const STATES = { loading: "loading", failed: "could not be loaded", unloaded: "not loaded yet" };

export class Models {
  /** `choose(name)` is called when another model was chosen. */
  constructor(choose) {
    this.select = byId("models");
    this.cards = [];
    this.select.addEventListener("change", () => choose(this.select.value));
  }

  get areSeveral() {
    return this.cards.length > 1;
  }

  /** The names of all, where there are several. */
  get names() {
    return this.areSeveral ? this.cards.map((one) => one.id) : [];
  }

  /** The model of this name; one that is gone, or none, is the first. */
  card(name) {
    return this.cards.find((one) => one.id === name) ?? this.cards[0];
  }

  /** What a request names: nothing where there is one model. */
  sent(name) {
    return this.areSeveral ? this.card(name).id : undefined;
  }

  isLoading(name) {
    return this.areSeveral && this.card(name).status.value === "loading";
  }

  /** Show the models of the server, and which one this conversation has. */
  show(cards, name) {
    this.cards = cards;
    this.select.hidden = !this.areSeveral;
    byId("model").hidden = this.areSeveral;
    if (cards.length === 0) return;
    byId("model").textContent = this.card(name).id;
    const labels = cards.map(labelled);
    const isSame = labels.join("\n") === [...this.select.options].map((one) => one.textContent).join("\n");
    if (!isSame)
      this.select.replaceChildren(...cards.map(({ id }, i) => make("option", { value: id }, labels[i])));
    this.select.value = this.card(name).id;
  }
}

function labelled({ id, status }) {
  const { value, progress } = status;
  if (value === "loaded") return id;
  const share = progress?.total ? ` ${Math.round((100 * progress.done) / progress.total)} %` : "";
  return `${id} · ${STATES[value] ?? value}${share}`;
}
