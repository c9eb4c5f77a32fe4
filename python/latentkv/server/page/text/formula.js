// A formula, typeset by KaTeX. Until KaTeX is loaded, and where it fails, the source is shown as text.

import { el } from "../parts/dom.js";

const LONGEST = 10000; // characters
const KEPT = 300; // formulas; the last paragraph of a growing answer is drawn again with every word
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

/** Builds nodes from KaTeX's tree, without a detour through HTML. */
function typeset(node, tex, isDisplay) {
  const key = `${isDisplay} ${tex}`;
  try {
    const tree = kept.get(key) ?? plain(katex.__renderToDomTree(tex, { ...OPTIONS, displayMode: isDisplay }));
    kept.set(key, tree);
    if (kept.size > KEPT) kept.delete(kept.keys().next().value);
    node.replaceChildren(tree.toNode());
  } catch (error) {
    node.title = error.message; // for instance nested too deep; the source stays
  }
}

/** Drops style attributes, which the page's policy forbids. KaTeX writes them for boxes and errors only; formula.css
 * has the colour of errors. */
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
