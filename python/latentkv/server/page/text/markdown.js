// Markdown of a model's text, block by block. Every block keeps its source, so that a growing answer
// only rebuilds its last one. Nodes are built, never parsed: HTML in the text stays text.

import { codeBlock, grown } from "./code_block.js";
import { el } from "../parts/dom.js";
import { formula } from "./formula.js";
import { inline } from "./inline.js";
import { blockOf, endOfBlock } from "./tex.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const FIRST_ITEM = /^ {0,3}(?:[-*+]|1[.)]) +\S/; // may follow a paragraph without a blank line
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const TASK = /^\[([ xX])\] +/;
const DEEPEST = 24; // quotes and lists in one another; beyond it they are text

/** Makes `box` show `text`; nodes of blocks that did not change stay. */
export function update(box, text) {
  const blocks = split(text.replaceAll("\r\n", "\n").split("\n"), 0);
  const shown = (box.blocks ??= []);
  let same = 0;
  while (same < shown.length && same < blocks.length && shown[same] === blocks[same].source) same++;
  if (blocks[same]?.growing?.(box.childNodes[same])) same++;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...blocks.slice(same).map((block) => block.build()));
  box.blocks = blocks.map((block) => block.source);
}

function nodes(lines, depth) {
  return split(lines, depth).map((block) => block.build());
}

/** [{source, build, growing}]: each takes as many lines as belong to it. growing(node), where a block has it, makes
 * the node of a shorter version show this one and returns whether that worked. */
function split(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const kind = kindOf(lines, at, depth);
    const end = kind.end(lines, at, depth);
    const own = lines.slice(at, end);
    const growing = kind.growing && ((node) => kind.growing(node, own));
    blocks.push({ source: own.join("\n"), build: () => kind.build(own, depth), growing });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fence;
  if (endOfBlock(lines, at)) return math;
  if (HEADING.test(line)) return heading;
  if (RULE.test(line)) return rule;
  if (depth < DEEPEST && QUOTE.test(line)) return quote;
  if (depth < DEEPEST && ITEM.test(line)) return list;
  return isTable(lines, at) ? table : paragraph;
}

const fence = {
  end(lines, at) {
    const mark = FENCE.exec(lines[at])[1];
    for (let end = at + 1; end < lines.length; end++) {
      const closing = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(lines[end])?.[1];
      if (closing?.[0] === mark[0] && closing.length >= mark.length) return end + 1;
    }
    return lines.length; // of an answer that still comes
  },
  build: (lines) => codeBlock(...fenced(lines)),
  growing: (node, lines) => grown(node, ...fenced(lines)),
};

/** [text, language] */
function fenced(lines) {
  const mark = FENCE.exec(lines[0]);
  const last = lines.length > 1 && lines.at(-1).trim().startsWith(mark[1]) ? -1 : undefined;
  return [lines.slice(1, last).join("\n"), mark[2].trim().split(/\s/)[0]];
}

const math = { end: endOfBlock, build: (lines) => el("p", {}, formula(blockOf(lines))) };

const heading = {
  end: (lines, at) => at + 1,
  build([line]) {
    const [, marks, text] = HEADING.exec(line);
    // the page has its own h1 and h2
    return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text));
  },
};

const rule = { end: (lines, at) => at + 1, build: () => el("hr") };

const quote = {
  end(lines, at) {
    while (at < lines.length && QUOTE.test(lines[at])) at++;
    return at;
  },
  build(lines, depth) {
    const inside = lines.map((line) => line.replace(QUOTE, ""));
    return el("blockquote", {}, ...nodes(inside, depth + 1));
  },
};

