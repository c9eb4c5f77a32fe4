// Code with the name of its language and a button that copies it. Colours follow as soon as they are computed.

import { copied } from "./copy.js";
import { button, el } from "../parts/dom.js";
import { coloured } from "./colours.js";

const SHARE = 20; // while code grows, at most a twentieth of the time goes into drawing its colours

const blocks = new WeakMap(); // node → {text, language, code, isBusy: whether colours are being computed}

/** label: what the head says instead of the language. */
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

/** Makes the node of a block show a longer text. Returns false if the text does not continue the block's. */
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
  if (!nodes) return; // it stays busy, so that nobody asks again
  const start = performance.now();
  code.replaceChildren(...nodes, block.text.slice(text.length));
  const cost = performance.now() - start;
  setTimeout(() => {
    block.isBusy = false;
    if (block.text !== text) colour(block);
  }, SHARE * cost);
}
