// What the cache takes: as allocated for the whole context, and what its rows hold now, next to f16's.

import { byId, el } from "../parts/dom.js";
import { bytes, integer, percent } from "../parts/units.js";

const MEANS = {
  sink: "the first tokens of a sequence, kept exact",
  recent: "the latest tokens of a sequence, kept exact",
  middle: "all others, compressed",
};

/** cache: GET /cache; props: GET /props. */
export function showCache(cache, props) {
  const f16 = props.cache.f16_total;
  const { per_token, f16_per_token, share: of_f16 } = cache;
  byId("cache-total").textContent = bytes(cache.total);
  byId("cache-total").title = `${integer(cache.total)} bytes`;
  // states of recurrent layers do not grow with the context, and are the same beside f16
  const states = cache.states + cache.snapshots;
  const rows = cache.total - states;
  const share = `${percent(rows, f16)} of f16’s ${bytes(f16)}`;
  const beside = states ? `, beside ${bytes(states)} of recurrent layers’ states` : "";
  byId("cache-share").textContent = `${share}, at ${integer(cache.n_ctx)} tokens${beside}`;
  bar(byId("bar-f16"), [[f16, "f16", f16]]);
  bar(byId("bar-here"), cache.regions.map((each) => [each.k + each.v, each.name, f16, held(each)]));
  byId("regions").replaceChildren(...cache.regions.map(region));
  const now = cache.regions.reduce((sum, each) => sum + held(each), 0);
  const tokens = cache.regions.reduce((sum, each) => sum + each.used, 0);
  pair("now", `${bytes(now)}`, `of f16’s ${bytes(tokens * f16_per_token)}`);
  pair("per-token", bytes(per_token), `of f16’s ${bytes(f16_per_token)} (${percent(of_f16, 1)})`);
  byId("held").textContent = `${integer(cache.n_used)} of ${integer(cache.n_ctx)}`;
  const told = [
    `${bytes(now)} of ${bytes(cache.total)}`,
    rows === f16 ? "" : `${percent(rows, f16)} of f16`,
    `${integer(cache.n_used)} of ${integer(cache.n_ctx)} tokens`,
  ].filter(Boolean);
  byId("cache-line").textContent = told.join(" · ");
  byId("bytes-line").replaceChildren(...told.map((part, at) => el("span", {}, part, at < told.length - 1 ? " · " : "")));
  byId("implementation").textContent = props.cache.implementation;
}

/** Bytes of the rows that hold a token. */
const held = ({ k, v, used, slots }) => (slots ? ((k + v) * used) / slots : 0);

function pair(id, value, beside) {
  byId(id).replaceChildren(el("b", {}, value), ` ${beside}`);
}

/** parts: [bytes, kind, bytes of the whole width, bytes in use]. */
function bar(box, parts) {
  box.replaceChildren(
    ...parts.map(([size, kind, whole, used = 0]) => {
      const part = el(`span.part.${kind}`, { title: `${kind}: ${bytes(size)}` });
      part.style.width = `${(100 * size) / whole}%`;
      const inner = el("span.used");
      inner.style.width = `${size ? (100 * used) / size : 0}%`;
      part.append(inner);
      return part;
    }),
  );
}

function region(each) {
  return el(
    "tr",
    {},
    el("th", { scope: "row", title: MEANS[each.name] ?? "" }, el(`i.${each.name}`), each.name),
    el("td", {}, integer(each.used)),
    el("td", {}, integer(each.slots)),
    el("td", { title: `${integer(each.k + each.v)} bytes` }, bytes(each.k + each.v)),
  );
}
