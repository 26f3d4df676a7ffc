/**
 * Conversations as Markdown that reads well anywhere and can be read back. Comments, which no reader shows, say where
 * a message begins:
 *
 *   <!-- plait:conversation {"version":1,"mode":"chat"} -->
 *   # Title
 *
 *   <!-- plait:user -->
 *   ## You
 *
 *   What was written, as it is. A line that looks like such a comment gets a backslash in front.
 */

const VERSION = 1;
const MARKER = /^<!-- plait:([a-z]+)(?: (\{.*\}))? -->$/s,
  LOOKS_LIKE_ONE = /^\\*<!-- plait:/;

/** This is not Markdown that the page wrote; the message says which line. */
export class TranscriptError extends Error {}

export function write(conversation) {
  const { id, mode, updated, title, folder } = conversation;
  const begin = section("conversation", { version: VERSION, id, mode, updated, folder }, `# ${title || "Untitled"}`);
  return begin + writeMessages(conversation);
}

export const writeMessages = ({ messages, mode }) => messages.map((one) => writeMessage(one, mode)).join("");

function writeMessage(message, mode) {
  const { role, content } = message;
  if (role === "user") return section("user", null, mode === "text" ? "## Your text" : "## You", content);
  if (role === "tool") return section("tool", { id: message.tool_call_id }, "## Tool result", content);
  const facts = message.answered ? { answered: true } : null;
  const reply = message.reasoning
    ? section("assistant", facts, "## Reply") +
      section("reasoning", null, "### Reasoning", message.reasoning) +
      section("content", null, "### Answer", content)
    : section("assistant", facts, "## Reply", content);
  return reply + (message.tool_calls ?? []).map(writeCall).join("");
}

/** Arguments are code: indented by four, which Markdown shows as they are. */
function writeCall({ id, name, arguments: given }) {
  return section("call", { id, name }, "### Tool call", given.replace(/^/gm, "    "));
}

function section(kind, facts, heading, body = null) {
  const comment = facts ? ` ${JSON.stringify(facts).replaceAll(">", "\\u003e")}` : "";
  const lines = body?.split("\n").map((line) => (LOOKS_LIKE_ONE.test(line) ? `\\${line}` : line));
  return `<!-- plait:${kind}${comment} -->\n${heading}\n\n${lines ? `${lines.join("\n")}\n\n` : ""}`;
}

/** The conversations of a text, as they were written and not yet validated. Raises TranscriptError. */
export function read(text) {
  const found = [];
  for (const part of sections(text)) {
    const { kind, at } = part;
    if (kind === "conversation") {
      const { version, id, mode, updated, folder } = part.facts;
      if (version !== VERSION) fail(at, `"version" is not ${VERSION}, which this page reads`);
      found.push({ id, mode, updated, folder, title: part.heading.replace(/^# /, ""), messages: [] });
    } else if (found.length === 0) fail(at, "a message without a conversation");
    else add(found.at(-1).messages, part);
  }
  return found;
}

function add(messages, { kind, facts, body, at }) {
  const last = messages.at(-1);
  if (kind === "user") messages.push({ role: "user", content: body });
  else if (kind === "tool") messages.push({ role: "tool", tool_call_id: facts.id, content: body });
  else if (kind === "assistant")
    messages.push({ role: "assistant", content: body, tool_calls: [], answered: facts.answered });
  else if (last?.role !== "assistant") fail(at, `"${kind}" does not belong to a reply`);
  else if (kind === "reasoning" || kind === "content") last[kind] = body;
  else if (kind === "call")
    last.tool_calls.push({ id: facts.id, name: facts.name, arguments: body.replace(/^ {4}/gm, "") });
  else fail(at, `"${kind}" is nothing that this page writes`);
}

/** Markers, each with its facts, its heading and the text up to the next one. */
function sections(text) {
  const lines = unified(text).split("\n"),
    found = [];
  let open = null;
  lines.forEach((line, i) => {
    const marker = MARKER.exec(line);
    if (marker) {
      open = { kind: marker[1], facts: facts(marker[2], i), at: i, lines: [] };
      found.push(open);
    } else if (line.startsWith("<!-- plait:")) fail(i, "not a comment as this page writes it");
    else if (open) open.lines.push(LOOKS_LIKE_ONE.test(line) ? line.slice(1) : line);
    else if (line.trim() !== "") fail(i, "this is not Markdown that Plait exported");
  });
  return found.map(closed);
}

function closed({ kind, facts, at, lines }) {
  const [heading = "", blank = "", ...rest] = lines;
  if (!heading.startsWith("#") || blank !== "") fail(at + 1, "a heading and an empty line should follow");
  return { kind, facts, at, heading, body: rest.join("\n").replace(/\n$/, "") };
}

/** Without the mark and the line ends that some editors add, and without the end of the last line. */
function unified(text) {
  const plain = text.replace(/^\ufeff/, "").replace(/\r?\n$/, "");
  return plain.split("\n", 1)[0].endsWith("\r") ? plain.replaceAll("\r\n", "\n") : plain;
}

function facts(text, at) {
  try {
    return text ? JSON.parse(text) : {};
  } catch {
    return fail(at, "the comment holds no JSON");
  }
}

function fail(at, why) {
  throw new TranscriptError(`line ${at + 1}: ${why}`);
}
