// How fast the last answer was, and what every sequence of the cache does.

import { byId, el } from "../parts/dom.js";
import { integer, rate, tokens } from "../parts/units.js";

/** An answer's usage and timings, or null where the conversation has none yet. */
export function showSpeed(message) {
  const { usage, timings } = message ?? {};
  byId("speed").hidden = !timings;
  byId("no-speed").hidden = Boolean(timings);
  if (!timings) return;
  const { cached_n: cached, prompt_n: computed } = timings;
  byId("prompt-rate").textContent = computed ? rate(timings.prompt_per_second) : "–";
  byId("prompt-tokens").textContent = tokens(cached + computed);
  byId("prompt-bar").firstElementChild.style.width = `${(100 * cached) / Math.max(1, cached + computed)}%`;
  byId("prompt-split").textContent = `${integer(cached)} from the cache, ${integer(computed)} computed`;
  byId("answer-rate").textContent = rate(timings.predicted_per_second);
  byId("answer-tokens").textContent = tokens(usage?.completion_tokens ?? timings.predicted_n);
}

/** slots: GET /slots. Those without a token are only counted. */
export function showSlots(slots, n_ctx) {
  const used = slots.filter((slot) => slot.n_cached || slot.is_processing);
  const empty = slots.length - used.length;
  byId("slots").replaceChildren(...used.map((slot) => row(slot, n_ctx)));
  byId("slots").parentElement.hidden = !used.length;
  byId("empty-slots").textContent = empty ? `${empty} of ${slots.length} empty` : "";
}

function row(slot, n_ctx) {
  const filled = el("span.part");
  filled.style.width = `${Math.min(100, (100 * slot.n_cached) / n_ctx)}%`;
  return el(
    slot.is_processing ? "tr.running" : "tr",
    {},
    el("th", { scope: "row" }, String(slot.id)),
    el("td.fill", {}, el("span.bar", {}, filled)),
    el("td", {}, integer(slot.n_cached)),
    el("td.state", {}, state(slot)),
  );
}

function state(slot) {
  if (!slot.is_processing) return "idle";
  if (slot.n_prompt_left) return `reads, ${integer(slot.n_prompt_left)} left`;
  return `answers, ${integer(slot.n_decoded)}`;
}
