// Colours of code, by highlight.js in a worker: code that takes it long keeps no page waiting, and none but its own
// block without colours. Its HTML is not parsed as such: spans of its classes and text are all that is read from it.

import { el } from "../parts/dom.js";

const LONGEST = 200_000; // characters; longer code has no colours
const PATIENCE = 4000; // ms
const PIECE = /<span class="([\w -]+)">|(<\/span>)|&(amp|lt|gt|quot|#x27);|([^<&]+)/gy;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'" };

let worker;
let line = Promise.resolve(); // one job after another

/** Resolves to nodes of the code, or to undefined where it has no colours. */
export async function coloured(text, language) {
  if (!language || language === "text" || text.length > LONGEST) return undefined;
  const job = line.then(() => highlighted(text, language));
  line = job;
  const html = await job;
  return html && nodes(html, text);
}

/** The worker's HTML; undefined if it does not know the language, does not start, or takes too long. */
function highlighted(text, language) {
  worker ??= new Worker(new URL("./colours_worker.js", import.meta.url), { type: "module" });
  return new Promise((resolve) => {
    const giveUp = () => {
      worker.terminate();
      worker = undefined;
      resolve(undefined);
    };
    const timer = setTimeout(giveUp, PATIENCE);
    worker.onerror = () => (clearTimeout(timer), giveUp());
    worker.onmessage = ({ data }) => (clearTimeout(timer), resolve(data));
    worker.postMessage({ text, language });
  });
}

function nodes(html, text) {
  const root = el("code");
  const open = [root];
  let end = 0;
  for (const { 0: piece, 1: kind, 2: closes, 3: entity, 4: plain } of html.matchAll(PIECE)) {
    end += piece.length;
    if (kind) open.push(open.at(-1).appendChild(el("span", { class: kind })));
    else if (!closes) open.at(-1).append(entity ? ENTITIES[entity] : plain);
    else if (open.length > 1) open.pop();
  }
  root.normalize();
  const isWhole = end === html.length && open.length === 1 && root.textContent === text;
  return isWhole ? [...root.childNodes] : undefined;
}
