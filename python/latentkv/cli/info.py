"""Show what is in a file, and how much memory its cache and a context take."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from latentkv import ranges
from latentkv.cli import _options as options
from latentkv.cli._info_page import blocks
from latentkv.console.arguments import Parser, number_or_auto
from latentkv.console.terminal import show
from latentkv.errors import LatentKVError
from latentkv.plan import factors, presets
from latentkv.plan.effect import require_regions
from latentkv.plan.formats import COMPARED
from latentkv.plan.master import planned
from latentkv.plan.options import SessionOptions
from latentkv.sampling.recommended import recommended

_BUDGETS = ("28%", "17.5%", "14%", "11%", "8.5%")
_CARDS: tuple[int, ...] = (16, 24)  # GiB of a GPU


def main(argv: Sequence[str]) -> int:
    args = options.parse(_parser(), argv)
    from latentkv import _core

    fit = options.fitted(args, args.ctx_size, options.cache_options(args))
    asked = fit.options
    model = _core.Model(args.model, latent_path=args.latent, describe_only=True, **fit.placement)
    n_ctx = fit.n_ctx or model.n_ctx_train
    in_use = planned(model, asked)
    cache = model.kv_bytes(n_ctx, **in_use)
    for line in cache["warnings"]:  # what a session with these options says
        print(f"warning: {line}", file=sys.stderr)
    report = {
        "file": summary(
            model, args.model, args.latent, _core.build_info()["formats"], on_gpu=bool(fit.n_gpu_layers)
        )
        | {"regions": regions_in_use(model.regions, in_use, cache)},
        "layers": planned_layers(model, in_use),
        "forecast": forecasts(model, asked, n_ctx, fit.free),
        "budgets": budgets(model, asked),
        "cards": cards(args.model, args.latent, model, asked),
    }
    if args.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        show(*blocks(report, model, n_ctx))
    return 0


def summary(model: Any, path: str, latent_path: str, formats: list[str], on_gpu: bool) -> dict[str, Any]:
    """The file in a dozen facts."""
    metadata: Mapping[str, Any] = model.metadata
    return {
        "path": path,
        "sidecar": latent_path or None,
        "name": metadata.get("general.name"),
        "architecture": metadata.get("general.architecture"),
        "n_params": model.n_params,
        "size_bytes": model.size_bytes,
        "n_layer": model.n_layer,
        "n_recurrent": sum(layer["mixer"] != "attention" for layer in model.layers),
        "n_mtp": model.n_mtp,
        "n_embd": model.n_embd,
        "n_head": model.n_head,
        "n_head_kv": model.n_head_kv,
        "head_dim": model.head_dim,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
        "chat_template": model.chat_template is not None,
        "sampling": recommended(metadata),
        "recipe": metadata.get("latentkv.source.recipe"),
        "latent": not model.is_plain,
        "master": model.master is not None,
        "formats": formats,
        "regions": dict(model.regions),
        "factor_bytes": model.factor_bytes,
        "added_weight_bytes": factors.added_bytes(model),
        "gpu": on_gpu,
    }


def regions_in_use(own: Mapping[str, Any], asked: SessionOptions, cache: Mapping[str, Any]) -> dict[str, Any]:
    """Model.regions with what is asked for instead; cache: its forecast."""
    exact = {name: cache[name] for name in ("sink", "recent", "recent_ratio", "all_exact", "exact_at")}
    words = {"sink_format": asked.kv_sink, "recent_format": asked.kv_recent, "prefill": asked.prefill}
    return {**own, **exact, **{name: value for name, value in words.items() if value}}


def planned_layers(model: Any, in_use: SessionOptions) -> list[dict[str, Any]]:
    """Model.layers with the formats that --kv-budget chooses; the file's energies are of its own plan."""
    layers: list[dict[str, Any]] = model.layers
    for side, plan in (("k", in_use.k_plan), ("v", in_use.v_plan)):
        if plan:
            names = iter(plan)
            for layer in layers:
                layer[side]["formats"] = [[next(names) for _ in widths] for widths in layer[side]["segments"]]
                layer[side]["energy"] = None
    return layers


