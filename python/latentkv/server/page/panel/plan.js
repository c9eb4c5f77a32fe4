// The plan as a picture: a row for each layer, K to the left of the axis and V to the right, the most
// important channels of a group nearest to it. Width is channels, colour is bits; what is empty of a row
// is not kept.

import { byId, el, svg } from "../parts/dom.js";
import { integer, percent } from "../parts/units.js";

const SIDE = 150; // px of all channels of K, and of V
const AXIS = 28; // px between them, for the layer's number
const TALL = 320; // px that the rows may take before they get thinner
const HEIGHTS = [5, 11]; // px of a row, at least and at most

/** Bits of a channel's code: q4 → 4, q8_0 → 8, f16 → 16, none → 0. */
export const bitsOf = (format) => Number(/^[a-z]+(\d+)/.exec(format)?.[1] ?? 0);

export function showPlan(props) {
  const full = props.n_head_kv * props.head_dim;
  const segments = props.plan.flatMap((layer, at) => [
    ...segmentsOf(layer.k, "k", at),
    ...segmentsOf(layer.v, "v", at),
  ]);
  const height = Math.min(HEIGHTS[1], Math.max(HEIGHTS[0], Math.floor(TALL / props.plan.length)));
  byId("plan").replaceChildren(picture(segments, props.plan.length, full, height));
  const attending = props.plan.filter((layer) => layer.mixer === "attention").length;
  const kept = segments.reduce((sum, each) => sum + each.width, 0);
  const recurrent = attending < props.plan.length ? ` (${props.plan.length - attending} recurrent)` : "";
  byId("plan-line").textContent = `${props.plan.length} layers${recurrent} · ${formatsOf(segments).join(", ")}`;
  byId("legend").replaceChildren(...legend(segments, kept < 2 * full * attending));
  byId("plan-sum").replaceChildren(
    ...["k", "v"].map((side) => el("p", {}, summary(segments, side, full * attending))),
  );
}

/** [{side, layer, group, groups, at, of, start, width, format, path, energy}] in the order of a row. */
function segmentsOf(tensor, side, layer) {
  const found = [];
  let start = 0;
  tensor.segments.forEach((widths, group) => {
    widths.forEach((width, at) => {
      const format = tensor.formats[group][at];
      found.push({
        ...{ side, layer, group, groups: tensor.segments.length, path: tensor.path, energy: tensor.energy },
        ...{ at, of: widths.length, start, width, format },
      });
      if (bitsOf(format)) start += width;
    });
  });
  return found.filter((each) => bitsOf(each.format));
}

function picture(segments, layers, full, height) {
  const wide = 2 * SIDE + AXIS;
  const scale = SIDE / full;
  const x = ({ side, start, width }) =>
    side === "k" ? SIDE - (start + width) * scale : SIDE + AXIS + start * scale;
  const node = svg("svg", {
    ...{ viewBox: `0 0 ${wide} ${layers * height}`, role: "img", tabindex: "0" },
    "aria-label": "Row formats of every layer. Arrow keys walk through the segments.",
  });
  const step = Math.ceil(10 / height);
  for (let layer = 0; layer < layers; layer++) {
    const y = layer * height;
    for (const left of [0, SIDE + AXIS]) {
      node.append(svg("rect", { class: "unused", x: left, y, width: SIDE, height: height - 1 }));
    }
    if (layer % step) continue;
    node.append(svg("text", { x: SIDE + AXIS / 2, y: y + height / 2 }, String(layer)));
  }
  const shapes = segments.map((each) =>
    svg("rect", {
      ...{ class: `bits-${shade(each.format)}`, x: x(each).toFixed(2), y: each.layer * height },
      ...{ width: Math.max(0.5, each.width * scale - 0.6).toFixed(2), height: height - 1 },
    }),
  );
  node.append(...shapes);
  follow(node, shapes, segments);
  return node;
}

/** Says what is under the pointer, or where the arrow keys are. */
function follow(node, shapes, segments) {
  let at = -1;
  const choose = (next) => {
    shapes[at]?.classList.remove("chosen");
    at = next;
    shapes[at]?.classList.add("chosen");
    byId("under").textContent = at < 0 ? byId("under").dataset.idle : described(segments[at]);
  };
  node.addEventListener("pointermove", ({ target }) => {
    const found = shapes.indexOf(target);
    if (found >= 0) choose(found);
  });
  node.addEventListener("pointerdown", ({ target }) => choose(shapes.indexOf(target)));
  node.addEventListener("pointerleave", () => choose(-1));
  node.addEventListener("blur", () => choose(-1));
  node.addEventListener("keydown", (event) => {
    const next = walked(segments, at, event.key);
    if (next === undefined) return;
    event.preventDefault();
    choose(next);
  });
  choose(-1);
}

/** Left and right: the neighbour in the row as it is drawn. Up and down: the same side of the next layer. */
function walked(segments, at, key) {
  if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(key)) return undefined;
  if (at < 0) return 0;
  const here = segments[at];
  if (key === "ArrowUp" || key === "ArrowDown") {
    const layer = here.layer + (key === "ArrowUp" ? -1 : 1);
    const found = segments.findIndex((each) => each.layer === layer && each.side === here.side);
    return found < 0 ? at : found;
  }
  const offset = (each) => (each.side === "k" ? -each.start - 1 : each.start);
  const row = segments.map((_, index) => index).filter((index) => segments[index].layer === here.layer);
  row.sort((a, b) => offset(segments[a]) - offset(segments[b]));
  return row[row.indexOf(at) + (key === "ArrowLeft" ? -1 : 1)] ?? at;
}

function described({ side, layer, group, groups, at, of, width, format, path, energy }) {
  const told = [`Layer ${layer}, ${side.toUpperCase()} ${path}`];
  if (groups > 1) told.push(`${path === "full" ? "head" : "group"} ${group + 1} of ${groups}`);
  if (of > 1) told.push(`segment ${at + 1} of ${of}`);
  told.push(`${width} channels in ${format}`);
  if (energy != null) told.push(`energy ${(100 * energy).toFixed(2)} %`);
  return told.join(" · ");
}

const SHADES = [1, 2, 3, 4, 5, 6, 8, 16];
const shade = (format) => SHADES.find((bits) => bits >= bitsOf(format)) ?? 16;

/** Most bits first. */
function formatsOf(segments) {
  const formats = [...new Set(segments.map((each) => each.format))];
  return formats.sort((a, b) => bitsOf(b) - bitsOf(a) || a.localeCompare(b));
}

function legend(segments, hasGaps) {
  const item = (kind, text) => {
    const swatch = svg("rect", { class: kind, width: 10, height: 10 });
    return el("li", {}, svg("svg", { viewBox: "0 0 10 10" }, swatch), text);
  };
  const items = formatsOf(segments).map((format) => item(`bits-${shade(format)}`, format));
  return hasGaps ? [...items, item("unused", "not kept")] : items;
}

function summary(segments, side, all) {
  const own = segments.filter((each) => each.side === side);
  const kept = own.reduce((sum, each) => sum + each.width, 0);
  const bits = own.reduce((sum, each) => sum + each.width * bitsOf(each.format), 0);
  const share = `${integer(kept)} of ${integer(all)} channels (${percent(kept, all)})`;
  return `${side.toUpperCase()}: ${share} at ${(bits / kept).toFixed(1)} bits`;
}
