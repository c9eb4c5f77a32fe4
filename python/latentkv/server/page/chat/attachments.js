// Text files attached to a question: how they are read, which are refused, and how the model sees them.

import { bytes } from "../parts/units.js";

export const MOST_OF_ONE = 512 * 1024; // bytes
export const MOST_OF_ALL = 1024 * 1024; // bytes of one question; browsers keep about five million characters
const LONG = 2000; // characters; a longer text becomes an attachment when it is pasted
const LONG_LINES = 40;
const LANGUAGES = {
  ...{ py: "python", js: "javascript", mjs: "javascript", ts: "typescript", rs: "rust", rb: "ruby", sh: "bash" },
  ...{ h: "c", hpp: "cpp", cc: "cpp", cs: "csharp", kt: "kotlin", pl: "perl", md: "markdown", yml: "yaml" },
  ...{ toml: "ini", html: "html", htm: "html", svg: "xml", patch: "diff", mk: "makefile", txt: "", log: "" },
};

/** {name, text} of a file. Throws a sentence where it is too large or no text. */
export async function read(file) {
  if (file.size > MOST_OF_ONE) {
    throw new Error(`${file.name} has ${bytes(file.size)}; a file may have ${bytes(MOST_OF_ONE)}.`);
  }
  let data;
  try {
    data = new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} cannot be read. If it is a folder, choose the files in it.`);
  }
  const text = decoded(data);
  if (text === undefined) throw new Error(`${file.name} is not text in UTF-8. Only text files can be attached.`);
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  return { name: file.name.slice(0, 200), text };
}

/** Decodes UTF-8, or UTF-16 with a byte-order mark, and drops the mark. Returns undefined for anything else. */
function decoded(data) {
  const mark = (data[0] << 8) | data[1];
  const encoding = mark === 0xfffe ? "utf-16le" : mark === 0xfeff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(data);
    return text.includes("\0") ? undefined : text.replaceAll("\r\n", "\n");
  } catch {
    return undefined;
  }
}

export const isLong = (text) => text.length > LONG || text.split("\n", LONG_LINES + 1).length > LONG_LINES;

/** The pasted text as an attachment whose name none of `others` has. */
export function pasted(text, others) {
  const taken = new Set(others.map((each) => each.name));
  let count = 1;
  while (taken.has(`pasted-${count}.txt`)) count++;
  return { name: `pasted-${count}.txt`, text: text.replaceAll("\r\n", "\n") };
}

export const sizeOf = ({ text }) => new Blob([text]).size;

export function languageOf(name) {
  const [base, ending] = /^(.*?)(?:\.(\w{1,12}))?$/s.exec(name.toLowerCase()).slice(1);
  if (!ending) return base.endsWith("makefile") ? "makefile" : "";
  return LANGUAGES[ending] ?? ending;
}

/** What the model reads: each file as a fenced block under its name, then the question. */
export function inWords({ content, attachments = [] }) {
  return [...attachments.map(fenced), content].filter(Boolean).join("\n\n");
}

/** A fence longer than any in the text, so that no file ends its own block. */
function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  const label = name.replace(/[`\p{Cc}]+/gu, " ").trim();
  return `\`${label}\`:\n${fence}${languageOf(name)}\n${text.replace(/\n$/, "")}\n${fence}`;
}
