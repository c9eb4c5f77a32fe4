"""What a conversion did: per-layer ranks and energy, true bytes per token, the files. As a table, JSON and a
picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentkv.console.terminal import Block, table
from latentkv.plan.formats import COMPARED
from latentkv.quantities import digits

from .fuse import center
from .ir import OF_VALUE, SIDES, ModelSpec, Plan, SidePlan
from .pictures import bits_map, bits_of, rank_map
from .plan.times import gpu_file
from .recipe import Recipe
from .rows import plan_sizes, sizes
from .work import Work
from .write.gguf_write import replacing

if TYPE_CHECKING:
    from .recover.lora import Recovery

_OWN = "this file"
CONTEXT = 32768  # at which whole caches are compared


@dataclass(frozen=True)
class Report:
    recipe: Recipe
    spec: ModelSpec
    plan: Plan
    energy: dict[str, list[float]]  # side -> kept share of squared energy per layer
    calibration_tokens: int
    file_bytes: int
    files: tuple[Path, ...]
    outtype: str  # of weights that were computed
    factor_type: str  # of A
    added_weight_bytes: int  # tensors beyond those with full K and V; below 0 where weights shrink
    recovery: Recovery | None = None
    centred: Mapping[str, Sequence[int]] = field(default_factory=dict)  # side -> layers
    note: str = ""  # the source's

    @property
    def keep(self) -> float:
        """Kept fraction of all KV dimensions in the middle region; a full layer keeps all of them."""
        kept = full = 0
        for index in self.spec.row_layers:
            for name in SIDES:
                width, side = self.spec.at(index).of_side(name).kv_width, self.plan.layers[index].side(name)
                kept += 0 if side == OF_VALUE else sum(side.kept) or width
                full += width
        return kept / full

    def bytes_per_token(self) -> dict[str, float]:
        """Bytes of a token by row format; `plan`: the file's own."""
        spec, plan = self.spec, self.plan
        own = {"plan": plan_sizes.planned_bytes_per_token(spec, plan, CONTEXT)} if self.planned else {}
        return own | {fmt: plan_sizes.bytes_per_token(spec, plan, fmt, CONTEXT) for fmt in COMPARED}

    def _full_bytes(self, fmt: str | None = None) -> float:
        """Bytes of a token in f16 in the slots of the plan, or of a cache in this row format: without rows in
        token blocks, layers with a sliding window have fewer."""
        return float(plan_sizes.kv_bytes(self.spec, self.plan, CONTEXT, fmt)["f16_per_token"])

    @property
    def planned(self) -> bool:
        """The file chooses a row format for every segment."""
        return any(layer.side(side).formats for layer in self.plan.layers for side in SIDES)

    def cache(self) -> dict[str, Any]:
        """The whole cache under the file's plan, exact tokens and bookkeeping included, and what it costs."""
        cache = plan_sizes.kv_bytes(self.spec, self.plan, CONTEXT)
        result: dict[str, Any] = {
            "sink": self.plan.sink,
            "recent": self.plan.recent,
            "sink_format": self.plan.sink_format,
            "recent_format": self.plan.recent_format,
            "fitted_context": self.plan.fitted_context,
            "context": CONTEXT,
            "bytes": cache["total"],
            "share_of_f16": cache["total"] / cache["f16_total"],
        }
        if self.plan.forecast is not None:
            seen = asdict(self.plan.forecast)
            result["kld"] = {name: None if math.isnan(value) else value for name, value in seen.items()}
            result["kld"]["weights"] = "f32"  # torch's, whatever the file's are
        if self.plan.polished is not None:
            result["polished"] = asdict(self.plan.polished)
        return result

    def as_dict(self) -> dict[str, Any]:
        full = self._full_bytes()
        layers = []
        for index, layer in enumerate(self.plan.layers):
            entry: dict[str, Any] = {"layer": index}
            if not self.spec.attends(index):
                layers.append({**entry, "mixer": self.spec.mixer(index)})
                continue
            for side in SIDES:
                chosen = layer.side(side)
                entry[side] = {
                    "path": chosen.path,
                    "group": chosen.group,
                    "ranks": list(chosen.ranks),
                    "kept": list(chosen.kept),
                    "energy": self.energy[side][index],
                }
                if index in self.centred.get(side, ()):
                    entry[side]["centred"] = True
                if chosen.formats is not None:
                    entry[side] |= {"segments": chosen.segments, "formats": chosen.formats}
            layers.append(entry)
        planned = {"cache": self.cache()} if self.planned else {}
        if self.plan.frontier is not None:
            planned["frontier"] = self.plan.frontier.as_dict()
        return {
            "source": self.recipe.source.name,
            "recipe": json.loads(self.recipe.text()),
            "outtype": self.outtype,
            "factor_type": self.factor_type,
            "architecture": self.spec.gguf_arch,
            "note": self.note,
            "keep": self.keep,
            "calibration_tokens": self.calibration_tokens,
            "file_bytes": self.file_bytes,
            "added_weight_bytes": self.added_weight_bytes,
            "bytes_per_token_f16_full": full,
            "state_bytes": sizes.state_bytes(self.spec),
            "bytes_per_token": self.bytes_per_token(),
            "share_of_f16": {
                fmt: n / self._full_bytes(None if fmt == "plan" else fmt)
                for fmt, n in self.bytes_per_token().items()
            },
            "finetune": None if self.recovery is None else self.recovery.as_dict(),
            **planned,
            "layers": layers,
        }

    def blocks(self) -> list[Block]:
        """For the terminal."""
        full = self._full_bytes()
        header, rows = ["layer", "K path", "K ranks", "K energy", "V path", "V ranks", "V energy"], []
        for index in self.spec.row_layers:
            layer, row = self.plan.layers[index], [str(index)]
            for side in SIDES:
                chosen = layer.side(side)
                own = self.spec.at(index).of_side(side)
                whole = "-" if chosen == OF_VALUE else f"{own.n_kv} x {own.head_dim}"
                ranks = _stored(chosen) if chosen.ranks else whole
                row += [chosen.path, ranks, f"{self.energy[side][index]:.4f}"]
            rows.append(row)
        cells = []
        rows_of = self.bytes_per_token()
        shown = {_OWN: rows_of["plan"]} if self.planned else rows_of
        for fmt, size in {"full K and V, f16": full, **shown}.items():
            cells.append(
                [fmt, f"{size:.10g}", f"{100 * size / full:.1f} %", f"{size * CONTEXT / 2**20:.1f} MiB"]
            )
        kept = f"kept channels of K and V: {100 * self.keep:.2f} %"
        tail = ["", *self._summary()] if self.planned else []
        found = self.plan.frontier
        chosen_from = ["", _numbers(found.header, found.cells())] if found is not None and self._timed else []
        trained = [] if self.recovery is None else [_recovered(self.recovery), ""]
        means = (
            [f"stored about their mean: {_layers(self.centred)}", ""] if any(self.centred.values()) else []
        )
        sizes_of = ["cache rows", "bytes per token", "of f16", f"at {CONTEXT} tokens"]
        state = []
        if size := sizes.state_bytes(self.spec):
            n, held = self.spec.n_layer, f"{size / 2**20:.3g} MiB for every sequence"
            state = [f"{n - len(self.spec.attention_layers)} of {n} layers have states instead: {held}", ""]
        text = [_numbers(header, rows), "", kept, "", *state, *means, *trained, _numbers(sizes_of, cells)]
        return [*text, *chosen_from, *tail]

    @property
    def _timed(self) -> bool:
        """Whether a GPU's times are for the reader: one is here, or its times were asked for."""
        asked = self.recipe.options.get("gpu_times") is not None
        return asked or self.recipe.device != "cpu" or gpu_file.here() is not None

    def _summary(self) -> list[str]:
        cache = self.cache()
        size = f"{cache['bytes'] / 2**20:.1f} MiB at {CONTEXT} tokens"
        share = f"{100 * cache['share_of_f16']:.2f} % of f16"
        exact = (
            f"the first {self.plan.sink} and latest {self.plan.recent} tokens in {self.plan.recent_format}"
        )
        lines = [f"whole cache: {size}, {share}, with {exact}"]
        lines.append(f"weights: {self.added_weight_bytes / 2**20:+.1f} MiB, the factors")
        if (seen := self.plan.forecast) is not None:
            error = "" if math.isnan(seen.error) else f" ± {digits(seen.error, 1)}"
            held = "predicted, not measured: more is lost"
            if seen.n_windows:
                windows = f"{seen.n_windows} held-back window{'s' * (seen.n_windows != 1)}"
                held = f"measured on {windows}, weights in f32"
            lines.append(f"expected divergence: {digits(seen.kld, 2)}{error} nats per token ({held})")
        if (trained := self.plan.polished) is not None:
            of = f"factors of step {trained.kept} of {trained.steps}"
            lines.append(f"polished: {trained.share:.0%} of the loss is left ({of})")
        if self.recipe.options.get("quick"):
            lines.append("converted with --quick, on a quarter of the text: without it the cache loses less")
        if self.plan.frontier is not None:
            heads = f"KV heads that share a latent: {self.plan.frontier.line.name}"
            lines.append(self.plan.frontier.sentence if self._timed else heads)
        return lines


