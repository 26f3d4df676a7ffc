/**
 * Conversations as files. JSON keeps everything but probabilities; Markdown is to read, and can be read back.
 * A file may come from anywhere: its size and its counts are bounded, and only fields that are known are copied.
 */

import { SETTINGS } from "./request.js";
import * as markdown from "./transcript.js";

const FORMAT = "plait.conversations",
  VERSION = 1,
  FILE_BYTES = 32 * 2 ** 20, // what a browser keeps is smaller, however it is encoded
  CONVERSATIONS = 10_000,
  MESSAGES = 100_000,
  CALLS = 128,
  VERSIONS = 50,
  DEPTH = 50,
  TITLE_CHARS = 200,
  FOLDER_CHARS = 80;

const FINISHES = ["stop", "length", "tool_calls", "content_filter", "stopped"],
  NUMBERS = ["first_ms", "rate", "tokens", "prompt", "cached"];

/** A file that cannot be imported; the message says what is wrong with it. */
export class ImportError extends Error {}

/** The conversations as one JSON text. Raises ImportError for one that could not be imported again. */
export function toJson(conversations) {
  const copies = conversations.map(clean);
  const file = { format: FORMAT, version: VERSION, exported: new Date().toISOString() };
  return JSON.stringify({ ...file, conversations: copies }, null, 1);
}

export const toMarkdown = (conversations) => conversations.map((one) => markdown.write(clean(one))).join("");

const clean = (one) => conversation(one, `“${one.title}”`);

/** Whether two conversations have the same messages, whatever their titles and timings. */
export function isSame(a, b) {
  const [one, other] = [clean(a), clean(b)];
  return one.mode === other.mode && markdown.writeMessages(one) === markdown.writeMessages(other);
}

/** The conversations of a File. Raises ImportError for whatever is not as this page writes it. */
export async function readFile(file) {
  if (file.size > FILE_BYTES) refuse(`it has ${file.size} bytes; at most ${FILE_BYTES} are read`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    refuse("it is not text in UTF-8, or could not be read");
  }
  return fromText(text);
}

/** The same for a text, JSON or Markdown. */
export function fromText(text) {
  const found = text.trimStart().startsWith("{") ? fromJson(text) : fromMarkdown(text);
  if (found.length === 0) refuse("it holds no conversation");
  if (found.length > CONVERSATIONS)
    refuse(`it holds ${found.length} conversations; at most ${CONVERSATIONS} are read`);
  return found.map((one, i) => conversation(one, `conversation ${i + 1}`));
}

function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    refuse("it begins like JSON, and is not");
  }
  if (file.format !== FORMAT) refuse(`its "format" is not "${FORMAT}"`);
  if (file.version !== VERSION) refuse(`its "version" is not ${VERSION}, which this page reads`);
  return list(file.conversations, CONVERSATIONS, '"conversations"');
}

function fromMarkdown(text) {
  try {
    return markdown.read(text);
  } catch (error) {
    if (error instanceof markdown.TranscriptError) refuse(error.message);
    throw error;
  }
}

/** A clean copy. `where` names it in errors. `folder` is the name of one here, and its id in the store. */
function conversation(found, where) {
  if (!isObject(found)) refuse(`${where} is not an object`);
  if (found.mode !== "chat" && found.mode !== "text") refuse(`${where}: "mode" is neither "chat" nor "text"`);
  const updated = Number.isFinite(found.updated) ? found.updated : 0;
  const model = typeof found.model === "string" ? { model: found.model.slice(0, TITLE_CHARS) } : {};
  const folder = titled(text(found.folder ?? "", `${where}: "folder"`)).slice(0, FOLDER_CHARS);
  const own = isObject(found.settings) ? { settings: settings(found.settings) } : {};
  return {
    ...own,
    ...model,
    ...(folder ? { folder } : {}),
    id: typeof found.id === "string" && /^[0-9a-f]{16}$/.test(found.id) ? found.id : "",
    title: titled(text(found.title ?? "", `${where}: "title"`)),
    mode: found.mode,
    updated: Math.min(Math.max(updated, 0), Date.now()),
    messages: list(found.messages, MESSAGES, `${where}: "messages"`).map((one, i) =>
      message(one, `${where}, message ${i + 1}`),
    ),
  };
}

/** Settings are texts and marks; what is none of those that are known is left out. */
function settings(found) {
  const known = SETTINGS.filter((name) => ["string", "boolean"].includes(typeof found[name]));
  return Object.fromEntries(known.map((name) => [name, found[name]]));
}

function message(found, where, depth = 0) {
  if (!isObject(found)) refuse(`${where} is not an object`);
  const content = text(found.content, `${where}: "content"`);
  if (found.role === "user") return { role: "user", content, ...versions(found, where, depth) };
  if (found.role === "tool")
    return { role: "tool", tool_call_id: text(found.tool_call_id, `${where}: "tool_call_id"`), content };
  if (found.role !== "assistant") refuse(`${where}: "role" is none of user, assistant and tool`);
  const copy = {
    role: "assistant",
    content,
    reasoning: text(found.reasoning ?? "", `${where}: "reasoning"`),
    tool_calls: list(found.tool_calls ?? [], CALLS, `${where}: "tool_calls"`).map((one) => call(one, where)),
    stats: stats(found.stats),
    ...versions(found, where, depth),
  };
  if (typeof found.model === "string" && found.model) copy.model = found.model.slice(0, TITLE_CHARS);
  if (found.answered === true) copy.answered = true;
  if (found.error !== undefined) copy.error = text(found.error, `${where}: "error"`);
  return copy;
}

/** The other versions of a message, each with the messages after it, which may have versions, too. */
function versions(found, where, depth) {
  if (found.versions === undefined) return {};
  if (depth >= DEPTH) refuse(`${where}: versions of versions, more than ${DEPTH} deep`);
  const all = list(found.versions, VERSIONS, `${where}: "versions"`).map((one) => {
    if (!isObject(one) || one.role !== found.role) refuse(`${where}: a version is of another kind`);
    const after = list(one.after, MESSAGES, `${where}: "after"`);
    const { versions: _, ...bare } = one;
    return { ...message(bare, where, depth), after: after.map((next) => message(next, where, depth + 1)) };
  });
  const at = Number.isInteger(found.at) ? Math.min(Math.max(found.at, 0), all.length) : all.length;
  return { versions: all, at };
}

function call(found, where) {
  if (!isObject(found)) refuse(`${where}: a tool call is not an object`);
  const [id, name, given] = ["id", "name", "arguments"].map((key) =>
    text(found[key], `${where}: "${key}" of a tool call`),
  );
  return { id, name, arguments: given };
}

/** Numbers about a reply are a decoration: what is none of them is left out. */
function stats(found) {
  const copy = {};
  if (!isObject(found)) return copy;
  for (const name of NUMBERS) {
    const value = found[name]; // null: not measured
    if (value === null || (Number.isFinite(value) && value >= 0)) copy[name] = value;
  }
  if (FINISHES.includes(found.finish)) copy.finish = found.finish;
  return copy;
}

/** One line without control characters. */
const titled = (value) =>
  Array.from(value.replace(/[\p{Cc}\p{Zl}\p{Zp}]+/gu, " ").trim())
    .slice(0, TITLE_CHARS)
    .join("");

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function text(value, where) {
  if (typeof value !== "string") refuse(`${where} is not a text`);
  return value;
}

function list(value, most, where) {
  if (!Array.isArray(value)) refuse(`${where} is not a list`);
  if (value.length > most) refuse(`${where} has ${value.length} entries; at most ${most} are read`);
  return value;
}

function refuse(why) {
  throw new ImportError(why);
}
