/** Elements without markup: text only ever becomes text nodes, so nothing a model writes can become code. */

const SVG = "http://www.w3.org/2000/svg";

/** A new element. Settings: `onclick` and the like are listeners, true and false are flags, the rest attributes. */
export function make(name, settings = {}, ...children) {
  return fill(document.createElement(name), settings, children);
}

/** The same for drawings. */
export function draw(name, settings = {}, ...children) {
  return fill(document.createElementNS(SVG, name), settings, children);
}

export const byId = (id) => document.getElementById(id);

function fill(node, settings, children) {
  for (const [key, value] of Object.entries(settings)) {
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const ICONS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h10",
  sliders: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5v5M8 14.5v5",
  pulse: "M3 12h4l3-8 4 16 3-8h4",
  up: "M12 19V5M6 11l6-6 6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  stop: "M7 7h10v10H7z",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l4.5 4.5L19 7.5",
  again: "M20 11a8 8 0 1 0-2.3 6.7M20 4v7h-7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  tokens: "M4 6h6v5H4zM14 6h6v5h-6zM4 14h9v5H4zM17 14h3v5h-3z",
  fork: "M6 4v16M6 14c0-5 12-2 12-8M14.5 8.5L18 5l3.5 3.5",
  before: "M14 6l-6 6 6 6",
  after: "M10 6l6 6-6 6",
  clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.7 4.7l-8.5 8.5a1.6 1.6 0 0 1-2.3-2.3L14.5 7",
  columns: "M4 5h7v14H4zM13 5h7v14h-7z",
  folder: "M3.5 6h6l2 2.5h9v10h-17z",
  "folder-new": "M3.5 6h6l2 2.5h9v10h-17zM12 11v5M9.5 13.5h5",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  load: "M12 16V5M7 10l5-5 5 5M5 20h14",
  tool: "M14 7a4 4 0 0 1 5-3l-3 3 1 2 2 1 3-3a4 4 0 0 1-5 5L9 20a2 2 0 0 1-4-4l8-7",
};

/** An icon that says nothing to a screen reader: the button around it has a name. */
export function icon(name) {
  const path = draw("path", { d: ICONS[name] });
  return draw("svg", { viewBox: "0 0 24 24", class: "glyph", "aria-hidden": "true" }, path);
}

/** A button with an icon; `label` is its name and its tooltip. */
export function iconButton(name, label, onclick, more = {}) {
  const settings = { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...more };
  return make("button", settings, icon(name));
}

/** Put icons where the page asks for them. */
export function placeIcons(root) {
  for (const place of root.querySelectorAll("[data-icon]")) place.replaceWith(icon(place.dataset.icon));
}

/** Copy text, also where the clipboard is closed because the page did not come over HTTPS. */
async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = make("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text()` returns, and says that it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("check"));
    say("Copied");
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

/** Have a screen reader say something, without moving the focus. */
export function say(text) {
  const place = byId("said");
  place.textContent = "";
  setTimeout(() => {
    place.textContent = text;
  }, 50);
}
