/**
 * Markdown as nodes: paragraphs, headings, lists, quotes, code, formulas, tables. Anything else stays the text it is.
 *
 * No markup is ever made from text. Each line is looked at a bounded number of times, and nesting ends at a
 * depth, so a reply that was written to be slow to read is not.
 */

import { make, copyButton } from "./dom.js";
import { inline } from "./inline.js";
import { colour, formula } from "./vendored.js";

const MAX_DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const FORMULA = /^ {0,3}(?:\$\$|\\\[)(.*)$/,
  FORMULA_LINES = 100;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;

/** The blocks of a text: {kind, raw, ...}. Equal `raw` means an equal block, which need not be drawn again. */
export function blocks(text) {
  const lines = text.split("\n"),
    found = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at++;
      continue;
    }
    const block =
      fenced(lines, at) ??
      formulated(lines, at) ??
      single(lines, at) ??
      quoted(lines, at) ??
      listed(lines, at) ??
      tabled(lines, at) ??
      paragraph(lines, at);
    block.raw = block.kind + lines.slice(at, block.end).join("\n");
    found.push(block);
    at = block.end;
  }
  return found;
}

/** Draws a text that grows: only blocks that changed are made again. */
export class Markdown {
  constructor(node) {
    this.node = node;
    this.shown = [];
  }

  show(text) {
    const next = blocks(text);
    let same = 0;
    while (same < next.length && same < this.shown.length && next[same].raw === this.shown[same].raw) same++;
    for (const old of this.shown.splice(same)) old.node.remove();
    for (const block of next.slice(same)) {
      const node = drawn(block, 0);
      this.node.append(node);
      this.shown.push({ raw: block.raw, node });
    }
  }
}

function drawn(block, depth) {
  switch (block.kind) {
    case "code":
      return code(block);
    case "formula":
      return make("p", { class: "formula-block", tabindex: "0" }, formula(block.text, true));
    case "heading":
      return make(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...nested(block.text, depth));
    case "list":
      return list(block, depth);
    case "table":
      return table(block);
    default:
      return make("p", {}, ...inline(block.text));
  }
}

function nested(text, depth) {
  if (depth >= MAX_DEPTH) return [make("p", {}, ...inline(text))];
  return blocks(text).map((block) => drawn(block, depth + 1));
}

function code({ text, language }) {
  const button = copyButton("Copy code", () => text);
  const head = make(
    "div",
    { class: "code-head" },
    make("span", { class: "small" }, language || "code"),
    button,
  );
  const inner = make("code", {}, text);
  colour(inner, text, language.toLowerCase());
  return make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, inner));
}

function list({ items, start, isLoose }, depth) {
  const node = make(start === null ? "ul" : "ol", start > 1 ? { start } : {});
  for (const item of items) {
    const inner = nested(item, depth);
    if (!isLoose && inner[0]?.tagName === "P") inner[0] = make("span", {}, ...inner[0].childNodes);
    node.append(make("li", {}, ...inner));
  }
  return node;
}

function table({ head, rows, aligned }) {
  const cells = (name, row) =>
    head.map((_, i) => {
      const cell = make(name, {}, ...inline(row[i] ?? ""));
      if (aligned[i]) cell.classList.add(aligned[i]);
      return cell;
    });
  const body = rows.map((row) => make("tr", {}, ...cells("td", row)));
  const top = make("thead", {}, make("tr", {}, ...cells("th", head)));
  return make("div", { class: "table", tabindex: "0" }, make("table", {}, top, make("tbody", {}, ...body)));
}

function fenced(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const mark = open[1];
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end++;
  const text = lines.slice(at + 1, end).join("\n");
  return { kind: "code", text, language: open[2].trim().split(" ")[0], end: Math.min(end + 1, lines.length) };
}

/** A formula on lines of its own, between $$ and $$ or \[ and \]; one without an end is text. */
function formulated(lines, at) {
  const open = FORMULA.exec(lines[at]);
  if (!open) return null;
  const mark = lines[at].trimStart().startsWith("$$") ? "$$" : "\\]",
    inner = [];
  const last = Math.min(lines.length, at + FORMULA_LINES);
  for (let end = at, line = open[1]; end < last; line = lines[++end] ?? "") {
    const close = line.indexOf(mark);
    if (close >= 0 && line.slice(close + 2).trim() !== "") return null;
    inner.push(close < 0 ? line : line.slice(0, close));
    if (close >= 0) return { kind: "formula", text: inner.join("\n").trim(), end: end + 1 };
  }
  return null;
}

function closes(line, mark) {
  const bare = line.trim();
  return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
}

function single(lines, at) {
  if (RULE.test(lines[at])) return { kind: "rule", end: at + 1 };
  const heading = HEADING.exec(lines[at]);
  if (!heading) return null;
  return { kind: "heading", level: heading[1].length, text: heading[2].replace(/ #+ *$/, ""), end: at + 1 };
}

function quoted(lines, at) {
  let end = at;
  const inner = [];
  for (let found; end < lines.length && (found = QUOTE.exec(lines[end])); end++) inner.push(found[1]);
  return end === at ? null : { kind: "quote", text: inner.join("\n"), end };
}

/** Items at one indentation; deeper lines belong to the item above them. */
function listed(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const indent = first[1].length,
    isNumbered = /\d/.test(first[2]),
    items = [];
  let end = at,
    isLoose = false;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length !== indent || /\d/.test(item[2]) !== isNumbered) break;
    const inner = [item[4]];
    let next = end + 1;
    for (; next < lines.length && belongs(lines, next, indent); next++)
      inner.push(outdented(lines[next], item));
    while (inner.length && inner.at(-1).trim() === "") {
      inner.pop();
      isLoose ||= Boolean(ITEM.test(lines[next] ?? ""));
    }
    items.push(inner.join("\n"));
    end = next;
  }
  return { kind: "list", items, start: isNumbered ? parseInt(first[2], 10) : null, isLoose, end };
}

function belongs(lines, at, indent) {
  const line = lines[at];
  if (line.trim() === "")
    return at + 1 < lines.length && (depthOf(lines[at + 1]) > indent || ITEM.test(lines[at + 1]));
  return depthOf(line) > indent || (!ITEM.test(line) && lines[at - 1].trim() !== "" && !FENCE.test(line));
}

const depthOf = (line) => line.length - line.trimStart().length;

function outdented(line, item) {
  const width = item[1].length + item[2].length + 1;
  return line.slice(Math.min(width, depthOf(line)));
}

function tabled(lines, at) {
  if (!lines[at].includes("|") || !TABLE_RULE.test(lines[at + 1] ?? "")) return null;
  const head = cellsOf(lines[at]);
  const aligned = cellsOf(lines[at + 1]).map((mark) =>
    mark.endsWith(":") ? (mark[0] === ":" ? "middle" : "end") : "",
  );
  let end = at + 2;
  const rows = [];
  for (; end < lines.length && lines[end].includes("|"); end++) rows.push(cellsOf(lines[end]));
  return { kind: "table", head, rows, aligned, end };
}

const cellsOf = (line) =>
  line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split("|")
    .map((cell) => cell.trim());

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !interrupts(lines[end])) end++;
  return { kind: "text", text: lines.slice(at, end).join("\n"), end };
}

const interrupts = (line) =>
  FENCE.test(line) ||
  FORMULA.test(line) ||
  HEADING.test(line) ||
  RULE.test(line) ||
  QUOTE.test(line) ||
  /^ {0,3}(?:[-*+]|1[.)]) /.test(line);
