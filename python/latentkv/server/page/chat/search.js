// Search in conversations: every word has to be in the title, a message or a file.

import { el } from "../parts/dom.js";

const BEFORE = 30; // characters of a passage before its hit
const LENGTH = 120;
const MOST = 2000; // marks in a conversation

/** A search as {all: a pattern for each word, any: one pattern for all of them}; undefined if there are no words. */
export function queryOf(text) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  if (!words.length) return undefined;
  const escaped = words.map((word) => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  escaped.sort((a, b) => b.length - a.length); // of two words that begin alike, the longer one wins
  return { all: escaped.map((word) => new RegExp(word, "iu")), any: new RegExp(escaped.join("|"), "giu") };
}

/** {passage} of a conversation that has all words, or undefined. */
export function found(conversation, title, query) {
  const texts = conversation.messages.flatMap(textsOf);
  const has = (pattern) => pattern.test(title) || texts.some((text) => pattern.test(text));
  if (!query.all.every(has)) return undefined;
  const text =
    texts.find((each) => hasAll(each, query)) ??
    texts.find((each) => query.all.some((pattern) => pattern.test(each)));
  return { passage: text && passage(text, query) };
}

const textsOf = ({ content, attachments = [] }) => [
  content,
  ...attachments.flatMap(({ name, text }) => [name, text]),
];

/** One line of text around a hit, if possible one that has all words near it. */
function passage(text, query) {
  const starts = Array.from(text.matchAll(query.any), ({ index }) => Math.max(0, index - BEFORE));
  const part = (start) => text.slice(start, start + LENGTH);
  const start = starts.find((each) => hasAll(part(each), query)) ?? starts[0];
  const line = part(start).replace(/\s+/g, " ").trim();
  return `${start ? "…" : ""}${line}${start + LENGTH < text.length ? "…" : ""}`;
}

const hasAll = (text, query) => query.all.every((pattern) => pattern.test(text));

/** The text as nodes, its hits in <mark>. */
export function marked(text, query) {
  const nodes = [];
  let end = 0;
  for (const { 0: hit, index } of query ? text.matchAll(query.any) : []) {
    nodes.push(text.slice(end, index), el("mark", {}, hit));
    end = index + hit.length;
  }
  return [...nodes, text.slice(end)].filter(Boolean);
}

/** Marks the hits in `box` without changing it. Returns the first whose paragraph has all words, or else the first:
 * a Range, or undefined. */
export function markIn(box, query) {
  const ranges = query ? rangesOf(box, query) : [];
  if (globalThis.Highlight) CSS.highlights.set("hit", new Highlight(...ranges));
  return ranges.find((each) => hasAll(blockOf(each).textContent, query)) ?? ranges[0];
}

const blockOf = ({ startContainer }) => startContainer.parentElement.closest("p, li, tr, pre, .text, h3, h4, h5, h6");

function rangesOf(box, query) {
  const ranges = [];
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  while (walker.nextNode() && ranges.length < MOST) {
    const node = walker.currentNode;
    if (!node.parentElement.closest(".text") || node.parentElement.closest(".katex-mathml, .code-head")) continue;
    for (const { 0: hit, index } of node.data.matchAll(query.any)) {
      const range = new Range();
      range.setStart(node, index);
      range.setEnd(node, index + hit.length);
      ranges.push(range);
    }
  }
  return ranges;
}
