// The conversations at the left: search, choose, rename, delete, export, import.

import { button, byId, el } from "../parts/dom.js";
import { failed, notice } from "../parts/notice.js";
import { found, marked, queryOf } from "./search.js";
import * as store from "./store.js";

export const titleOf = (conversation) => conversation.title || "New conversation";

/** What is searched for, or undefined. */
export const searched = () => queryOf(byId("search").value);

/** Those that have what is searched for. shown: the open conversation. on: {choose(conversation, query),
 * removed(conversation), changed()}. */
export function list(shown, isBusy, on) {
  const query = searched();
  const all = store.all();
  const hits = all.flatMap((each) => {
    const hit = query ? found(each, titleOf(each), query) : {};
    return hit ? [{ conversation: each, passage: hit.passage }] : [];
  });
  const row = ({ conversation, passage }) =>
    entry(conversation, { query, passage, isShown: conversation === shown, isAnswering: isBusy(conversation.id) }, on);
  byId("conversations").replaceChildren(...hits.map(row));
  const count = hits.length === 1 ? "1 conversation" : `${hits.length} conversations`;
  byId("found").textContent = query ? `${count} found` : "";
  byId("no-conversations").hidden = hits.length > 0;
  byId("no-conversations").textContent = all.length ? "Nothing found." : "Conversations stay in this browser.";
  byId("searching").hidden = !all.length;
  byId("export").disabled = !all.length;
}

function entry(conversation, { query, passage, isShown, isAnswering }, on) {
  const title = titleOf(conversation);
  const open = el(
    "button.title",
    { type: "button", "aria-current": isShown ? "true" : null, title },
    el("span.name", {}, ...marked(title, query)),
    passage && el("span.passage", {}, ...marked(passage, query)),
  );
  open.addEventListener("click", () => on.choose(conversation, query));
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
