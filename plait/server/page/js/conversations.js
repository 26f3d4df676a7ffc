/** The list of conversations: open one, delete one (with ten seconds to undo it), export them, import them. */

import { byId, iconButton, make } from "./dom.js";
import { FolderError, Folders, ensure, nameField, nameOf } from "./folders.js";
import { notify } from "./notices.js";
import * as store from "./store.js";
import { ImportError, isSame, readFile, toJson, toMarkdown } from "./transfer.js";

const UNDO_MS = 10_000,
  FILES = 20,
  TITLE_CHARS = 200,
  NAME_CHARS = 40;

/** A selector of what has the focus within `list`, for when it is drawn anew; null: nothing there has it. */
function describeFocus(list) {
  const at = document.activeElement;
  if (!list.contains(at)) return null;
  const name = ["data-id", "data-folder", "aria-label"].find((one) => at.hasAttribute(one));
  return name ? `[${name}="${CSS.escape(at.getAttribute(name))}"]` : null;
}

export class Conversations {
  /** `hooks`: current() -> the open conversation, open(conversation), start(mode, folder) opens a new one. */
  constructor(hooks) {
    this.hooks = hooks;
    this.folders = new Folders({
      show: () => this.show(),
      put: (id, folder) => this.change(id, { folder }),
      start: (folder) => hooks.start(hooks.current().mode, folder),
    });
    byId("export-open").addEventListener("click", () => this.ask());
    byId("export-close").addEventListener("click", () => byId("export").close());
    byId("export-form").addEventListener("submit", (event) => {
      event.preventDefault();
      byId("export").close();
      this.download(new FormData(event.target));
    });
    const files = byId("import-files");
    byId("import").addEventListener("click", () => files.click());
    files.addEventListener("change", async () => {
      const chosen = [...files.files];
      files.value = ""; // so that the same file can be chosen again
      await this.take(chosen);
    });
    byId("search").addEventListener("input", () => this.show());
    store.onChange(() => this.show());
    store.onGone((id) => this.lose(id));
  }

  show() {
    if (byId("conversations").querySelector("input")) return; // a name is being typed
    const current = this.hooks.current().id,
      all = store.conversations(),
      text = byId("search").value.trim(),
      shown = matching(all, text);
    const row = (one) => this.row(one, one.id === current);
    const focused = describeFocus(byId("conversations"));
    byId("conversations").replaceChildren(...this.folders.nodes(shown, text !== "", row));
    if (focused) byId("conversations").querySelector(focused)?.focus({ preventScroll: true });
    byId("search").hidden = all.length === 0;
    byId("export-open").disabled = all.length === 0;
  }

  row(conversation, isCurrent) {
    const { id, title } = conversation,
      name = title || "Untitled";
    const settings = { type: "button", class: "entry", "aria-current": isCurrent ? "true" : null };
    const keys = {
      "aria-keyshortcuts": "Delete F2 M",
      onkeydown: (event) => {
        if (event.key === "Delete") this.remove(id, name);
        if (event.key === "F2") this.rename(id, open);
        if (event.key.toLowerCase() === "m" && !event.ctrlKey && !event.metaKey) this.folders.ask(conversation);
      },
    };
    const open = make("button", { ...settings, ...keys, onclick: () => this.open(id) }, name);
    open.dataset.id = id;
    const node = make(
      "li",
      {},
      open,
      iconButton("folder", `Move ${name}`, () => this.folders.ask(conversation), { class: "icon third" }),
      iconButton("edit", `Rename ${name}`, () => this.rename(id, open), { class: "icon second" }),
      iconButton("trash", `Delete ${name}`, () => this.remove(id, name)),
    );
    return this.folders.drags(node, conversation);
  }

  /** Type another name in the place of `entry`: Enter or leaving keeps it, Escape does not. */
  rename(id, entry) {
    const done = (title) => {
      input.replaceWith(entry);
      if (title) this.change(id, { title });
      this.show();
      byId("conversations").querySelector(`[data-id="${CSS.escape(id)}"]`)?.focus();
    };
    const input = nameField("Name of the conversation", store.load(id)?.title ?? "", done, TITLE_CHARS);
    entry.replaceWith(input);
    input.select();
  }

  /** Change a kept conversation, which may be the open one. */
  change(id, facts) {
    const current = this.hooks.current(),
      found = id === current.id ? current : store.load(id);
    if (!found) return;
    Object.assign(found, facts); // what is undefined is not kept
    try {
      store.save(found);
    } catch (error) {
      notify(`The change was not kept: ${reason(error)}`, { ms: 0 });
    }
  }

  open(id) {
    const found = store.load(id);
    if (found) this.hooks.open(found);
  }

  /** Delete at once, and keep a copy in memory for as long as it can be undone. */
  remove(id, name) {
    const current = this.hooks.current(),
      isOpen = id === current.id,
      text = store.take(id);
    if (isOpen) {
      current.isGone = true; // a reply that ends later must not bring it back
      this.hooks.start(current.mode);
    }
    this.show();
    const run = () => this.bringBack(id, text, isOpen ? current : null);
    notify(`Deleted “${name}”`, {
      ms: UNDO_MS,
      action: { label: "Undo", name: `Undo deleting ${name}`, run },
    });
  }

