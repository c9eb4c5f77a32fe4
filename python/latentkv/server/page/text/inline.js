// Markdown inside a line: code, formulas, links, emphasis, strikethrough. Builds nodes; HTML in the text stays text.

import { el } from "../parts/dom.js";
import { formula } from "./formula.js";
import { formulaAt } from "./tex.js";

const ESCAPED = /^\\([!-/:-@[-`{-~])/;
const CODE = /^(`+)(?!`)/;
const LABEL = /\[((?:\\.|[^\\\]\n]){0,400})\]/;
const TARGET = /\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*){0,4})>?(?:\s+"[^"\n]{0,200}")?\s*\)/;
const LINK = new RegExp(`^(!?)${LABEL.source}${TARGET.source}`);
const AUTO = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/;
const BARE = /^https?:\/\/[^\s<>"'`]{1,2000}/;
const BREAK = /^(?: {2,}|\\)?\n|^<br\s?\/?>/; // tables have no other way to a second line than <br>
const RUN = /^(\*+|_+|~~)/;
const PLAIN = /^[^\\`$!\[<h\n*_~ ]+|^ +(?!\n| )/;

/** Nodes of a text. */
export function inline(text) {
  return nested(tokens(text));
}

function tokens(text) {
  const found = [];
  for (let at = 0; at < text.length; ) {
    const [token, length] = next(text, at);
    found.push(token);
    at += length;
  }
  return found;
}

/** [a node, a text, or a run of delimiters; how many characters it took] */
function next(text, at) {
  const rest = text.slice(at, at + 4096);
  let match = PLAIN.exec(rest);
  if (match) return [match[0], match[0].length];
  if ((match = formulaAt(rest, text[at - 1]))) return [formula(match), match.source.length];
  if ((match = ESCAPED.exec(rest))) return [match[1], 2];
  if ((match = CODE.exec(rest))) return code(text, at, match[1]);
  if ((match = BREAK.exec(rest))) return [el("br"), match[0].length];
  if ((match = AUTO.exec(rest))) return [link(match[1], [match[1]]), match[0].length];
  if ((match = LINK.exec(rest))) {
    const [all, isImage, label, target] = match;
    return [link(target, isImage ? [label] : inline(label)), all.length];
  }
  if ((match = BARE.exec(rest)) && !/\w/.test(text[at - 1] ?? "")) {
    const url = trimmed(match[0]);
    return [link(url, [url]), url.length];
  }
  if ((match = RUN.exec(rest))) return [run(text, at, match[1]), match[1].length];
  return [text[at], 1];
}

function code(text, at, fence) {
  for (let end = at; (end = text.indexOf(fence, end + fence.length)) >= 0; ) {
    const length = /^`+/.exec(text.slice(end, end + 256))[0].length;
    if (length === fence.length) {
      const inside = text.slice(at + length, end).replaceAll("\n", " ");
      const bare = /^ .*[^ ].* $/.test(inside) ? inside.slice(1, -1) : inside;
      return [el("code", {}, bare), end + length - at];
    }
    end += length - fence.length;
  }
  return [fence, fence.length];
}

/** An end of a sentence is none of the address. */
function trimmed(url) {
  url = url.replace(/[.,;:!?*_~]+$/, "");
  return url.endsWith(")") && !url.includes("(") ? url.slice(0, -1) : url;
}

/** Only what leads to a page or a mail; anything else stays text. Images too are links: nothing is loaded. */
function link(href, children) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return el("span", {}, ...children);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return el("span", {}, ...children);
  const label = children.length ? children : [href];
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...label);
}

function run(text, at, characters) {
  const before = text[at - 1] ?? " ";
  const after = text[at + characters.length] ?? " ";
  const mark = characters[0];
  const inWord = mark === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
  const opens = !inWord && !/\s/.test(after);
  const closes = !inWord && !/\s/.test(before);
  return { mark, left: characters.length, opens, closes };
}

/** Pairs runs of delimiters, innermost first, as CommonMark does with a stack of openers. */
function nested(found) {
  const out = []; // nodes, texts and runs that may still open
  const open = { "*": 0, _: 0, "~": 0 };
  for (const token of found) {
    if (!token.mark) {
      out.push(token);
      continue;
    }
    while (token.closes && token.left && open[token.mark]) close(out, token, open);
    if (token.left && token.opens) {
      out.push(token);
      open[token.mark]++;
    } else if (token.left) {
      out.push(token.mark.repeat(token.left));
    }
  }
  return out.map(settled);
}

function close(out, token, open) {
  let at = out.length - 1;
  while (out[at].mark !== token.mark) at--;
  const opener = out[at];
  const inside = out.splice(at + 1);
  for (const each of inside) if (each.mark) open[each.mark]--;
  const used = Math.min(2, opener.left, token.left);
  opener.left -= used;
  token.left -= used;
  if (!opener.left) {
    out.pop();
    open[opener.mark]--;
  }
  const name = token.mark === "~" ? "del" : used === 2 ? "strong" : "em";
  out.push(el(name, {}, ...inside.map(settled)));
}

const settled = (token) => (token.mark ? token.mark.repeat(token.left) : token);