def budgets(model: Any, asked: SessionOptions) -> list[dict[str, Any]]:
    """What a master file can be planned for, largest first; empty for another file. A budget that the exact
    tokens alone take is left out."""
    from latentkv.plan.master import choose

    if model.master is None:
        return []
    own = str(asked.kv_budget or "")
    rest = replace(asked, kv="", kv_k="", kv_v="", kv_budget=None, prefill="")
    found = []
    for text in dict.fromkeys((*([own] if own else []), *_BUDGETS)):
        try:
            chosen = choose(model, text, **rest)
        except LatentKVError:
            if text == own:
                raise
            continue
        cache = model.kv_bytes(chosen.n_ctx, **replace(rest.of_one_sequence(), **chosen.options()))
        found.append(
            {
                "budget": text,
                "n_ctx": chosen.n_ctx,
                "total": cache["total"],
                "per_token": cache["per_token"],
                "exact": chosen.kv_recent,
                "kld": chosen.kld,
                "unmeasured": chosen.unmeasured,
            }
        )
    return sorted(found, key=lambda row: -row["total"])


def _caches(model: Any, asked: SessionOptions) -> list[tuple[str, SessionOptions]]:
    """Caches to show, by their names; --kv and --kv-budget narrow them to one."""
    if asked.kv_budget:
        return [(str(asked.kv_budget), asked)]
    if asked.kv or asked.kv_k or asked.kv_v:
        return [(asked.kv or f"{asked.kv_k or 'f16'}/{asked.kv_v or 'f16'}", asked)]
    has_plan = any(layer[side]["formats"] for layer in model.layers for side in ("k", "v"))
    names = [name for name, _, _ in presets.choices()] if model.is_plain else COMPARED
    return [("the file's", asked)] * has_plan + [(name, replace(asked, kv=name)) for name in names]


def cards(path: str, latent_path: str, model: Any, asked: SessionOptions) -> list[dict[str, Any]]:
    """What GPUs hold: of a model with recurrent layers, whose states are beside the rows, the largest cache
    and the smallest; of a plain file the smaller GPU, with every cache. Empty for other files."""
    from latentkv.plan.fit import models_of, on_card

    caches, sizes = _caches(model, asked), _CARDS
    if any(layer["mixer"] != "attention" for layer in model.layers):
        caches = [caches[0], *caches[1:][-1:]]
    elif model.is_plain:
        sizes = _CARDS[:1]
    else:
        return []
    models = models_of(path, latent_path, weights=model.weights)
    return [
        {"kv": kv, **asdict(on_card(path, latent_path, cache, size << 30, models))}
        for size in sizes
        for kv, cache in caches
    ]


def forecasts(
    model: Any, asked: SessionOptions, n_ctx: int, free: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Bytes of several caches at `n_ctx` and at quarters of it. free: as Fit's."""
    caches = _caches(model, asked)
    # what a layer keeps under eviction may be more than a short context
    shares = (1,) if asked.evicts else (16, 4, 1)
    contexts = sorted({max(1, n_ctx // share) for share in shares})
    rows = [
        {"kv": label, "n_ctx": count, **model.forecast(count, free, **planned(model, cache))}
        for label, cache in caches
        for count in contexts
    ]
    require_regions({region["name"] for row in rows for region in row["regions"]}, asked)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = Parser("latentkv info", description=__doc__)
    options.add_model(parser)
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=number_or_auto(ranges.N_CTX),
        default=0,
        metavar="N",
        help="context to forecast (default: the trained one), or auto: what fits",
    )
    options.add_ubatch(parser)
    options.add_gpu_layers(parser)
    options.add_weights(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options.add_cache(parser, rotate=False)
    return parser