  /** Another tab deleted the open conversation: it is no longer kept here, whatever this tab still writes to it. */
  lose(id) {
    const current = this.hooks.current();
    if (id !== current.id || current.isGone) return;
    current.isGone = true;
    this.hooks.start(current.mode);
    notify("Another tab deleted this conversation", { ms: 0 });
  }

  /** `conversation`: the one that was open, with all that has no place in `text`. */
  bringBack(id, text, conversation) {
    try {
      if (conversation) {
        delete conversation.isGone;
        store.allow(id);
        store.save(conversation);
        if (this.hooks.current().messages.length === 0) this.hooks.open(conversation);
      } else if (text !== null) store.putBack(id, text);
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
      notify("This browser has no room for it any more; delete something else first", { ms: 0 });
    }
    this.show();
    const entry = byId("conversations").querySelector(`[data-id="${CSS.escape(id)}"]`);
    (entry?.checkVisibility() ? entry : byId("scroll")).focus();
  }

  /** Ask which conversations go into a file, and in which form. */
  ask() {
    const { id, folder } = this.hooks.current(),
      isHere = store.load(id) !== null,
      name = nameOf(folder),
      [one, inside, all] = byId("export-form").elements.which;
    one.disabled = !isHere;
    inside.disabled = name === undefined;
    inside.closest("label").hidden = inside.disabled;
    byId("export-folder").textContent = name ?? "";
    (isHere ? one : all).checked = true;
    byId("export").showModal();
  }

  download(chosen) {
    const current = this.hooks.current(),
      which = chosen.get("which");
    const ids = which === "one" ? [current] : store.conversations();
    const all = ids
      .filter(({ folder }) => which !== "folder" || folder === current.folder)
      .map(({ id }) => store.load(id))
      .filter((one) => one !== null)
      .map((one) => ({ ...one, folder: nameOf(one.folder) }));
    const isJson = chosen.get("form") === "json";
    let text;
    try {
      text = isJson ? toJson(all) : toMarkdown(all);
    } catch (error) {
      notify(`Nothing was exported: ${reason(error)}`, { ms: 0 });
      return;
    }
    const kind = isJson ? "application/json" : "text/markdown";
    const address = URL.createObjectURL(new Blob([text], { type: kind }));
    const title = which === "folder" ? nameOf(current.folder) : all.length === 1 ? all[0].title : "conversations";
    const name = `${fileName(title)}.${isJson ? "json" : "md"}`;
    make("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    notify(`Exported ${counted(all.length)} as ${name}`);
  }

  /** Import files: all conversations of a file, or none of it. */
  async take(files) {
    if (files.length > FILES) {
      notify(`${files.length} files were chosen; at most ${FILES} are imported at once`, { ms: 0 });
      return;
    }
    let count = 0,
      known = 0;
    for (const file of files) {
      try {
        const found = await readFile(file);
        const fresh = found.filter((one) => !isHere(one));
        keep(fresh);
        count += fresh.length;
        known += found.length - fresh.length;
      } catch (error) {
        notify(`${file.name.slice(0, 80)} was not imported: ${reason(error)}`, { ms: 0 });
      }
    }
    this.show();
    if (count + known === 0) return;
    const rest = known ? `, ${known} ${known === 1 ? "was" : "were"} here already` : "";
    notify(`Imported ${counted(count)}${rest}`);
  }
}

/** The conversations in which every word of `text` is somewhere: in the name, the folder's, or a message. */
function matching(all, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return all;
  const names = new Map(store.folders().map(({ id, name }) => [id, name]));
  return all.filter(({ id, title, folder }) => {
    const messages = store.load(id)?.messages ?? [];
    const whole = [title, names.get(folder) ?? "", ...messages.map((one) => one.content)].join("\n").toLowerCase();
    return words.every((word) => whole.includes(word));
  });
}

/** Whether it is here already, under its own id and with the same messages. */
function isHere(conversation) {
  const found = conversation.id ? store.load(conversation.id) : null;
  try {
    return found !== null && isSame(found, conversation);
  } catch (error) {
    if (error instanceof ImportError) return false; // what is here is of another version
    throw error;
  }
}

/** Save them all, or none: an id that is taken is replaced, and a folder is one by its name. */
function keep(conversations) {
  const saved = [],
    before = new Set(store.folders().map((one) => one.id));
  try {
    for (const one of conversations) {
      if (one.folder) one.folder = ensure(one.folder);
      if (!one.id || store.load(one.id)) one.id = store.newId();
      saved.push(one.id);
      store.allow(one.id);
      store.save(one);
    }
  } catch (error) {
    saved.forEach(store.forget);
    for (const { id } of store.folders()) if (!before.has(id)) store.forgetFolder(id);
    throw error;
  }
}

function reason(error) {
  if (error instanceof ImportError || error instanceof FolderError) return error.message;
  if (error.name === "QuotaExceededError") return "this browser has no room for it";
  throw error;
}

const counted = (count) => `${count} ${count === 1 ? "conversation" : "conversations"}`;

/** A name that every file system takes, with the day. */
function fileName(title) {
  const plain = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-");
  const short = Array.from(plain)
    .slice(0, NAME_CHARS)
    .join("")
    .replace(/^-+|-+$/g, "");
  return ["plait", short, new Date().toISOString().slice(0, 10)].filter(Boolean).join("-");
}