def _layers(sides: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{side.upper()} of layer {' '.join(map(str, at))}" for side, at in sides.items() if at)


def _recovered(recovery: Recovery) -> str:
    return (
        f"finetuned: perplexity {recovery.before:.3f} before, {recovery.after:.3f} after "
        f"(uncompressed {recovery.original:.3f}) on {recovery.held_back_tokens} held-back tokens"
    )


def finish(
    recipe: Recipe,
    work: Work,
    plan: Plan,
    file_bytes: int,
    added: int,
    recovery: Recovery | None = None,
) -> Report:
    """Builds the report and writes its JSON and picture beside the output."""
    drawn = recipe.draws and not plan.is_full
    files = recipe.outputs[: 3 if drawn else 2]
    shares = {side: [work.energy(plan, i, side) for i in range(work.spec.n_layer)] for side in SIDES}
    layers = [(index, plan.layers[index]) for index in work.spec.row_layers]
    centred = {s: [i for i, each in layers if center.centred(work, i, s, each.side(s).path)] for s in SIDES}
    report = Report(
        recipe,
        work.spec,
        plan,
        shares,
        0 if work.sample is None else int(work.sample.tokens.size),
        file_bytes,
        files,
        work.stored_as.outtype,
        work.stored_as.factor_type,
        added,
        recovery,
        centred,
        work.source.note,
    )
    with replacing(recipe.report) as partial:
        partial.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    if drawn:
        with replacing(recipe.picture) as partial:
            draw(report, partial)
    return report


def draw(report: Report, path: Path) -> None:
    name = report.recipe.output.name
    if report.planned:
        title = f"{name}: {100 * report.cache()['share_of_f16']:.1f} % of the f16 cache"
        bits_map(report.spec, report.plan, title, path)
    else:
        rank_map(report.spec, report.plan, f"{name}: {100 * report.keep:.1f} % of KV dimensions", path)


def _stored(plan: SidePlan) -> str:
    """Ranks; of planned segments the stored channels and their mean bits without metadata."""
    if plan.formats is None:
        return _short(plan.ranks)
    pairs = [
        (n, bits_of(fmt))
        for widths, names in zip(plan.segments, plan.formats, strict=True)
        for n, fmt in zip(widths, names, strict=True)
    ]
    return f"{_short(plan.kept)} at {sum(n * bits for n, bits in pairs) / sum(plan.kept):.1f} bits"


def _short(ranks: tuple[int, ...]) -> str:
    """Equal ranks as `4 x 64`, few ragged ones in full, many as a range."""
    if len(set(ranks)) == 1:
        return f"{len(ranks)} x {ranks[0]}" if len(ranks) > 1 else str(ranks[0])
    if len(ranks) <= 8:
        return " ".join(map(str, ranks))
    return f"{len(ranks)} of {min(ranks)}-{max(ranks)}, sum {sum(ranks)}"


def _numbers(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Block:
    return table(header, rows, left=0, rule=False)
