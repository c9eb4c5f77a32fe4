// The search field above the conversations. Ctrl-K or / go there, arrow keys to the results, Escape back to the chat.

import { byId } from "../parts/dom.js";
import { openSide } from "../parts/sides.js";

/** on: {changed(): the words have changed, left(): the search is over}. */
export function buildSearch(on) {
  const field = byId("search");
  if (/Mac|iP(hone|ad)/.test(navigator.platform)) field.nextElementSibling.textContent = "⌘ K";
  field.addEventListener("input", on.changed);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      field.value = "";
      on.changed();
      on.left();
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (field.value.trim()) rows()[0]?.click();
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      rows()[0]?.focus();
    }
  });
  byId("conversations").addEventListener("keydown", walk);
  document.addEventListener("keydown", (event) => {
    if (isCalled(event) && !document.querySelector("dialog[open]") && !byId("searching").hidden) {
      event.preventDefault();
      openSide("list");
      field.focus();
      field.select();
    }
  });
}

const rows = () => [...byId("conversations").querySelectorAll("button.title")];

function walk(event) {
  const at = rows().indexOf(document.activeElement);
  if (at < 0 || !["ArrowDown", "ArrowUp"].includes(event.key)) return;
  event.preventDefault();
  const next = event.key === "ArrowDown" ? rows()[at + 1] : (rows()[at - 1] ?? byId("search"));
  next?.focus();
}

function isCalled({ key, ctrlKey, metaKey, altKey, target }) {
  if (key.toLowerCase() === "k") return (ctrlKey || metaKey) && !altKey;
  return key === "/" && !ctrlKey && !metaKey && !target.closest("input, textarea");
}
