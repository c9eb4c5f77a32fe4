// Code with the name of its language, a button that copies it, and colours, which follow when they are known.

import { copied } from "./copy.js";
import { button, el } from "../parts/dom.js";
import { coloured } from "./colours.js";

const SHARE = 20; // while it grows, drawing its colours takes a twentieth of the time at most

const blocks = new WeakMap(); // node → {text, language, code, isBusy: its colours are asked for}

/** label: said instead of the language, where there is something better to say. */
export function codeBlock(text, language = "", label = language) {
  const code = el("code", {}, text);
  const block = { text, language, code, isBusy: false };
  const copy = button("Copy", () => copied(block.text, copy));
  const head = el("div.code-head", {}, el("span", {}, label || "text"), copy);
  const node = el("div.code", {}, head, el("pre", { tabindex: "0" }, code));
  blocks.set(node, block);
  colour(block);
  return node;
}

/** Whether the node of a block could be made to show this text: one of the same language that goes on. */
export function grown(node, text, language = "") {
  const block = blocks.get(node);
  if (block?.language !== language || !text.startsWith(block.text)) return false;
  if (text === block.text) return true;
  block.code.append(text.slice(block.text.length));
  block.text = text;
  colour(block);
  return true;
}

async function colour(block) {
  if (block.isBusy) return;
  block.isBusy = true;
  const { text, language, code } = block;
  const nodes = await coloured(text, language);
  if (!nodes) return; // busy for good: it has none
  const start = performance.now();
  code.replaceChildren(...nodes, block.text.slice(text.length));
  const cost = performance.now() - start;
  setTimeout(() => {
    block.isBusy = false;
    if (block.text !== text) colour(block);
  }, SHARE * cost);
}