/** A list ends where an unindented line follows a blank one, or another kind of list begins. */
const list = {
  end(lines, at) {
    const first = ITEM.exec(lines[at]);
    let wasBlank = false;
    for (let end = at + 1; end < lines.length; end++) {
      const line = lines[end];
      const item = ITEM.exec(line);
      const indent = line.length - line.trimStart().length;
      const isInside = indent > first[1].length + 1;
      if (line.trim() && !isInside) {
        const isNext = item && isOrdered(item) === isOrdered(first) && !RULE.test(line);
        if (!isNext && (wasBlank || item || startsBlock(lines, end))) return end;
      }
      wasBlank = !line.trim();
    }
    return lines.length;
  },
  build(lines, depth) {
    const first = ITEM.exec(lines[0]);
    const items = [];
    for (const line of lines) {
      const item = ITEM.exec(line);
      if (item && item[1].length <= first[1].length + 1) items.push([line.slice(item[0].length)]);
      else items.at(-1).push(line);
    }
    const start = isOrdered(first) && parseInt(first[2]) !== 1 ? { start: parseInt(first[2]) } : {};
    const isTight = !lines.some((line, at) => !line.trim() && ITEM.test(lines[at + 1] ?? ""));
    return el(isOrdered(first) ? "ol" : "ul", start, ...items.map((item) => listItem(item, depth, isTight)));
  },
};

const isOrdered = (item) => item[2].length > 1;

function listItem([first, ...rest], depth, isTight) {
  const task = TASK.exec(first);
  const indents = rest.filter((line) => line.trim()).map((line) => line.length - line.trimStart().length);
  const indent = Math.min(...indents, 4);
  const lines = [task ? first.slice(task[0].length) : first, ...rest.map((line) => line.slice(indent))];
  const built = nodes(lines, depth + 1);
  // a tight item's first paragraph is its line
  const children = isTight && built[0]?.tagName === "P" ? [...built[0].childNodes, ...built.slice(1)] : built;
  if (!task) return el("li", {}, ...children);
  const checked = task[1] !== " ";
  const box = el("input", { type: "checkbox", disabled: true, checked, "aria-label": "task" });
  return el("li.task", {}, box, " ", ...children);
}

const table = {
  end(lines, at) {
    at += 2;
    while (at < lines.length && lines[at].trim() && lines[at].includes("|")) at++;
    return at;
  },
  build([head, delimiters, ...rows]) {
    const sides = cells(delimiters).map(sideOf);
    const row = (name, line) => {
      const found = cells(line);
      const cell = (side, column) => el(name + side, {}, ...inline(found[column] ?? ""));
      return el("tr", {}, ...sides.map(cell));
    };
    const body = el("tbody", {}, ...rows.map((line) => row("td", line)));
    const whole = el("table", {}, el("thead", {}, row("th", head)), body);
    return el("div.table", { tabindex: "0", role: "group", "aria-label": "table" }, whole);
  },
};

function isTable(lines, at) {
  const [head, below = ""] = [lines[at], lines[at + 1]];
  if (!head.includes("|") || !below.includes("-") || !DELIMITERS.test(below)) return false;
  return cells(head).length === cells(below).length;
}

/** ":--" is left, ":-:" the centre, "--:" right. */
function sideOf(cell) {
  if (!cell.endsWith(":")) return "";
  return cell.startsWith(":") ? ".center" : ".right";
}

/** Cells of a row: bars split, but for those behind a backslash or in code. */
function cells(line) {
  const found = [""];
  let inCode = false;
  for (const part of line.trim().replace(/^\||(?<!\\)\|$/g, "").match(/\\.|[\s\S]/g) ?? []) {
    if (part === "`") inCode = !inCode;
    if (part === "|" && !inCode) found.push("");
    else found[found.length - 1] += part === "\\|" ? "|" : part;
  }
  return found.map((cell) => cell.trim());
}

const paragraph = {
  end(lines, at) {
    do at++;
    while (at < lines.length && lines[at].trim() && !startsBlock(lines, at) && !FIRST_ITEM.test(lines[at]));
    return at;
  },
  build: (lines) => el("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n"))),
};

const STARTS = [FENCE, HEADING, RULE, QUOTE];

function startsBlock(lines, at) {
  return STARTS.some((each) => each.test(lines[at])) || endOfBlock(lines, at) > 0 || isTable(lines, at);
}
