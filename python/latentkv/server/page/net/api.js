// Calls of the server. Whatever goes wrong is an Error whose message is a sentence.

import { askKey, heldKey } from "./key.js";

/** JSON of a GET. Paths are relative to the page, which may stand behind a prefix. */
export async function get(path, { quiet = false } = {}) {
  return (await call(path, { quiet })).json();
}

/** Response of a POST whose body streams. */
export function post(path, body, signal) {
  return call(path, {
    signal,
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

/** quiet: a missing key is an error at once, nobody is asked. */
async function call(path, { quiet, headers = {}, ...options }) {
  for (;;) {
    const key = heldKey();
    const authorization = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await reached(path, { ...options, headers: { ...headers, ...authorization } });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await sentence(response));
    if (quiet || !(await askKey(key))) throw new Error("The server asks for an API key.");
  }
}

async function reached(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
}

async function sentence(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim();
  }
}
