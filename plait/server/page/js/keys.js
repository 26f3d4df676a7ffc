/** Every key of the page, in one table: what `?` shows is what listens. */

import { byId, make } from "./dom.js";

/**
 * Those that work anywhere. `act`: the name of what is done. Ctrl is Command, too; Ctrl+Alt is not AltGr, which
 * types letters. One without Ctrl works where nothing is being written.
 */
const ANYWHERE = [
  { key: "?", act: "keys", what: "This list" },
  { key: "/", ctrl: true, act: "keys", what: "This list, also while writing" },
  { key: "n", ctrl: true, alt: true, act: "start", what: "New conversation" },
  { key: "k", ctrl: true, act: "search", what: "Search conversations" },
  { key: "b", ctrl: true, act: "sidebar", what: "Show or hide the conversations" },
  { key: "c", ctrl: true, alt: true, act: "compare", what: "Compare two replies" },
  { key: "r", ctrl: true, alt: true, act: "again", what: "Write the last reply again" },
  { key: ".", ctrl: true, act: "settings", what: "Settings" },
  { key: "e", ctrl: true, alt: true, act: "engine", what: "Engine" },
  { key: "o", ctrl: true, alt: true, act: "operator", what: "Operator's view" },
  { key: "z", ctrl: true, act: "undo", what: "Undo the last deletion or move" },
  { key: "Escape", act: "escape", what: "Stop the reply, or close what is over the page" },
];

/** Those that belong to a place, which listens by itself. */
const PLACES = [
  [
    "Writing a message",
    [
      ["Enter", "Send it"],
      ["Shift Enter", "A new line in it"],
      ["Ctrl Enter", "Send it, or continue a text"],
    ],
  ],
  [
    "Editing a message",
    [
      ["Ctrl Enter", "Send or keep it"],
      ["Esc", "Leave it as it was"],
    ],
  ],
  [
    "On a conversation or a folder",
    [
      ["Enter", "Open it"],
      ["F2", "Rename it: Enter keeps the name, Esc does not"],
      ["Delete", "Delete it"],
      ["M", "Move the conversation to a folder"],
    ],
  ],
  [
    "Comparing",
    [
      ["Ctrl Enter", "Run both"],
      ["Esc", "Stop both, or close"],
    ],
  ],
  ["On the tabs of a panel", [["← →", "The other tab"]]],
];

/** Show the keys in the dialog, and listen to those that work anywhere. `acts`: a function for each, by name;
 * one that returns false leaves the key to the browser. */
export function listenToKeys(acts) {
  const rows = ANYWHERE.map(({ key, ctrl, alt, what }) => {
    const name = key === "Escape" ? "Esc" : key.length === 1 ? key.toUpperCase() : key;
    return [[ctrl && "Ctrl", alt && "Alt", name].filter(Boolean).join(" "), what];
  });
  byId("keys-list").replaceChildren(...[["Anywhere", rows], ...PLACES].flatMap(section));
  document.addEventListener("keydown", (event) => {
    const found = ANYWHERE.find((one) => isPressed(one, event));
    if (!found || event.defaultPrevented || isHeld(found, event.target)) return;
    if (acts[found.act]() !== false) event.preventDefault();
  });
}

function isPressed({ key, ctrl = false, alt = false }, event) {
  const isCtrl = event.ctrlKey || event.metaKey;
  const isShifted = key === "z" && event.shiftKey; // which means redo
  // With Option a Mac has other letters on its keys.
  const isKey = event.key.toLowerCase() === key.toLowerCase() || (alt && event.code === `Key${key.toUpperCase()}`);
  return isKey && isCtrl === ctrl && event.altKey === alt && !isShifted && !event.getModifierState("AltGraph");
}

/** Whether the key belongs to the place where it was pressed. */
function isHeld({ key, ctrl, act }, target) {
  if (document.querySelector("dialog[open]")) return true; // which closes by itself
  const isWriting = target.matches?.("input:not([type=radio], [type=checkbox]), textarea, select");
  return key !== "Escape" && isWriting && (!ctrl || act === "undo");
}

const section = ([title, rows]) => [
  make("h3", {}, title),
  make("dl", { class: "keys" }, ...rows.flatMap(([keys, what]) => [make("dt", {}, ...caps(keys)), make("dd", {}, what)])),
];

const caps = (keys) => keys.split(" ").flatMap((one, i) => [...(i ? [" "] : []), make("kbd", {}, one)]);
