// Conversations in this browser: each under a key of its own, so that two tabs do not overwrite each other's.

const PREFIX = "latentkv.conversation.";
const FORMAT = "latentkv conversations";
const ROLES = ["user", "assistant"];

const held = new Map(); // id → conversation, the same object for everybody who asks

/**
 * {id, title, created, changed, system, messages: [{role, content, …}]}
 * A question may have attachments: [{name, text}].
 */
export function create(system) {
  const now = Date.now();
  const conversation = { id: freshId(), title: "", created: now, changed: now, system, messages: [] };
  held.set(conversation.id, conversation);
  return conversation;
}

/** Latest first. */
export function all() {
  return [...held.values()].filter((each) => each.messages.length).sort((a, b) => b.changed - a.changed);
}

export const find = (id) => held.get(id);

/** Throws a sentence when the browser keeps nothing, or no more. */
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  } catch {
    throw new Error("This browser has no room left for conversations. Export some and delete them.");
  }
}

export function remove(conversation) {
  held.delete(conversation.id);
  localStorage.removeItem(PREFIX + conversation.id);
}

export function restore(conversation) {
  held.set(conversation.id, conversation);
  save(conversation);
}

/** Reads what is kept; what does not read as a conversation is left where it is. */
export function open() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  for (const key of keys) take(key, localStorage.getItem(key));
}

/** Another tab's changes, but for conversations that `isBusy` here. */
export function follow(isBusy, changed) {
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX) || isBusy(key.slice(PREFIX.length))) return;
    if (newValue === null) held.delete(key.slice(PREFIX.length));
    else take(key, newValue);
    changed(key.slice(PREFIX.length));
  });
}

function take(key, text) {
  try {
    const conversation = checked(JSON.parse(text));
    if (PREFIX + conversation.id === key) held.set(conversation.id, conversation);
  } catch {
    console.warn(`${key} is no conversation`);
  }
}

export const exported = (conversations) =>
  JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);

/** Adds all conversations of a file or none, and returns their number. One that is here becomes a second one. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations)) {
    throw new Error("This file does not hold conversations of this page.");
  }
  const found = file.conversations.map(checked);
  for (const each of found) restore(held.has(each.id) ? { ...each, id: freshId() } : each);
  return found.length;
}

/** A conversation with the fields of one and no others, or an error. */
function checked(value) {
  const { id, title, created, changed, system, messages } = value ?? {};
  const isRight =
    [id, title, system].every((each) => typeof each === "string") &&
    [created, changed].every(Number.isFinite) &&
    /^[\w-]{1,64}$/.test(id) &&
    Array.isArray(messages);
  if (!isRight) throw new Error("A conversation of this file lacks a field.");
  return { id, title, created, changed, system, messages: messages.map(checkedMessage) };
}

function checkedMessage(message) {
  const { role, content, reasoning = "", tool_calls = [], error, finish, usage, timings } = message ?? {};
  const { attachments = [] } = message ?? {};
  const isRight =
    ROLES.includes(role) &&
    [content, reasoning].every((each) => typeof each === "string") &&
    Array.isArray(tool_calls) &&
    Array.isArray(attachments);
  if (!isRight) throw new Error("A message of this file lacks a field.");
  if (role === "user") {
    return attachments.length ? { role, content, attachments: attachments.map(checkedFile) } : { role, content };
  }
  return {
    ...{ role, content, reasoning, tool_calls: tool_calls.map(checkedCall) },
    ...{ error: textOr(error), finish: textOr(finish), usage: numbersOf(usage), timings: numbersOf(timings) },
  };
}

function checkedFile(file) {
  const { name, text } = file ?? {};
  if (typeof name !== "string" || typeof text !== "string") throw new Error("A file in this file lacks a field.");
  return { name, text };
}

function checkedCall(call) {
  const { name = "", arguments: given = "" } = call?.function ?? {};
  const id = String(call?.id ?? "");
  return { id, type: "function", function: { name: String(name), arguments: String(given) } };
}

const textOr = (value) => (typeof value === "string" ? value : undefined);

/** The numbers of an object, or nothing where there are none. */
function numbersOf(value) {
  const found = Object.entries(value ?? {}).filter(([, each]) => Number.isFinite(each));
  return found.length ? Object.fromEntries(found) : undefined;
}

// crypto.randomUUID is hidden from pages without TLS
function freshId() {
  const numbers = crypto.getRandomValues(new Uint32Array(3));
  return Array.from(numbers, (each) => each.toString(16).padStart(8, "0")).join("");
}
