// Finds formulas in a text: $…$, $$…$$, \(…\), \[…\] and environments such as align. Sums of money are not
// formulas, and a formula that has no end yet is text.

const INLINE = /^\\\(((?:[^\\]|\\[^)]){1,4000}?)\\\)/;
const DISPLAY = /^\\\[((?:[^\\]|\\[^\]]){1,4000}?)\\\]/;
const DOLLARS = /^\$\$((?:[^\\$]|\\.){1,4000}?)\$\$/;
const DOLLAR = /^\$(?!\s)((?:[^\\$\n]|\\.){1,1000}?)(?<!\s)\$(?![\p{L}\p{N}$])/u;
const WORDY = /^[\d.,]+\s+\p{L}{2,}|\p{L}{2,}\s+\p{L}{2,}\s+\p{L}{2,}/u;
const COMMANDS = /\\[a-z]+(?:\{[^{}]*\})?/gi;
const OPENS = /^ {0,3}(\$\$|\\\[|\\begin\{((?:align|aligned|equation|gather|multline|cases)\*?)\})/;
const MOST_LINES = 100; // of a block

/** {source, tex, isDisplay} of the formula that `rest` begins with, or undefined; before: the character before it. */
export function formulaAt(rest, before = " ") {
  let match;
  if (rest[0] === "\\") {
    if ((match = INLINE.exec(rest))) return made(match, false);
    if ((match = DISPLAY.exec(rest))) return made(match, true);
  } else if (rest[0] === "$") {
    if ((match = DOLLARS.exec(rest))) return made(match, true);
    if ((match = DOLLAR.exec(rest)) && !/[\p{L}\p{N}$]/u.test(before) && !isWords(match[1])) return made(match, false);
  }
  return undefined;
}

const made = ([source, tex], isDisplay) => (tex.trim() ? { source, tex, isDisplay } : undefined);

/** "5 and the rest was 6" is what stands between the signs of two prices. */
const isWords = (tex) => WORDY.test(tex.replace(COMMANDS, ""));

/** The line after the formula that begins at line `at` and has its lines to itself; 0 if there is none. */
export function endOfBlock(lines, at) {
  const match = OPENS.exec(lines[at]);
  if (!match) return 0;
  const close = closing(match);
  for (let end = at; end < Math.min(lines.length, at + MOST_LINES); end++) {
    const from = end === at ? match[0].length : 0;
    const found = lines[end].indexOf(close, from);
    if (found >= 0) return /^[.,;:]?\s*$/.test(lines[end].slice(found + close.length)) ? end + 1 : 0;
  }
  return 0;
}

/** {source, tex, isDisplay} of the lines of such a formula. Punctuation after it becomes part of it. */
export function blockOf(lines) {
  const source = lines.join("\n");
  const match = OPENS.exec(source);
  const close = closing(match);
  const end = source.lastIndexOf(close);
  const after = source.slice(end + close.length).trim();
  const inside = source.slice(match[0].length, end);
  if (!match[2]) return { source, tex: `${inside.trim()}${after}`, isDisplay: true };
  return { source, tex: `${source.slice(0, end).trim()}${close}${after}`, isDisplay: true };
}

function closing([, open, environment]) {
  if (environment) return `\\end{${environment}}`;
  return open === "$$" ? "$$" : "\\]";
}
