/** Tool calls of a reply: consent to those of MCP servers, and the place where a person plays any other tool. */

import { make, icon } from "./dom.js";
import { consent } from "./mcp.js";

/**
 * A list of calls. `onAnswer(message, decisions)` is called when each has one: see `McpTools.settle`. `tools`: the
 * McpTools that know which calls are theirs.
 */
export function toolCalls(message, isLive, onAnswer, tools) {
  const calls = message.tool_calls.map((call) =>
    make(
      "details",
      { class: "call", open: true },
      make("summary", {}, icon("tool"), make("code", {}, call.name || "…")),
      make("pre", { tabindex: "0" }, make("code", {}, pretty(call.arguments))),
    ),
  );
  const node = make("div", { class: "calls" }, ...calls);
  if (!isLive && !message.answered && onAnswer) node.append(form(message, onAnswer, tools));
  return node;
}

function form(message, onAnswer, tools) {
  const calls = message.tool_calls,
    decisions = calls.map(() => null),
    areas = new Map();
  const send = () => {
    for (const [i, area] of areas) decisions[i] = { text: area.value };
    if (decisions.every((one) => one !== null)) onAnswer(message, decisions);
  };
  const fields = calls.map((call, i) => {
    const found = tools?.find(call.name);
    if (!found) {
      areas.set(i, make("textarea", { rows: "2" }));
      return make("label", {}, `Result of ${call.name}`, areas.get(i));
    }
    return consent(call, found, (decision) => {
      decisions[i] = decision;
      if (areas.size === 0) send();
    });
  });
  const answer = (event) => {
    event.preventDefault();
    send();
  };
  const button = areas.size ? make("button", { type: "submit", class: "primary" }, "Send results") : null;
  return make("form", { class: "answers", onsubmit: answer }, ...fields, button);
}

/** JSON with indentation; what is not JSON yet as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still arriving, or not JSON at all: the reader should see exactly that
  }
}
