// The clipboard, also on pages without TLS, where browsers hide its interface.

import { el } from "../parts/dom.js";

/** Copies, and says so on the button that was pressed. */
export async function copied(text, button) {
  const label = button.textContent;
  button.textContent = (await toClipboard(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = label), 1500);
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return bySelection(text);
  }
}

function bySelection(text) {
  const field = el("textarea.aside", { readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
