// Colours for code. highlight.js runs in a worker, so that code which takes it long does not block the page. Its
// output is never parsed as HTML: only spans with its classes, and text, are read from it.

import { el } from "../parts/dom.js";

const LONGEST = 200_000; // characters; longer code has no colours
const PATIENCE = 4000; // ms
const PIECE = /<span class="([\w -]+)">|(<\/span>)|&(amp|lt|gt|quot|#x27);|([^<&]+)/gy;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'" };

let started; // a promise of the worker
let line = Promise.resolve(); // jobs run one after another

/** Resolves to nodes of the code, or to undefined where it has no colours. */
export async function coloured(text, language) {
  if (!language || language === "text" || text.length > LONGEST) return undefined;
  const job = line.then(() => highlighted(text, language));
  line = job;
  const html = await job;
  return html && nodes(html, text);
}

/** What the worker says; undefined if it does not know the language, does not start, or takes too long. */
async function highlighted(text, language) {
  const worker = await (started ??= start());
  if (!worker) {
    started = undefined; // the next block tries again
    return undefined;
  }
  return new Promise((resolve) => {
    const timer = setTimeout(() => {
      worker.terminate();
      started = undefined;
      resolve(undefined);
    }, PATIENCE);
    const end = (html) => (clearTimeout(timer), resolve(html));
    worker.onmessage = ({ data }) => end(data);
    worker.onerror = () => end(undefined);
    worker.postMessage({ text, language });
  });
}

/** Resolves to a worker that has said that it is there, or to undefined. */
function start() {
  const worker = new Worker(new URL("./colours_worker.js", import.meta.url), { type: "module" });
  return new Promise((resolve) => {
    worker.onmessage = () => resolve(worker);
    worker.onerror = () => resolve(undefined);
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
