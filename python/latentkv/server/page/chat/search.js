// Search in conversations: every word has to be in the title or in a message. Hits are marked, nothing is parsed.

import { el } from "../parts/dom.js";

const BEFORE = 30; // characters of a passage before its hit
const LENGTH = 120;

/** Words of a search, as {all: [pattern of each], any: pattern of them all}; undefined for an empty one. */
export function queryOf(text) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  if (!words.length) return undefined;
  const escaped = words.map((word) => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  escaped.sort((a, b) => b.length - a.length); // the longer of two words that begin alike
  return { all: escaped.map((word) => new RegExp(word, "iu")), any: new RegExp(escaped.join("|"), "giu") };
}

/** Whether the conversation has all words, and a passage with the first of them: undefined, or {passage}. */
export function found(conversation, title, query) {
  const texts = conversation.messages.flatMap(textsOf);
  const has = (pattern) => pattern.test(title) || texts.some((text) => pattern.test(text));
  if (!query.all.every(has)) return undefined;
  const text = texts.find((each) => query.all.some((pattern) => pattern.test(each)));
  return { passage: text && passage(text, query) };
}

const textsOf = ({ content, attachments = [] }) => [
  content,
  ...attachments.flatMap(({ name, text }) => [name, text]),
];

/** Some characters around the first hit, on one line. */
function passage(text, query) {
  const start = Math.max(0, text.search(query.any) - BEFORE);
  const part = text.slice(start, start + LENGTH).replace(/\s+/g, " ");
  return `${start ? "…" : ""}${part.trim()}${start + LENGTH < text.length ? "…" : ""}`;
}

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

/** Marks the hits in `box` without changing it, and returns the first: a Range, or undefined. */
export function markIn(box, query) {
  const ranges = query ? rangesOf(box, query) : [];
  if (globalThis.Highlight) CSS.highlights.set("hit", new Highlight(...ranges));
  return ranges[0];
}

function rangesOf(box, query) {
  const ranges = [];
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const { 0: hit, index } of node.data.matchAll(query.any)) {
      const range = new Range();
      range.setStart(node, index);
      range.setEnd(node, index + hit.length);
      ranges.push(range);
    }
  }
  return ranges;
}
