/** Short notices over the page. Some offer an action, for as long as they are there; Ctrl+Z takes the latest. */

import { byId, iconButton, make, say } from "./dom.js";

const open = []; // those with an action, latest last

/**
 * Show a notice for `ms`, or until it is closed. `action`: {label, name, run}, with `name` for screen readers.
 * It takes the focus then, and gives it back when the time is over.
 */
export function notify(text, { ms = 10_000, action = null } = {}) {
  const node = make(
    "div",
    { class: ms ? "note" : "note is-bad", role: ms ? null : "alert" },
    make("span", {}, text),
  );
  const close = () => {
    clearTimeout(timer);
    const hadFocus = node.contains(document.activeElement);
    node.remove();
    if (act) open.splice(open.indexOf(act), 1);
    if (hadFocus) rest();
  };
  const act =
    action &&
    (() => {
      close();
      action.run();
    });
  const timer = ms ? setTimeout(close, ms) : null;
  if (act) {
    open.push(act);
    node.append(make("button", { type: "button", "aria-label": action.name, onclick: act }, action.label));
  }
  node.append(iconButton("close", "Close this notice", close));
  byId("notices").append(node);
  if (ms) say(action ? `${text}. ${action.label} is possible for ${ms / 1000} seconds.` : text);
  if (act) node.querySelector("button").focus();
}

/** Take the action of the latest notice. Whether there was one. */
export function takeLatest() {
  const act = open.at(-1);
  act?.();
  return Boolean(act);
}

/** Where the focus goes when its place is gone. */
function rest() {
  const place = byId("new");
  (place.checkVisibility() ? place : byId("scroll")).focus();
}
