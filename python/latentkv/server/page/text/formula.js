// A formula, set by KaTeX once that is here; until then, and where it cannot be set, its source is text.

import { el } from "../parts/dom.js";

const LONGEST = 10000; // characters
const KEPT = 300; // formulas, for those of a growing answer that are drawn again with every word
const OPTIONS = {
  ...{ throwOnError: false, trust: false, strict: "ignore", maxSize: 20, maxExpand: 1000 },
  errorColor: "var(--wrong)",
};

let katex;
let loading;
const kept = new Map();

/** A node for {source, tex, isDisplay}. */
export function formula({ source, tex, isDisplay }) {
  const node = el(isDisplay ? "span.formula.display" : "span.formula", {}, source);
  if (tex.length > LONGEST) return node;
  if (katex) typeset(node, tex, isDisplay);
  else load().then(() => katex && typeset(node, tex, isDisplay));
  return node;
}

/** KaTeX's tree becomes nodes without passing through HTML. */
function typeset(node, tex, isDisplay) {
  const key = `${isDisplay} ${tex}`;
  try {
    const tree = kept.get(key) ?? plain(katex.__renderToDomTree(tex, { ...OPTIONS, displayMode: isDisplay }));
    kept.set(key, tree);
    if (kept.size > KEPT) kept.delete(kept.keys().next().value);
    node.replaceChildren(tree.toNode());
  } catch (error) {
    node.title = error.message; // nested too deep: the source stays
  }
}

/** The page's policy allows no style attributes; those that KaTeX writes are of boxes and errors, see formula.css. */
function plain(tree) {
  const left = [tree];
  while (left.length) {
    const each = left.pop();
    if (each.attributes) delete each.attributes.style;
    left.push(...(each.children ?? []));
  }
  return tree;
}

function load() {
  loading ??= Promise.all([import("../vendor/katex/katex.min.js"), styled("../vendor/katex/katex.min.css")]).then(
    () => (katex = globalThis.katex),
    () => (loading = undefined), // the next formula tries again
  );
  return loading;
}

function styled(path) {
  const sheet = el("link", { rel: "stylesheet", href: new URL(path, import.meta.url).href });
  return new Promise((resolve, reject) => {
    sheet.onload = resolve;
    sheet.onerror = () => (sheet.remove(), reject(new Error(path)));
    document.head.append(sheet);
  });
}
