// Parts of the panel that fold. What a plain file's cache consists of says little and is folded until somebody asks.

import { byId } from "../parts/dom.js";

const KEPT = "latentkv.folds";
const FOLDS = ["bytes", "plan-details"];

/** kind: "plain" or "latent". Each is as it was left for files of this kind. */
export function unfold(kind) {
  for (const id of FOLDS) {
    const fold = byId(id);
    fold.open = kept()[kind]?.[id] ?? kind === "latent";
    fold.querySelector("summary").onclick = () => keep(kind, id, !fold.open);
  }
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}

function keep(kind, id, isOpen) {
  const all = kept();
  all[kind] = { ...all[kind], [id]: isOpen };
  try {
    localStorage.setItem(KEPT, JSON.stringify(all));
  } catch {
    // it counts until the page is left
  }
}
