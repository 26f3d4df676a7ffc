/** Folders of the list: a conversation is in one of them or in none. Each has a name that no other folder has. */

import { byId, iconButton, make } from "./dom.js";
import { notify } from "./notices.js";
import * as store from "./store.js";

const NAME_CHARS = 80,
  FOLDERS = 200,
  UNDO_MS = 10_000,
  DRAGGED = "application/x-plait-conversation";

const same = (a, b) => a.toLowerCase() === b.toLowerCase();
const clean = (name) =>
  Array.from(name.replace(/[\p{Cc}\p{Zl}\p{Zp}]+/gu, " ").trim())
    .slice(0, NAME_CHARS)
    .join("");

/** A name cannot be a folder's; the message says why. */
export class FolderError extends Error {}

/** The id of the folder with this name, which is made if there is none. Raises FolderError. */
export function ensure(name) {
  const all = store.folders(),
    wanted = clean(name);
  const found = all.find((one) => same(one.name, wanted));
  if (found) return found.id;
  if (!wanted) throw new FolderError("a folder needs a name");
  if (all.length >= FOLDERS) throw new FolderError(`there are ${all.length} folders; at most ${FOLDERS} are kept`);
  const folder = { id: store.newId(), name: wanted };
  store.saveFolder(folder);
  return folder.id;
}

/** The name of a conversation's folder; undefined: it is in none, or its folder is gone. */
export const nameOf = (id) => store.folders().find((one) => one.id === id)?.name;

/** A field that takes the place of a name. `done(text)` is called once: with null if it was given up. */
export function nameField(label, value, done, most = NAME_CHARS) {
  const input = make("input", { class: "entry", "aria-label": label, maxlength: most });
  input.value = value;
  let isDone = false; // taking it away is leaving it, too
  const end = (isKept) => {
    if (isDone) return;
    isDone = true;
    done(isKept && input.value.trim() ? input.value.trim() : null);
  };
  input.addEventListener("blur", () => end(true));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault(); // Escape would stop a reply
    end(event.key === "Enter");
  });
  return input;
}

