// The conversations at the left: choose, rename, delete, export, import.

import { button, byId, el } from "../parts/dom.js";
import { failed, notice } from "../parts/notice.js";
import * as store from "./store.js";

export const titleOf = (conversation) => conversation.title || "New conversation";

/** shown: the open conversation. on: {choose(conversation), removed(conversation), changed()}. */
export function list(shown, isBusy, on) {
  const rows = store.all().map((each) => row(each, each === shown, isBusy(each.id), on));
  byId("conversations").replaceChildren(...rows);
  byId("no-conversations").hidden = rows.length > 0;
  byId("export").disabled = !rows.length;
}

function row(conversation, isShown, isAnswering, on) {
  const title = titleOf(conversation);
  const open = el("button.title", { type: "button", "aria-current": isShown ? "true" : null, title }, title);
  open.addEventListener("click", () => on.choose(conversation));
  const item = el("li", {}, open);
  if (isAnswering) item.append(el("span.busy", { role: "img", "aria-label": "answering" }));
  item.append(
    el(
      "span.tools",
      {},
      button(`Rename ${title}`, () => rename(item, conversation, on), { sign: "✎" }),
      button(`Export ${title}`, () => download([conversation]), { sign: "↓" }),
      button(`Delete ${title}`, () => remove(conversation, on), { sign: "×" }),
    ),
  );
  return item;
}

function rename(item, conversation, on) {
  const field = el("input", { type: "text", "aria-label": "Name of the conversation", maxlength: "120" });
  field.value = titleOf(conversation);
  let isOver = false;
  const end = (isKept) => {
    if (isOver) return;
    isOver = true;
    if (isKept && field.value.trim()) {
      conversation.title = field.value.trim();
      try {
        store.save(conversation);
      } catch (error) {
        failed(error);
      }
    }
    on.changed();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") {
      event.stopPropagation();
      end(event.key === "Enter");
    }
  });
  field.addEventListener("blur", () => end(true));
  item.replaceChildren(field);
  field.select();
}

function remove(conversation, on) {
  store.remove(conversation);
  on.removed(conversation);
  const undo = () => {
    store.restore(conversation);
    on.changed();
  };
  notice(`Deleted “${titleOf(conversation)}”.`, { action: { label: "Undo", run: undo } });
}

export function download(conversations) {
  const url = URL.createObjectURL(new Blob([store.exported(conversations)], { type: "application/json" }));
  const day = new Date().toISOString().slice(0, 10);
  el("a", { href: url, download: `conversations-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export async function upload(file, on) {
  try {
    const count = store.imported(await file.text());
    notice(`Imported ${count === 1 ? "one conversation" : `${count} conversations`}.`);
    on.changed();
  } catch (error) {
    failed(error);
  }
}
