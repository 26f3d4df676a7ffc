/** What an operator sees and does, behind the admin key: requests, models, keys, limits, and the last requests by id. */

import { askJson, keepAdminKey, knownAdminKey } from "./api.js";
import { byId, make, say } from "./dom.js";
import { whole } from "./plot.js";

const POLL_MS = 2000,
  ID_CHARS = 16,
  LOG_LINES = 200;

/** Each view: its tab, what it asks for, and what it draws of the answer. */
const VIEWS = {
  requests: { title: "Requests", path: "admin/requests", draw: drawRequests },
  models: { title: "Models", path: "admin/models", draw: drawModels },
  keys: { title: "Keys", path: "admin/keys", draw: drawKeys },
  limits: { title: "Limits", path: "admin/limits", draw: drawLimits },
  log: { title: "Log", path: "admin/log", draw: drawLog },
};
const NAMES = Object.keys(VIEWS);

export class Operator {
  constructor() {
    this.dialog = byId("operator");
    this.view = "requests";
    this.place = byId("operator-view");
    byId("operator-open").addEventListener("click", () => this.open());
    byId("operator-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => clearTimeout(this.timer));
    byId("operator-key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      keepAdminKey(byId("operator-key").value.trim());
      byId("operator-key").value = "";
      this.refresh();
    });
    byId("operator-log-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.refresh();
    });
    this.tabs = NAMES.map((name) => this.tab(name));
    byId("operator-tabs").append(...this.tabs);
    this.show("requests");
  }

  tab(name) {
    const onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step === undefined) return;
      const next = NAMES[(NAMES.indexOf(name) + step + NAMES.length) % NAMES.length];
      this.show(next);
      byId(`operator-tab-${next}`).focus();
    };
    const settings = { type: "button", role: "tab", id: `operator-tab-${name}`, "aria-controls": "operator-view" };
    return make("button", { ...settings, onclick: () => this.show(name), onkeydown }, VIEWS[name].title);
  }

  open() {
    this.dialog.showModal();
    this.refresh();
    if (!knownAdminKey()) byId("operator-key").focus();
  }

  show(name) {
    this.view = name;
    NAMES.forEach((each, i) => {
      this.tabs[i].setAttribute("aria-selected", String(each === name));
      this.tabs[i].tabIndex = each === name ? 0 : -1;
    });
    this.place.setAttribute("aria-labelledby", `operator-tab-${name}`);
    this.place.replaceChildren();
    byId("operator-log-form").hidden = name !== "log";
    if (this.dialog.open) this.refresh();
  }

  /** Show the view as it is now, and again in a moment for as long as it is open. */
  async refresh() {
    clearTimeout(this.timer);
    byId("operator-key-form").hidden = knownAdminKey() !== "";
    if (!knownAdminKey()) {
      this.place.replaceChildren();
      this.tell("");
      return;
    }
    const { view } = this;
    try {
      const found = await askJson(this.path(view), { key: knownAdminKey() });
      if (view !== this.view || !this.dialog.open) return;
      if (!this.isFailed) this.tell("");
      this.draw(VIEWS[view].draw(found, this));
    } catch (error) {
      this.place.replaceChildren();
      this.refused(error);
    }
    clearTimeout(this.timer);
    if (this.dialog.open && knownAdminKey()) this.timer = setTimeout(() => this.refresh(), POLL_MS);
  }

  path(view) {
    if (view !== "log") return VIEWS[view].path;
    const id = byId("operator-log-id").value.trim();
    return `admin/log?limit=${LOG_LINES}${id ? `&id=${encodeURIComponent(id)}` : ""}`;
  }

  /** The nodes in the place of those that were there; the focus stays where it was. */
  draw(nodes) {
    const { focus } = document.activeElement?.dataset ?? {};
    const { scrollTop } = this.place;
    this.place.replaceChildren(...nodes);
    this.place.scrollTop = scrollTop;
    if (focus) this.place.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
  }

  refused(error) {
    if (error.status === 401) {
      keepAdminKey("");
      byId("operator-key-form").hidden = false;
      byId("operator-key").focus();
    }
    this.tell(error.message);
  }

  tell(text) {
    byId("operator-said").textContent = text;
  }

  /** Load or unload a model; what the server says about it stays until the next try. */
  async manage(what, model) {
    this.isFailed = false;
    try {
      await askJson(`admin/models/${what}`, { body: { model }, key: knownAdminKey() });
      say(what === "load" ? `${model} is being loaded` : `${model} is being unloaded`);
    } catch (error) {
      this.isFailed = error.status !== 401;
      this.refused(error);
    }
    await this.refresh();
  }

  /** Show the log of one request. */
  look(id) {
    byId("operator-log-id").value = id;
    this.show("log");
    byId("operator-log-id").focus();
  }
}

