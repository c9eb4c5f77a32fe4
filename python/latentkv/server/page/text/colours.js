// Colours of code, by highlight.js once that is here. Its HTML is not parsed as such: spans of its classes and
// text are all that is read from it.

import { el } from "../parts/dom.js";

const LONGEST = 100_000; // characters; longer code stays as it is
const PIECE = /<span class="([\w -]+)">|(<\/span>)|&(amp|lt|gt|quot|#x27);|([^<&]+)/gy;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'" };

let library;
let loading;

/** Whether colours for the language may come, now or when `then` is called. Code without a language has none. */
export function coloursOf(language, then) {
  if (!language || language === "text") return false;
  if (library) return Boolean(library.getLanguage(language));
  loading ??= import("../vendor/highlight/highlight.min.js").then(
    (found) => (library = found.default),
    () => (loading = undefined), // the next block tries again
  );
  loading.then(() => library && then());
  return false;
}

/** Nodes of the code, for a language that has colours. */
export function coloured(text, language) {
  if (text.length > LONGEST) return [text];
  const { value } = library.highlight(text, { language, ignoreIllegals: true });
  const root = el("code");
  const open = [root];
  let end = 0;
  for (const { 0: piece, 1: kind, 2: closes, 3: entity, 4: plain } of value.matchAll(PIECE)) {
    end += piece.length;
    if (kind) open.push(open.at(-1).appendChild(el("span", { class: kind })));
    else if (closes) open.pop();
    else open.at(-1).append(entity ? ENTITIES[entity] : plain);
  }
  root.normalize();
  return end === value.length && open.length === 1 && root.textContent === text ? [...root.childNodes] : [text];
}
