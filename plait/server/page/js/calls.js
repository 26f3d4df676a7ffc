/** Tool calls of a reply, and the place where a person plays the tool. */

import { make, icon } from "./dom.js";

/** A list of calls. `onAnswer(message, results)` is offered while the calls wait for results. */
export function toolCalls(message, isLive, onAnswer) {
  const calls = message.tool_calls.map((call) =>
    make(
      "details",
      { class: "call", open: true },
      make("summary", {}, icon("tool"), make("code", {}, call.name || "…")),
      make("pre", { tabindex: "0" }, make("code", {}, pretty(call.arguments))),
    ),
  );
  const node = make("div", { class: "calls" }, ...calls);
  if (!isLive && !message.answered && onAnswer) node.append(form(message, onAnswer));
  return node;
}

function form(message, onAnswer) {
  const areas = message.tool_calls.map(() => make("textarea", { rows: "2" }));
  const fields = message.tool_calls.map((call, i) => make("label", {}, `Result of ${call.name}`, areas[i]));
  const answer = (event) => {
    event.preventDefault();
    onAnswer(
      message,
      areas.map((area) => area.value),
    );
  };
  return make(
    "form",
    { class: "answers", onsubmit: answer },
    ...fields,
    make("button", { type: "submit", class: "primary" }, "Send results"),
  );
}

/** JSON with indentation; what is not JSON yet as it is. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still arriving, or not JSON at all: the reader should see exactly that
  }
}
