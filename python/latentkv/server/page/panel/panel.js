// The panel at the right, kept up to date: often while an answer runs, seldom else, never unseen.

import { get } from "../net/api.js";
import { showSlots } from "./activity.js";
import { showCache } from "./cache_bytes.js";
import { unfold } from "./folds.js";
import { byId } from "../parts/dom.js";
import { openByDefault } from "../parts/sides.js";
import { showPlan } from "./plan.js";
import { bytes, integer, parameters, unbroken } from "../parts/units.js";

const BUSY = 1000; // ms between looks
const IDLE = 5000;

let props; // of the server, until it is lost
let timer;
let on;

/** on: {busy(): whether an answer of this page runs, opened(props): at first and when the server is back}. */
export function openPanel(listener) {
  on = listener;
  document.addEventListener("visibilitychange", () => look());
  return look({ quiet: false });
}

/**
 * Looks now, and again after a while. Never throws: a server that is gone is a word in the header.
 * quiet: nobody is asked for a key.
 */
export async function look({ quiet = true } = {}) {
  clearTimeout(timer);
  if (document.hidden && props) return;
  try {
    if (!props) opened(await get("props", { quiet }));
    const [cache, slots] = await Promise.all([get("cache", { quiet }), get("slots", { quiet })]);
    showCache(cache, props);
    showSlots(slots, props.n_ctx);
    byId("cache").classList.remove("unread");
    byId("reach").textContent = "";
  } catch (error) {
    props = undefined;
    byId("reach").textContent = error.message;
  }
  clearTimeout(timer);
  timer = setTimeout(look, on.busy() ? BUSY : IDLE);
}

function opened(found) {
  props = found;
  showModel(props);
  showPlan(props);
  const isLatent = props.plan.some(({ k, v }) => k.path !== "full" || v.path !== "full");
  unfold(isLatent ? "latent" : "plain");
  openByDefault(isLatent);
  on.opened(props);
}

function showModel(props) {
  byId("model").textContent = byId("welcome-model").textContent = props.model_alias;
  const facts = [
    props.architecture,
    `${parameters(props.n_params)} parameters`,
    `${props.n_layer} layers`,
    `weights ${bytes(props.size)}`,
  ];
  byId("facts").textContent = facts.filter(Boolean).map(unbroken).join(" · ");
  const { per_token, f16_per_token } = props.cache;
  byId("welcome-cache").textContent =
    per_token < f16_per_token
      ? `A token takes ${bytes(per_token)} of its cache; in f16 it would take ${bytes(f16_per_token)}.`
      : `A token takes ${bytes(per_token)} of its cache.`;
  const many = props.total_slots === 1 ? "one conversation" : `${props.total_slots} conversations at once`;
  byId("welcome-context").textContent = `${integer(props.n_ctx)} tokens of context for ${many}.`;
}
