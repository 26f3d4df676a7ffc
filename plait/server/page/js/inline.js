/** What stands inside a line: code, formulas, strong, emphasis, struck out, links. Links go to http and https only. */

import { make } from "./dom.js";
import { formula } from "./vendored.js";

const MAX_DEPTH = 5,
  MAX_LINK = 2048;
// Each alternative ends at its own closing mark or at a line's end of search, so a match is found in linear time.
const MARK = /`+|\*\*|__|\*|_|~~|\[|\\\(|\$\$?|https?:\/\/[^\s<>"'`]{1,2000}|\\[\\`*_{}[\]()#+\-.!|~>$]/g;
const WRAPS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

/** Nodes for one paragraph's text; its line breaks stay. */
export function inline(text, depth = 0) {
  const nodes = [],
    marks = new RegExp(MARK),
    missing = new Set();
  let from = 0,
    found;
  while (depth < MAX_DEPTH && (found = marks.exec(text))) {
    const made = mark(text, found, depth, missing);
    if (!made) continue;
    if (found.index > from) nodes.push(text.slice(from, found.index));
    nodes.push(made.node);
    from = marks.lastIndex = made.end;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

/** What begins at a mark, or null. A mark that has no partner is remembered: nobody looks for it twice. */
function mark(text, found, depth, missing) {
  const [sign] = found,
    at = found.index;
  if (sign === "\\(" && !missing.has(sign)) {
    const made = between(text, "\\)", at + 2);
    if (made) return made;
    missing.add(sign);
  }
  if (sign[0] === "\\") return { node: sign[1], end: at + 2 };
  if (sign[0] === "h") return address(sign, at);
  if (missing.has(sign)) return null;
  const made = madeOf(text, sign, at, depth);
  if (made === undefined) missing.add(sign);
  return made ?? null;
}

function madeOf(text, sign, at, depth) {
  if (sign[0] === "`") return code(text, sign, at);
  if (sign[0] === "$") return dollars(text, sign, at);
  return sign === "[" ? link(text, at, depth) : wrap(text, sign, at, depth);
}

/** A formula between dollars. Prices are none: no space after the first or before the last, no digit behind it. */
function dollars(text, sign, at) {
  const begin = at + sign.length,
    end = text.indexOf(sign, begin + 1);
  if (end < 0) return undefined;
  const isPrice = /\s/.test(text[begin]) || /\s/.test(text[end - 1]) || /\d/.test(text[end + sign.length] ?? "");
  return sign === "$" && isPrice ? null : between(text, sign, begin);
}

function between(text, mark, begin) {
  const end = text.indexOf(mark, begin);
  if (end <= begin) return null;
  return { node: formula(text.slice(begin, end).trim(), mark === "$$"), end: end + mark.length };
}

function code(text, sign, at) {
  const end = text.indexOf(sign, at + sign.length);
  if (end < 0) return undefined;
  return { node: make("code", {}, text.slice(at + sign.length, end).trim() || " "), end: end + sign.length };
}

function wrap(text, sign, at, depth) {
  const begin = at + sign.length,
    before = text[at - 1] ?? " ";
  if (/\s/.test(text[begin] ?? " ") || (sign[0] === "_" && /\w/.test(before))) return null;
  let end = text.indexOf(sign, begin + 1);
  if (end < 0) return undefined;
  if (sign.length === 1 && text[end + 1] === sign) end = text.indexOf(sign, end + 2);
  if (end < 0 || /\s/.test(text[end - 1])) return null;
  const inner = inline(text.slice(begin, end), depth + 1);
  return { node: make(WRAPS[sign], {}, ...inner), end: end + sign.length };
}

function link(text, at, depth) {
  const middle = text.indexOf("](", at);
  if (middle < 0) return undefined;
  const end = text.indexOf(")", middle);
  if (end < 0) return undefined;
  const target = text
    .slice(middle + 2, end)
    .trim()
    .split(/\s/)[0];
  const label = text.slice(at + 1, middle);
  if (label.includes("[") || !isSafe(target)) return null;
  return { node: anchor(target, inline(label, depth + 1)), end: end + 1 };
}

function address(found, at) {
  const target = found.replace(/[.,;:!?)\]]+$/, "");
  return isSafe(target) ? { node: anchor(target, [target]), end: at + target.length } : null;
}

const anchor = (href, inner) =>
  make("a", { href, rel: "noopener noreferrer nofollow", target: "_blank" }, ...inner);

/** Only addresses of the web: never script, data, files, or a path of this server. */
export function isSafe(target) {
  if (target.length > MAX_LINK || !/^https?:\/\//i.test(target)) return false;
  return URL.canParse ? URL.canParse(target) : true;
}