function drawRequests({ data, engines }, operator) {
  const loads = Object.entries(engines).map(([model, { running, waiting }]) => [model, running, waiting]);
  const rows = data.map((one) => [
    one.state,
    idButton(one.id, operator),
    one.key,
    one.model,
    `${one.method} ${one.path}`,
    `${one.seconds.toFixed(1)} s`,
    one.prompt_tokens ? whole(one.prompt_tokens) : "",
    one.prompt_tokens ? whole(one.output_tokens) : "",
  ]);
  return [
    table("In the engines", ["Model", "Running", "Waiting"], loads, "No model is loaded."),
    table(
      "Open requests",
      ["State", "Id", "Key", "Model", "Path", "Since", "Prompt", "Output"],
      rows,
      "No request is open.",
    ),
  ];
}

function drawModels({ data }, operator) {
  const rows = data.map((one) => {
    const { value, progress, error } = one.status,
      isHere = value === "loaded" || value === "loading",
      what = isHere ? "unload" : "load",
      label = isHere ? "Unload" : "Load";
    const share = progress?.total ? ` ${Math.round((100 * progress.done) / progress.total)} %` : "";
    const settings = { type: "button", "aria-label": `${label} ${one.id}`, onclick: () => operator.manage(what, one.id) };
    const button = make("button", settings, label);
    button.dataset.focus = `model ${one.id}`;
    const until = one.expires ? `${Math.max(0, Math.round(one.expires - Date.now() / 1000))} s` : "";
    return [
      one.id,
      `${value}${share}${error ? `: ${error}` : ""}`,
      one.max_model_len ? whole(one.max_model_len) : "",
      one.memory ? bytes(one.memory) : "",
      one.num_open_requests ?? "",
      until,
      button,
    ];
  });
  return [table("Models", ["Name", "State", "Context", "Memory", "Requests", "Until", "Do"], rows, "There is none.")];
}

function drawKeys({ needed, data }) {
  const rows = data.map((one) => [
    one.name || "all clients",
    limited(one.remaining_requests, one.requests_per_minute),
    limited(one.remaining_tokens, one.tokens_per_minute),
    one.max_requests === undefined ? one.num_open_requests : `${one.num_open_requests} of ${one.max_requests}`,
    whole(one.num_requests),
    one.last_used === undefined ? "not since startup" : when(one.last_used),
  ]);
  const heads = ["Key", "Requests left a minute", "Tokens left a minute", "Open", "Requests", "Last used"];
  const note = needed ? "Requests need one of these keys." : "This server has no keys: every client is served.";
  return [make("p", { class: "quiet small" }, note), table("Keys", heads, rows, "There is none.")];
}

function drawLimits(found) {
  const rows = [
    ["Open requests of the server", whole(found.max_open_requests)],
    ["Connections", whole(found.max_connections)],
    ["Body of a request", bytes(found.max_body_bytes)],
    ["Time to finish when the server stops", `${found.shutdown_timeout_s} s`],
    ["Requests a minute, for each key", found.requests_per_minute ?? "no limit"],
    ["Tokens a minute, for each key", found.tokens_per_minute ?? "no limit"],
    ["Open requests, for each key", found.max_requests_per_key ?? "no limit"],
  ];
  const models = Object.entries(found.models).map(([name, one]) => [
    name,
    whole(one.max_model_len),
    whole(one.max_open_requests),
  ]);
  return [
    table("Limits", ["Limit", "Value"], rows, ""),
    table("Loaded models", ["Model", "Tokens of a sequence", "Requests"], models, "No model is loaded."),
  ];
}

function drawLog({ data, capacity }, operator) {
  const rows = data.map((one) => [
    when(one.time),
    idButton(one.id, operator),
    one.status,
    one.key,
    one.model,
    `${one.method} ${one.path}`,
    `${one.ms} ms`,
    one.ttft_ms === undefined ? "" : `${one.ttft_ms} ms`,
    one.prompt_tokens ? whole(one.prompt_tokens) : "",
    one.prompt_tokens ? whole(one.output_tokens) : "",
    one.reason || one.finish.join(", "),
  ]);
  const heads = ["Time", "Id", "Status", "Key", "Model", "Path", "Took", "First token", "Prompt", "Output", "End"];
  const none = `None of the last ${whole(capacity)} requests is it.`;
  return [table("Ended requests, the latest first", heads, rows, none)];
}

/** A request's id, its beginning if it is long: it shows what the log has of it, and the whole id. */
function idButton(id, operator) {
  const short = id.length > ID_CHARS ? `${id.slice(0, ID_CHARS - 1)}…` : id;
  const settings = { type: "button", class: "link", title: id, onclick: () => operator.look(id) };
  const button = make("button", settings, short);
  button.dataset.focus = `id ${id}`;
  return button;
}

function table(title, heads, rows, none) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell instanceof Node ? cell : String(cell)))));
  const shown = rows.length
    ? make("table", { "aria-label": title }, make("thead", {}, head), make("tbody", {}, ...body))
    : make("p", { class: "quiet" }, none);
  return make("section", { class: "operator-part" }, make("h3", {}, title), shown);
}

const limited = (left, limit) => (limit === undefined ? "no limit" : `${whole(left)} of ${whole(limit)}`);
const when = (seconds) => new Date(seconds * 1000).toLocaleString();

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"],
    power = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), units.length - 1);
  return `${Number((count / 2 ** (10 * power)).toPrecision(3))} ${units[power]}`;
}
