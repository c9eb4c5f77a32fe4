// Attachments as chips: name and size, which open the text, and a cross that removes it.

import { button, byId, el } from "../parts/dom.js";
import { bytes } from "../parts/units.js";
import { codeBlock } from "../text/code_block.js";
import { languageOf, sizeOf } from "./attachments.js";

/** remove(attachment) is called by the cross; without it there is no cross. */
export function chip(attachment, remove) {
  const { name } = attachment;
  const open = el(
    "button.chip-open",
    { type: "button", title: `Show ${name}`, onclick: () => show(attachment) },
    el("span.chip-name", {}, name),
    el("span.chip-size", {}, bytes(sizeOf(attachment))),
  );
  const cross = remove && button(`Remove ${name}`, () => remove(attachment), { sign: "×" });
  return el("li.chip", {}, open, cross);
}

/** Fills a list with chips, and hides it if there are none. */
export function showChips(list, attachments = [], remove) {
  list.replaceChildren(...attachments.map((each) => chip(each, remove)));
  list.hidden = !attachments.length;
}

function show({ name, text }) {
  const dialog = byId("attachment");
  byId("attachment-name").textContent = name;
  const block = codeBlock(text, languageOf(name) || "text");
  byId("attachment-text").replaceChildren(block);
  dialog.showModal();
}
