"""What `latentkv info` shows of its report."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from latentkv.console.printable import printable
from latentkv.console.terminal import Block, table
from latentkv.plan import presets
from latentkv.quantities import bytes_text, count_text, digits, tenths

# What the paths of a tensor and the formats of blocks are, where they occur.
_PATHS = {
    "rebuild": "a latent of K before RoPE; the key is rebuilt from it at every read",
    "rotated": "a latent of K after RoPE, read as it is stored",
    "absorbed": "a latent of K without RoPE, read as it is stored",
    "value": "no rows of K; the key is V's row, or rebuilt from it at every read",
    "latent": "a latent of V, read as it is stored",
}
_BLOCKS = (
    "c8 to c2, the formats of balanced to smallest, keep K in blocks of 32 tokens, with a scale and a\n"
    "minimum per channel; the latest tokens wait in f16"
)
_LATENTS = (
    "f16 to q2: the latents in this format, not by the file's plan\n"
    "bytes/token: rows alone, without exact tokens and factors"
)
_PREFILL = {
    "eager": "eager: prompts attend to their past as the cache stores it",
    "lazy": "lazy: prompts attend to exact K and V, which are compressed afterwards",
}


def blocks(report: dict[str, Any], model: Any, n_ctx: int) -> list[Block]:
    file = report["file"]
    layers = ["", *_layers(report["layers"])] if file["latent"] else []
    shown: list[Block] = [
        _facts(file, report["layers"]),
        *layers,
        "",
        *_memory(report["forecast"], file["gpu"]),
    ]
    kinds = {name for row in report["forecast"] for name in row["kv"].split("/")}
    if not presets.has_one_row(model) and any(presets.is_in_blocks(name) for name in kinds):
        shown += ["", _BLOCKS]
    if file["latent"] and len({row["kv"] for row in report["forecast"]}) > 1:
        shown += ["", _LATENTS]
    if file["master"]:
        shown += ["", *_budgets(report["budgets"])]
    if report["cards"]:
        shown += ["", *_cards(report["cards"])]
    if n_ctx > model.n_ctx_train:
        beyond = f"note: the model was trained for {model.n_ctx_train} tokens; {n_ctx} is beyond that"
        shown += ["", beyond]
    return shown


def _facts(file: dict[str, Any], layers: Sequence[dict[str, Any]]) -> str:
    prefill = file["regions"]["prefill"]
    facts = [
        ("file", f"{file['path']} ({bytes_text(file['size_bytes'])})"),
        *([("sidecar", file["sidecar"])] if file["sidecar"] else []),
        (
            "model",
            f"{file['name'] or 'no name'}, {file['architecture']}, {count_text(file['n_params'])} parameters",
        ),
        (
            "shape",
            f"{file['n_layer']} layers, {file['n_embd']} wide, {file['n_head']} query heads and "
            f"{_kv_heads(layers)}",
        ),
        *([("mixers", mixers)] if (mixers := _mixers(file)) else []),
        *([("shared", shared)] if (shared := _shared(layers)) else []),
        ("context", f"{file['n_ctx_train']} tokens trained, {file['n_vocab']} vocabulary entries"),
        (
            "chat",
            "template in the file" if file["chat_template"] else "no template in the file (ChatML is used)",
        ),
        *([("sampling", drawn)] if (drawn := _sampling(file["sampling"])) else []),
        ("cache", _cache_text(file)),
        *([("factors", _factors(file))] if file["latent"] else []),
        *([("exact", kept)] if (kept := _exact(file["regions"])) else []),
        *([("room", room)] if (room := _room(file["regions"])) else []),
        *([("prefill", _PREFILL[prefill])] if file["latent"] or prefill == "lazy" else []),
        *([("recipe", str(file["recipe"]))] if file["recipe"] else []),
    ]
    return "\n".join(f"{name:<8} {printable(value)}" for name, value in facts)


def _kv_heads(layers: Sequence[dict[str, Any]]) -> str:
    """`8 KV heads of 128`; `16 KV heads of 256 in 50 layers, 4 of 512 in 10` where layers differ."""
    attending = [layer for layer in layers if layer["mixer"] == "attention"]
    if n_rot := attending[0]["key_only"]:
        latent = attending[0]["head_dim"] - n_rot
        return f"one row for keys and values (MLA): {n_rot} channels with RoPE, a latent of {latent}"
    counted = Counter((layer["n_head_kv"], layer["head_dim"]) for layer in attending)
    (first, *others), n_kinds = counted.most_common(), len(counted)
    (n_kv, width), n = first
    heads = "head" if n_kv == 1 else "heads"
    text = f"{n_kv} KV {heads} of {width}" + (f" in {n} layers" if n_kinds > 1 else "")
    return ", ".join([text, *(f"{n_kv} of {width} in {n}" for (n_kv, width), n in others)])


def _mixers(file: dict[str, Any]) -> str:
    """`8 of 32 layers attend, 24 are recurrent; 1 more guesses further tokens (--spec-type draft-mtp)`"""
    told = []
    if n := file["n_recurrent"]:
        told.append(f"{file['n_layer'] - n} of {file['n_layer']} layers attend, {n} are recurrent")
    if n := file["n_mtp"]:
        told.append(f"{n} more guess{'es' * (n == 1)} further tokens (--spec-type draft-mtp)")
    return "; ".join(told)


def _shared(layers: Sequence[dict[str, Any]]) -> str:
    """`the last 18 layers read the K and V of earlier ones`"""
    n = sum(layer["rows_of"] != index for index, layer in enumerate(layers))
    return f"the last {n} layers read the K and V of earlier ones" if n else ""


def _sampling(recommended: Mapping[str, Any]) -> str:
    """`temperature 0.6, top_k 20, unless a flag or a request says otherwise`"""
    told = ", ".join(f"{name} {value:g}" for name, value in recommended.items())
    return f"{told}, unless a flag or a request says otherwise" if told else ""


def _cache_text(file: dict[str, Any]) -> str:
    kind = "latent" if file["latent"] else "full K and V"
    return f"{kind}; a master file: --kv-budget makes a new plan" if file["master"] else kind


def _factors(file: dict[str, Any]) -> str:
    """`3.4 MiB; the file has 1.2 MiB more weights than with full K and V`"""
    size, added = bytes_text(file["factor_bytes"]), file["added_weight_bytes"]
    if added is None:
        return f"{size}; the file does not say the size of the projections that they replace"
    more = f"{bytes_text(abs(added))} {'more' if added >= 0 else 'fewer'}"
    return f"{size}; the file has {more} weights than with full K and V"


def _exact(regions: Mapping[str, Any]) -> str:
    """`the first 4 tokens in f16, the latest 10 % of the sequence in q4`, or "" where none are."""
    latest = f"{regions['recent']} tokens" if regions["recent"] else ""
    if regions["recent_ratio"]:
        share = f"{100 * regions['recent_ratio']:.4g} % of the sequence"
        latest = f"{share}, at least {latest}" if latest else share
    first = f"the first {regions['sink']} tokens in {regions['sink_format']}" if regions["sink"] else ""
    return ", ".join(
        filter(None, (first, f"the latest {latest} in {regions['recent_format']}" if latest else ""))
    )


def _room(regions: Mapping[str, Any]) -> str:
    """`all of up to 6560 tokens are exact; of a quarter, half and all of the context 6560, 5216 and 260`, or
    "" where no more than the window is."""
    everything, (quarter, half, whole) = regions["all_exact"], regions["exact_at"]
    if everything <= whole:
        return ""
    told = f"all of up to {everything} tokens are exact; of a quarter, half and all of the context"
    return f"{told} {quarter}, {half} and {whole}"


def _layers(layers: list[dict[str, Any]]) -> list[Block]:
    rows = [[str(i), *_row(layer)] for i, layer in enumerate(layers)]
    # Runs of equal layers become one row.
    merged = []
    for body, run in itertools.groupby(rows, key=lambda row: row[1:]):
        numbers = [row[0] for row in run]
        merged.append([numbers[0] if len(numbers) == 1 else f"{numbers[0]} … {numbers[-1]}", *body])
    sides = [f"{side} {name}" for side in ("K", "V") for name in ("path", "ranks", "kept", "energy")]
    plans = [
        f"{i} K {_plan(layer['k'])}; V {_plan(layer['v'])}"
        for i, layer in enumerate(layers)
        if _planned(layer)
    ]
    paths = {layer[side]["path"] for layer in layers for side in ("k", "v")}
    legend = [f"{path}: {meaning}" for path, meaning in _PATHS.items() if path in paths]
    shown: list[Block] = [table(["layer", *sides], merged), *legend]
    return [*shown, "", "row of a token in each layer (channels:format)", *plans] if plans else shown


def _row(layer: dict[str, Any]) -> list[str]:
    if layer["mixer"] != "attention":
        return ["recurrent", *["-"] * 7]
    width = int(layer["n_head_kv"] * layer["head_dim"])  # channels of full K or V
    return [cell for side in ("k", "v") for cell in _tensor(layer[side], width)]


def _planned(layer: dict[str, Any]) -> bool:
    """Whether a tensor of the layer has more to say than one segment per group."""
    tensors = (layer["k"], layer["v"])
    return any(t["formats"] or any(len(group) > 1 for group in t["segments"]) for t in tensors)


def _plan(tensor: dict[str, Any]) -> str:
    """[[64, 32]] and [["q4", "q2"]] → "64:q4 32:q2"; groups are divided by " | "."""
    groups = []
    for i, widths in enumerate(tensor["segments"]):
        names = tensor["formats"][i] if tensor["formats"] else [""] * len(widths)
        groups.append(
            " ".join(f"{w}:{name}" if name else str(w) for w, name in zip(widths, names, strict=True))
        )
    if not groups:
        return "of V"
    return " | ".join(
        f"{len(list(run))} x ({plan})" if len(groups) > 1 else plan for plan, run in itertools.groupby(groups)
    )


def _tensor(tensor: dict[str, Any], width: int) -> list[str]:
    ranks, energy = tensor["ranks"], tensor["energy"]
    full = tensor["path"] == "full"
    return [
        tensor["path"],
        "-" if full or not ranks else _ranks(ranks),
        "100 %" if full else f"{100 * _stored(tensor) / width:.1f} %",
        "-" if energy is None else f"{100 * energy:.2f} %",
    ]


def _stored(tensor: dict[str, Any]) -> int:
    """Channels of a row whose token is neither sink nor recent."""
    if tensor["formats"] is None:
        return sum(tensor["ranks"])
    groups = zip(tensor["segments"], tensor["formats"], strict=True)
    return sum(
        width for widths, names in groups for width, name in zip(widths, names, strict=True) if name != "none"
    )


def _ranks(ranks: list[int]) -> str:
    """[64, 64, 64] → "3x64"; [96, 64] → "96+64"."""
    runs = [(rank, len(list(run))) for rank, run in itertools.groupby(ranks)]
    shown = "+".join(str(rank) if count == 1 else f"{count}x{rank}" for rank, count in runs)
    return shown if len(shown) <= 18 else f"{len(ranks)} of {min(ranks)}-{max(ranks)}"


def _memory(forecast: list[dict[str, Any]], on_gpu: bool) -> list[Block]:
    """One row per format: bytes per token, the cache at each context, and all of it at the largest."""
    from latentkv.plan.fit import device_name, needs

    contexts = sorted({row["n_ctx"] for row in forecast})
    lazy = any(row["prefill"] for row in forecast)
    rows = []
    for kv, group in itertools.groupby(forecast, key=lambda row: row["kv"]):
        at = {row["n_ctx"]: row for row in group}
        last = at[contexts[-1]]
        rows.append(
            [
                kv,
                tenths(last["per_token"]),
                f"{100 * last['share']:.1f} %",
                *(bytes_text(at[count]["total"]) for count in contexts),
                bytes_text(last["compute"]),
                *([bytes_text(last["prefill"])] if lazy else []),
                bytes_text(last["weights"] + last["total"] + last["compute"] + last["prefill"]),
            ]
        )
    head = f"memory: weights {bytes_text(forecast[0]['weights'])}; full K and V in f16 take "
    last = max(forecast, key=lambda row: row["n_ctx"])
    head += f"{last['f16_per_token']:.0f} bytes per token; sum at {contexts[-1]} tokens"
    if last["states"]:
        head += (
            f"\nin every cache are {bytes_text(last['states'])} of recurrent layers' states, however long the"
        )
        head += (
            f" context; beside it the host keeps up to {bytes_text(last['snapshots_most'])} of copies to go"
        )
        head += " back to; shares of f16 are of rows alone"
    slots = last["layer_slots"]
    middle = next(region["slots"] for region in last["regions"] if region["name"] == "middle")
    if middle < last["n_cells"]:
        head += f"\na layer keeps {middle} of {last['n_cells']} tokens beside its exact ones"
    if (n_windowed := sum(n < min(contexts[-1], middle) for n in slots)) > 0:
        head += f"\n{n_windowed} of {len(slots)} layers have a sliding window and hold {min(slots)} tokens; "
        head += f"bytes/token is the average over {contexts[-1]}"
    if on_gpu:
        needed = needs(last)
        told = [
            f"on {device_name(device, len(needed) - 1)} {need} = {bytes_text(need.total)}"
            for device, need in needed.items()
            if need.total
        ]
        head += f"\nof {last['kv']} {told[0]}; plus CUDA's own memory and the kernels' scratch"
        head += "".join(f"\nand {more}" for more in told[1:])
    caches = [f"cache at {count}" for count in contexts]
    columns = ["--kv", "bytes/token", "of f16", *caches, "compute", *["lazy prefill"] * lazy, "sum"]
    return [head, table(columns, rows)]


def _cards(cards: list[dict[str, Any]]) -> list[Block]:
    """One row per GPU and cache: what it holds with the longest context that fits."""
    parts = ["weights", *["states"] * any(card["states"] for card in cards), "rows", "compute"]
    rows = [
        [
            bytes_text(card["free"]),
            card["kv"],
            *(bytes_text(card[part]) for part in parts),
            str(card["n_ctx"]) if card["n_ctx"] else "none fits",
        ]
        for card in cards
    ]
    head = "the longest context with all layers on a GPU, of which 1 GiB stays free"
    return [head, table(["GPU", "--kv", *parts, "longest context"], rows, left=2)]


def _budgets(rows: list[dict[str, Any]]) -> list[Block]:
    """One row per budget: the whole cache where it is counted, and the expected divergence."""
    cells = [
        [
            row["budget"],
            tenths(row["per_token"]),
            f"{bytes_text(row['total'])} at {row['n_ctx']}",
            row["exact"],
            "–" if row["kld"] is None else digits(row["kld"], 2),
        ]
        for row in rows
    ]
    head = (
        "budgets of this master file, exact tokens and bookkeeping included; expected KLD in nats per token"
    )
    columns = ["--kv-budget", "bytes/token", "whole cache", "exact tokens"]
    shown: list[Block] = [head, table([*columns, "expected KLD"], cells)]
    if rows and (differs := rows[0]["unmeasured"]):
        shown.append(f"no expected KLD: it was measured with {differs}")
    return shown
