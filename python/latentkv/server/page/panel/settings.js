// How answers are sampled. An empty field is not sent: the server's default counts, shown in its place.

import { byId, el } from "../parts/dom.js";

const KEPT = "latentkv.settings";

// [name in the request, label, what it does, step]
const FIELDS = [
  ["temperature", "Temperature", "0 always takes the likeliest token", "any"],
  ["top_p", "Top-p", "the likeliest tokens that add up to this", "any"],
  ["top_k", "Top-k", "the likeliest tokens, this many", "1"],
  ["min_p", "Min-p", "tokens at least this likely beside the likeliest", "any"],
  ["repeat_penalty", "Repeat penalty", "1 for none", "any"],
  ["max_tokens", "Max tokens", "of an answer", "1"],
  ["seed", "Seed", "the same one repeats an answer", "1"],
];
const IN_PROPS = { max_tokens: "n_predict" };
const RANDOM_SEED = 0xffffffff;

let values = {};

/** {system, sampling}: what the next answer is asked with. */
export function current() {
  const sampling = {};
  for (const [name] of FIELDS) if (values[name] !== undefined) sampling[name] = values[name];
  return { system: values.system ?? "", sampling };
}

/** Builds the form; changed(system) is called when the system prompt is. */
export function build(changed) {
  try {
    values = JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    values = {};
  }
  byId("sampling").replaceChildren(...FIELDS.map(field));
  byId("system").addEventListener("change", (event) => {
    put("system", event.target.value.trim() || undefined);
    changed(values.system ?? "");
  });
  byId("defaults").addEventListener("click", () => {
    for (const [name] of FIELDS) {
      byId(`set-${name}`).value = "";
      put(name, undefined);
    }
  });
}

export const showSystem = (system) => (byId("system").value = system);

/** The server's defaults as placeholders. */
export function showDefaults(defaults) {
  for (const [name] of FIELDS) {
    byId(`set-${name}`).placeholder = inWords(name, defaults[IN_PROPS[name] ?? name]);
  }
}

function inWords(name, value) {
  if (name === "max_tokens" && value === -1) return "no limit";
  if (name === "seed" && [-1, RANDOM_SEED].includes(value)) return "random";
  return String(value ?? "");
}

function field([name, label, hint, step]) {
  const input = el("input", { id: `set-${name}`, type: "number", step, "aria-describedby": `hint-${name}` });
  const help = el("small", { id: `hint-${name}` }, hint);
  input.value = values[name] ?? "";
  input.addEventListener("change", () => {
    const isRight = input.validity.valid;
    put(name, input.value === "" || !isRight ? undefined : Number(input.value));
    input.setAttribute("aria-invalid", String(!isRight));
    help.textContent = isRight ? hint : `${input.validationMessage} Not sent.`;
  });
  return el("div.field", {}, el("label", { for: `set-${name}` }, label), input, help);
}

function put(name, value) {
  values[name] = value;
  try {
    localStorage.setItem(KEPT, JSON.stringify(values));
  } catch {
    // they count until the page is left
  }
}
