/** What stays in this browser: conversations, each under a key of its own so that tabs do not undo each other. */

const PREFIX = "plait.conversation.",
  GONE = "plait.gone.", // ids of deleted conversations, with the time: a tab that still writes one keeps nothing
  FOLDER = "plait.folder.",
  SETTINGS = "plait.settings",
  PROMPTS = "plait.prompts",
  LOOK = "plait.look";

const GONE_MS = 30 * 24 * 3600 * 1000; // no tab writes for longer without having seen that it is deleted

/** A name nobody else has; without crypto.randomUUID, which plain HTTP does not offer. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join(
    "",
  );
}

export const newConversation = (mode) => ({
  id: newId(),
  title: "",
  mode,
  updated: Date.now(),
  messages: [],
});

/** Every conversation's id, title, time and folder, latest first. */
export function conversations() {
  const found = all(PREFIX).filter(isWhole);
  return found
    .map(({ id, title, updated, folder }) => ({ id, title, updated, folder }))
    .sort((a, b) => b.updated - a.updated);
}

/** Every folder, by name: {id, name, isClosed}. Each has a key of its own, as conversations have. */
export function folders() {
  const found = all(FOLDER).filter((one) => typeof one?.id === "string" && typeof one.name === "string");
  return found.sort((a, b) => a.name.localeCompare(b.name));
}

export const saveFolder = (folder) => localStorage.setItem(FOLDER + folder.id, JSON.stringify(folder));
export const forgetFolder = (id) => localStorage.removeItem(FOLDER + id);

const all = (prefix) => keys(prefix).map((key) => read(key, null));

function keys(prefix) {
  const found = Array.from({ length: localStorage.length }, (_, i) => localStorage.key(i));
  return found.filter((key) => key.startsWith(prefix));
}

/** The conversation, or null if it is not here. */
export function load(id) {
  const found = read(PREFIX + id, null);
  return isWhole(found) ? found : null;
}

/** Whether what was stored is a conversation: another version of this page may have written it. */
function isWhole(found) {
  const isKnown = found?.mode === "chat" || found?.mode === "text";
  return isKnown && typeof found.id === "string" && Array.isArray(found.messages);
}

/**
 * Keep a conversation, unless any tab has deleted it. Raises QuotaExceededError when the browser has no room;
 * probabilities are not kept.
 */
export function save(conversation) {
  if (localStorage.getItem(GONE + conversation.id) !== null) return;
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation, lasting));
}

/** Delete a conversation for every tab; returns its text, for `putBack`, or null if it was not here. */
export function take(id) {
  const text = localStorage.getItem(PREFIX + id);
  forget(id); // first: a full browser has room for the mark then
  forgetMarks();
  localStorage.setItem(GONE + id, String(Date.now()));
  forget(id); // what another tab wrote in between
  return text;
}

/** Let a deleted conversation be kept again. */
export const allow = (id) => localStorage.removeItem(GONE + id);

export function putBack(id, text) {
  allow(id);
  localStorage.setItem(PREFIX + id, text);
}

function forgetMarks() {
  for (const key of keys(GONE)) if (Date.now() - localStorage.getItem(key) > GONE_MS) localStorage.removeItem(key);
}

export const forget = (id) => localStorage.removeItem(PREFIX + id);

export const settings = () => read(SETTINGS, {});
export const saveSettings = (values) => localStorage.setItem(SETTINGS, JSON.stringify(values));

/** System prompts by name. */
export const prompts = () => read(PROMPTS, {});
export const savePrompts = (all) => localStorage.setItem(PROMPTS, JSON.stringify(all));

/** How the page was left: open panel, last conversation. */
export const look = () => read(LOOK, {});
export const saveLook = (change) => localStorage.setItem(LOOK, JSON.stringify({ ...look(), ...change }));

/** Call back when another tab changed the list. */
export function onChange(callback) {
  addEventListener("storage", (event) => {
    if (event.key === null || [PREFIX, FOLDER].some((prefix) => event.key.startsWith(prefix))) callback();
  });
}

/** Call back with what another tab made of a conversation. */
export function onOther(callback) {
  addEventListener("storage", (event) => {
    const found = event.key?.startsWith(PREFIX) ? load(event.key.slice(PREFIX.length)) : null;
    if (found !== null) callback(found);
  });
}

/** Call back with the id of a conversation that another tab deleted. */
export function onGone(callback) {
  addEventListener("storage", (event) => {
    if (event.key?.startsWith(GONE) && event.newValue !== null) callback(event.key.slice(GONE.length));
  });
}

// The list of a message, not the count in its stats.
const lasting = (key, value) => (key === "tokens" && Array.isArray(value) ? undefined : value);

function read(key, otherwise) {
  const text = localStorage.getItem(key);
  if (text === null) return otherwise;
  try {
    return JSON.parse(text);
  } catch {
    return otherwise; // not ours, or written half: as good as absent
  }
}
