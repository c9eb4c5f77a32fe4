// Elements from names, attributes and children. Text becomes text nodes: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** el("a.wide", {href, onclick}, "text", node, …). Functions are listeners, true and false are presence. */
export function el(selector, attributes = {}, ...children) {
  const [name, ...classes] = selector.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  return filled(node, attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else if (typeof value === "boolean") node.toggleAttribute(key, value);
    else if (value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** A button with a word to read, or with a sign and the word for those who cannot see it. */
export function button(label, onclick, { sign, kind = "quiet" } = {}) {
  const named = sign ? { "aria-label": label, title: label } : {};
  return el(`button.${kind}`, { type: "button", onclick, ...named }, sign ?? label);
}
