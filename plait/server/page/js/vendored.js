/**
 * Colours of code by highlight.js and formulas by KaTeX, both part of this server and loaded when a text first
 * needs one. Text that is too long, or of a language that is not known, stays as it is.
 */

import { make } from "./dom.js";

const MAX_CODE = 30_000, // characters: more would hold up the page
  MAX_FORMULA = 2000;
// What KaTeX may do: no links or files, nothing larger than a page, macros that end.
const LIMITS = { throwOnError: true, trust: false, strict: "ignore", maxExpand: 500, maxSize: 20, output: "html" };

const loaded = {};

/** Load a library once. `name`: its key here; a library that does not load is as if it were absent. */
function library(name, load) {
  loaded[name] ??= { library: null, ready: load() };
  const one = loaded[name];
  one.ready = one.ready.then(
    (found) => (one.library = found ?? one.library),
    () => null,
  );
  return one;
}

/** Do something with a library, at once if it is here already. */
function use(name, load, act) {
  const one = library(name, load);
  if (one.library) act(one.library);
  else one.ready.then((found) => found && act(found));
}

const highlighter = async () => (await import("../vendor/highlight.min.js")).default;

async function formulas() {
  document.head.append(make("link", { rel: "stylesheet", href: "page/vendor/katex.min.css" }));
  await import("../vendor/katex.min.js");
  return self.katex;
}

/** Colour what is in `node`, which shows `text`. */
export function colour(node, text, language) {
  if (!language || text.length > MAX_CODE) return;
  use("highlight", highlighter, (hljs) => {
    if (!hljs.getLanguage(language)) return;
    const { _emitter: found } = hljs.highlight(text, { language, ignoreIllegals: true });
    const nodes = found.rootNode.children.map(nodeOf);
    node.replaceChildren(...nodes);
  });
}

/** The library's tree as nodes: its own way is a text of markup, which this page never makes. */
function nodeOf(found) {
  if (typeof found === "string") return document.createTextNode(found);
  const scope = (found.scope ?? "").split(".")[0].replace(/[^a-z]+/g, "-");
  return make("span", { class: `hl-${scope}` }, ...found.children.map(nodeOf));
}

/** A formula in TeX: set when the library is here, and the text until then. */
export function formula(text, isDisplay) {
  const node = make("span", { class: isDisplay ? "formula shown" : "formula" }, text);
  if (text.length > MAX_FORMULA) return node;
  use("katex", formulas, (katex) => {
    try {
      katex.render(text, node, { ...LIMITS, displayMode: isDisplay });
    } catch {
      node.textContent = text; // no TeX, or not yet
    }
  });
  return node;
}
