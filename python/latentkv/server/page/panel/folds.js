// The parts of the panel that fold. For a plain file they say little and are folded at first.

import { byId } from "../parts/dom.js";

const KEPT = "latentkv.folds";
const FOLDS = ["bytes", "plan-details"];

/** kind: "plain" or "latent". Every part is as it was left the last time a file of this kind was served. */
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
