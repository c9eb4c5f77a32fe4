// Code with the name of its language, a button that copies it, and colours. While it grows, its colours take a
// small share of the time.

import { copied } from "./copy.js";
import { button, el } from "../parts/dom.js";
import { coloured, coloursOf } from "./colours.js";

const SHARE = 20; // a twentieth of the time at most

const blocks = new WeakMap(); // node → {text, language, code, cost, painted, timer}

/** label: said instead of the language, where there is something better to say. */
export function codeBlock(text, language = "", label = language) {
  const code = el("code");
  const block = { text, language, code, cost: 0, painted: 0 };
  const copy = button("Copy", () => copied(block.text, copy));
  const head = el("div.code-head", {}, el("span", {}, label || "text"), copy);
  const node = el("div.code", {}, head, el("pre", { tabindex: "0" }, code));
  blocks.set(node, block);
  paint(block);
  return node;
}

/** Whether the node of a block could be made to show this text: one of the same language that goes on. */
export function grown(node, text, language = "") {
  const block = blocks.get(node);
  if (block?.language !== language || !text.startsWith(block.text)) return false;
  const more = text.slice(block.text.length);
  block.text = text;
  const wait = block.painted + SHARE * block.cost - performance.now();
  if (wait <= 0) {
    paint(block);
  } else if (more) {
    block.code.append(more);
    block.timer ??= setTimeout(() => paint(block), wait);
  }
  return true;
}

function paint(block) {
  clearTimeout(block.timer);
  block.timer = undefined;
  const start = performance.now();
  const { text, language, code } = block;
  const isColoured = coloursOf(language, () => paint(block));
  code.replaceChildren(...(isColoured ? coloured(text, language) : [text]));
  block.painted = performance.now();
  block.cost = block.painted - start;
}