/** The folders in the list, and the dialog that moves a conversation. */
export class Folders {
  /** `hooks`: show() draws the list again, put(id, folder) keeps a conversation there, start(folder) a new one. */
  constructor(hooks) {
    this.hooks = hooks;
    byId("folder-new").addEventListener("click", () => this.askName());
    byId("move-close").addEventListener("click", () => byId("move").close());
    byId("move-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.moveToNew();
    });
    const list = byId("conversations");
    list.addEventListener("dragover", (event) => this.over(event));
    list.addEventListener("dragleave", () => this.mark(null));
    list.addEventListener("drop", (event) => this.drop(event));
  }

  /** The list: each folder with its conversations, and those in none. `isSearch`: folders show what was found. */
  nodes(shown, isSearch, row) {
    const all = store.folders(),
      known = new Set(all.map((one) => one.id));
    const groups = all.map((folder) => [folder, shown.filter((one) => one.folder === folder.id)]);
    const seen = groups.filter(([, inside]) => !isSearch || inside.length > 0);
    return [
      ...seen.map(([folder, inside]) => this.group(folder, inside, isSearch, row)),
      ...shown.filter((one) => !known.has(one.folder)).map(row),
    ];
  }

  group(folder, inside, isSearch, row) {
    const { id, name } = folder,
      isOpen = isSearch || !folder.isClosed;
    const count = make("span", { class: "count num" }, String(inside.length));
    const settings = {
      type: "button",
      class: "folder-name",
      "aria-expanded": String(isOpen),
      "aria-keyshortcuts": "Delete F2",
      onclick: () => this.turn(folder),
      onkeydown: (event) => {
        if (event.key === "Delete") this.remove(folder);
        if (event.key === "F2") this.rename(folder, head);
      },
    };
    const head = make("button", settings, make("span", { class: "folder-text" }, name), count);
    head.dataset.folder = id;
    const list = make("ul", { "aria-label": `Folder ${name}` }, ...inside.map(row));
    list.hidden = !isOpen;
    const node = make(
      "li",
      { class: "folder" },
      make(
        "div",
        { class: "folder-head" },
        head,
        iconButton("plus", `New conversation in ${name}`, () => this.hooks.start(id), { class: "icon third" }),
        iconButton("edit", `Rename folder ${name}`, () => this.rename(folder, head), { class: "icon second" }),
        iconButton("trash", `Delete folder ${name}`, () => this.remove(folder)),
      ),
      list,
    );
    node.dataset.drop = id;
    return node;
  }

  turn({ id, name, isClosed }) {
    store.saveFolder({ id, name, ...(isClosed ? {} : { isClosed: true }) });
    this.hooks.show();
    this.focus(id);
  }

  askName() {
    const field = nameField("Name of the new folder", "", (name) => {
      place.remove();
      const id = name && this.made(name);
      this.hooks.show();
      if (id) this.focus(id);
      else byId("folder-new").focus();
    });
    const place = make("li", {}, field);
    byId("conversations").prepend(place);
    field.focus();
  }

  /** The folder's id; null where it cannot be made, which is said. */
  made(name) {
    try {
      return ensure(name);
    } catch (error) {
      if (!(error instanceof FolderError) && error.name !== "QuotaExceededError") throw error;
      const why = error instanceof FolderError ? error.message : "this browser has no room for it";
      notify(`The folder was not made: ${why}`, { ms: 0 });
      return null;
    }
  }

  rename(folder, head) {
    const field = nameField(`Name of the folder ${folder.name}`, folder.name, (name) => {
      field.replaceWith(head);
      if (name) this.name(folder, clean(name));
      this.hooks.show();
      this.focus(folder.id);
    });
    head.replaceWith(field);
    field.select();
  }

  name(folder, name) {
    const taken = store.folders().some((one) => one.id !== folder.id && same(one.name, name));
    if (taken) notify(`The folder keeps its name: another one is called “${name}”`, { ms: 0 });
    else store.saveFolder({ ...folder, name });
  }

  /** Delete a folder; what is in it moves out of it, and back if that is undone. */
  remove(folder) {
    const inside = store.conversations().filter((one) => one.folder === folder.id);
    store.forgetFolder(folder.id);
    for (const { id } of inside) this.hooks.put(id, undefined);
    this.hooks.show();
    const run = () => {
      store.saveFolder(folder);
      for (const { id, folder: now } of store.conversations())
        if (now === undefined && inside.some((one) => one.id === id)) this.hooks.put(id, folder.id);
      this.hooks.show();
      this.focus(folder.id);
    };
    const kept = inside.length ? `; what was in it is kept` : "";
    notify(`Deleted the folder “${folder.name}”${kept}`, {
      ms: UNDO_MS,
      action: { label: "Undo", name: `Undo deleting the folder ${folder.name}`, run },
    });
  }

  /** Ask where a conversation belongs. */
  ask({ id, title, folder }) {
    this.asked = { id, title, folder };
    byId("move-title").textContent = `Move “${title || "Untitled"}”`;
    const to = (target, name) =>
      make(
        "button",
        { type: "button", "aria-current": target === folder ? "true" : null, onclick: () => this.moveTo(target) },
        name,
      );
    const all = store.folders(),
      here = all.some((one) => one.id === folder) ? folder : undefined;
    this.asked.folder = folder = here;
    byId("move-list").replaceChildren(
      ...all.map((one) => make("li", {}, to(one.id, one.name))),
      make("li", {}, to(undefined, "In no folder")),
    );
    byId("move-name").value = "";
    byId("move").showModal();
  }

  moveToNew() {
    const name = byId("move-name").value.trim(),
      target = name && this.made(name);
    if (target) this.moveTo(target);
    else byId("move-name").focus();
  }

  moveTo(target) {
    byId("move").close();
    this.move(this.asked, target);
  }

  /** Move a conversation, which can be undone; `target` undefined: out of its folder. */
  move({ id, title, folder }, target) {
    if (folder === target) return;
    this.hooks.put(id, target);
    this.hooks.show();
    const name = nameOf(target),
      run = () => {
        this.hooks.put(id, nameOf(folder) === undefined ? undefined : folder);
        this.hooks.show();
      };
    const where = name === undefined ? "out of its folder" : `to “${name}”`;
    notify(`Moved “${title || "Untitled"}” ${where}`, {
      ms: UNDO_MS,
      action: { label: "Undo", name: `Undo moving ${title || "Untitled"}`, run },
    });
  }

  /** Make a row of the list one that can be dragged into a folder. */
  drags(node, conversation) {
    node.draggable = true;
    node.addEventListener("dragstart", (event) => {
      this.dragged = conversation;
      event.dataTransfer.setData(DRAGGED, conversation.id);
      event.dataTransfer.effectAllowed = "move";
    });
    node.addEventListener("dragend", () => this.mark(null));
    return node;
  }

  over(event) {
    if (!event.dataTransfer.types.includes(DRAGGED)) return;
    event.preventDefault();
    this.mark(event.target.closest("[data-drop]") ?? byId("conversations"));
  }

  /** Show where what is dragged would go. */
  mark(place) {
    for (const node of document.querySelectorAll(".is-over")) if (node !== place) node.classList.remove("is-over");
    place?.classList.add("is-over");
  }

  drop(event) {
    const id = event.dataTransfer.getData(DRAGGED);
    this.mark(null);
    if (!id || id !== this.dragged?.id) return; // of another tab or page
    event.preventDefault();
    this.move(this.dragged, event.target.closest("[data-drop]")?.dataset.drop);
  }

  focus(id) {
    byId("conversations").querySelector(`[data-folder="${CSS.escape(id)}"]`)?.focus();
  }
}
