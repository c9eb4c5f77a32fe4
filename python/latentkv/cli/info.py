"""Show what is in a file, and how much memory its cache and a context take."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from latentkv import ranges
from latentkv.cli import _options as options
from latentkv.cli._info_page import blocks
from latentkv.console.arguments import Parser, number_or_auto
from latentkv.console.terminal import show
from latentkv.errors import LatentKVError
from latentkv.plan import factors, presets
from latentkv.plan.master import planned
from latentkv.session.effect import require_regions

_LATENT_FORMATS = ("f16", "q8", "q4", "q3", "q2")
_BUDGETS = ("28%", "17.5%", "14%", "11%", "8.5%")


def main(argv: Sequence[str]) -> int:
    args = options.parse(_parser(), argv)
    from latentkv import _core

    cache = _cache(args)
    fit = options.fitted(args, args.ctx_size, cache)
    args.gpu_layers, args.kv_budget = fit.n_gpu_layers, fit.options["kv_budget"]
    model = _core.Model(args.model, latent_path=args.latent, describe_only=True, **fit.placement)
    n_ctx = fit.n_ctx or model.n_ctx_train
    in_use = planned(model, _cache(args))
    warn_of_window(model, in_use, n_ctx)
    report = {
        "file": summary(
            model, args.model, args.latent, _core.build_info()["formats"], on_gpu=bool(args.gpu_layers)
        )
        | {"regions": regions_in_use(model.regions, in_use)},
        "layers": planned_layers(model, args),
        "forecast": forecasts(model, args, n_ctx),
        "budgets": budgets(model, args),
    }
    if args.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        show(*blocks(report, model, n_ctx))
    return 0


def warn_of_window(model: Any, cache: Mapping[str, Any], n_ctx: int) -> None:
    """What a session with these options says, in its words."""
    from latentkv.session.prefix import Window

    sink = model.regions["sink"] if cache["sink"] < 0 else cache["sink"]
    length = max(0, n_ctx - sink)
    fitted = Window.of(model.regions, -1, -1).tokens(max(0, n_ctx - model.regions["sink"]))
    asked = Window.of(model.regions, cache["recent"], cache["recent_ratio"]).tokens(length)
    if asked < fitted:
        print(
            f"warning: [recent] expected at least {fitted} recent tokens, the window this file's plan was "
            f"fitted for; got {asked}",
            file=sys.stderr,
        )


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
        "n_embd": model.n_embd,
        "n_head": model.n_head,
        "n_head_kv": model.n_head_kv,
        "head_dim": model.head_dim,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
        "chat_template": model.chat_template is not None,
        "recipe": metadata.get("latentkv.source.recipe"),
        "latent": not model.is_plain,
        "master": model.master is not None,
        "formats": formats,
        "regions": dict(model.regions),
        "factor_bytes": model.factor_bytes,
        "added_weight_bytes": factors.added_bytes(model),
        "gpu": on_gpu,
    }


def regions_in_use(own: Mapping[str, Any], cache: Mapping[str, Any]) -> dict[str, Any]:
    """Model.regions with what is asked for instead."""
    asked = {"sink": cache["sink"], "recent": cache["recent"], "recent_ratio": cache["recent_ratio"]}
    if asked["recent"] >= 0 or asked["recent_ratio"] >= 0:  # one of them replaces both
        asked |= {name: max(0, asked[name]) for name in ("recent", "recent_ratio")}
    formats = {"sink_format": cache["kv_sink"], "recent_format": cache["kv_recent"]}
    words = formats | {"prefill": cache["prefill"]}
    return {
        **own,
        **{name: value for name, value in asked.items() if value >= 0},
        **{name: value for name, value in words.items() if value},
    }


def planned_layers(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Model.layers with the formats that --kv-budget chooses; the file's energies are of its own plan."""
    chosen = planned(model, _cache(args))
    layers: list[dict[str, Any]] = model.layers
    for side in ("k", "v"):
        if f"{side}_plan" in chosen:
            names = iter(chosen[f"{side}_plan"])
            for layer in layers:
                layer[side]["formats"] = [[next(names) for _ in widths] for widths in layer[side]["segments"]]
                layer[side]["energy"] = None
    return layers


def budgets(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What a master file can be planned for, largest first; empty for another file. A budget that the exact
    tokens alone take is left out."""
    from latentkv.plan.master import choose

    if model.master is None:
        return []
    regions = options.region_options(args)
    regions.pop("prefill")
    found = []
    for text in dict.fromkeys((*([args.kv_budget] if args.kv_budget else []), *_BUDGETS)):
        try:
            chosen = choose(model, text, **regions)
        except LatentKVError:
            if text == args.kv_budget:
                raise
            continue
        cache = model.forecast(chosen.n_ctx, **(regions | chosen.options()))
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


def forecasts(model: Any, args: argparse.Namespace, n_ctx: int) -> list[dict[str, Any]]:
    """Bytes of several caches at `n_ctx` and at quarters of it; --kv and --kv-budget narrow them to one."""
    asked = _cache(args)
    if args.kv_budget:
        caches = [(args.kv_budget, asked)]
    elif args.kv or args.kv_k or args.kv_v:
        caches = [(args.kv or f"{args.kv_k or 'f16'}/{args.kv_v or 'f16'}", asked)]
    else:
        has_plan = any(layer[side]["formats"] for layer in model.layers for side in ("k", "v"))
        names = [name for name, _, _ in presets.choices()] if model.is_plain else _LATENT_FORMATS
        caches = [("the file's", asked)] * has_plan + [(name, asked | {"kv": name}) for name in names]
    # what a layer keeps under eviction may be more than a short context
    shares = (1,) if args.evict not in ("", "none") else (16, 4, 1)
    contexts = sorted({max(1, n_ctx // share) for share in shares})
    rows = [
        {
            "kv": label,
            "n_ctx": count,
            **model.forecast(count, **planned(model, cache), n_ubatch=args.ubatch_size),
        }
        for label, cache in caches
        for count in contexts
    ]
    require_regions({region["name"] for row in rows for region in row["regions"]}, vars(args))
    return rows


def _cache(args: argparse.Namespace) -> dict[str, Any]:
    """The cache's options, as Session and Model.forecast share them."""
    return options.region_options(args) | options.format_options(args) | {"kv_budget": args.kv_budget}


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
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options.add_cache(parser, rotate=False)
    return parser
