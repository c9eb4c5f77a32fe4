"""Pictures of a plan: bits or ranks of every layer, and what the plan was chosen from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ConvertError, need
from .frontier import Frontier, Line
from .ir import OF_VALUE, SIDES, ModelSpec, Plan

LABELLED = 16384  # tokens; times at it stand beside a line's name


def check_plot() -> None:
    """Raises:
    ConvertError: matplotlib is not installed.
    """
    try:
        _pyplot()
    except ConvertError as error:
        raise ConvertError(
            "plot", "matplotlib for the map", str(error), "install it or pass --no-plot"
        ) from None


def _pyplot() -> Any:
    os.environ["MPLBACKEND"] = (
        "agg"  # pictures are files; what a notebook or a desktop asks for may be missing
    )
    need("matplotlib").use("Agg")
    return need("matplotlib.pyplot")


def bits_map(spec: ModelSpec, plan: Plan, title: str, path: Path) -> None:
    """Layers x channels in order of importance, K beside V, coloured by the bits a channel is stored in;
    below them what the plan was chosen from."""
    plt, found = _pyplot(), plan.frontier
    layers, step = spec.row_layers, 1 if len(spec.row_layers) <= 40 else 4
    heights = [1.6 + 0.3 * len(layers)] + ([] if found is None else [3.2])
    figure = plt.figure(figsize=(9, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    left = figure.add_subplot(grid[0, 0])
    axes = [left, figure.add_subplot(grid[0, 1], sharey=left)]
    axes[1].tick_params(labelleft=False)
    image = None
    for axis, side in zip(axes, SIDES, strict=True):
        bits = np.zeros((len(layers), max(spec.at(layer).kv_width for layer in layers)))
        for index, layer in enumerate(layers):
            chosen, row, own = plan.layers[layer].side(side), [], spec.at(layer)
            if chosen == OF_VALUE:
                continue
            segments = chosen.segments or ((own.head_dim,),) * own.n_kv  # `full`: every head is one
            formats = chosen.formats or tuple(("f16",) * len(widths) for widths in segments)
            for widths, names in zip(segments, formats, strict=True):
                held = [n for width, name in zip(widths, names, strict=True) for n in [bits_of(name)] * width]
                row += held + [0] * (chosen.group * own.head_dim - len(held))
            bits[index, : len(row)] = row
        image = axis.imshow(bits, vmin=0, vmax=8, cmap="magma", aspect="auto", interpolation="nearest")
        axis.set_title(f"{side.upper()} bits", fontsize=10)
        axis.set_xlabel("channel of the latent, most important first")
        axis.set_yticks(range(0, len(layers), step), layers[::step])
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="bits", extend="max")
    if found is not None:
        _frontier(figure.add_subplot(grid[1, :]), found)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def rank_map(spec: ModelSpec, plan: Plan, title: str, path: Path) -> None:
    """Layers x groups, K beside V, coloured by the kept share of a group's dimensions, each cell with its
    rank."""
    plt = _pyplot()
    groups = {side: max(max(len(layer.side(side).ranks), 1) for layer in plan.layers) for side in SIDES}
    columns = max(groups.values())
    layers, step = spec.row_layers, 1 if len(spec.row_layers) <= 40 else 4
    figure, axes = plt.subplots(
        1,
        2,
        figsize=(3.4 + 1.1 * min(columns, 16), 1.6 + 0.34 * len(layers)),
        sharey=True,
        layout="constrained",
    )
    image = None
    for axis, side in zip(axes, SIDES, strict=True):
        share = np.ones((len(layers), groups[side]))
        for index, layer in enumerate(layers):
            chosen = plan.layers[layer].side(side)
            widths = chosen.group * spec.at(layer).head_dim
            if chosen.ranks:
                share[index, : len(chosen.ranks)] = np.array(chosen.kept) / widths
            for group, rank in enumerate(chosen.kept if columns <= 16 else ()):
                colour = "white" if rank / widths < 0.55 else "black"
                axis.text(group, index, str(rank), ha="center", va="center", fontsize=8, color=colour)
        image = axis.imshow(share, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axis.set_title(f"{side.upper()} ranks", fontsize=10)
        axis.set_xlabel("group of KV heads")
        axis.set_xticks(range(groups[side]) if groups[side] <= 16 else range(0, groups[side], 8))
        axis.set_yticks(range(0, len(layers), step), layers[::step])
        axis.set_xticks(np.arange(0.5, groups[side] - 1), minor=True)
        axis.set_yticks(np.arange(0.5, len(layers) - 1), minor=True)
        axis.grid(which="minor", color="white", linewidth=1)
        axis.tick_params(which="both", length=0)
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="kept share of the group's dimensions")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def bits_of(fmt: str) -> int:
    """Bits of a channel in a row format, without scales."""
    return 0 if fmt == "none" else int(fmt[1:].split("_")[0])  # q4_0 too


def _frontier(axis: Any, found: Frontier) -> None:
    """Divergence over bytes, a line per grouping of KV heads; the chosen plan is ringed."""
    for index, line in enumerate(found.lines):
        sizes = [100 * point.bytes / found.full_bytes for point in line.points]
        nats = [point.predicted for point in line.points]
        colour = f"C{index}"
        chosen = index == found.chosen
        width = 2.2 if chosen else 1.2
        axis.plot(
            sizes, nats, marker="o", markersize=4, linewidth=width, color=colour, label=_label(line, found)
        )
        if chosen:
            own = line.own
            ring = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.5}
            axis.plot(100 * own.bytes / found.full_bytes, own.predicted, "o", color=colour, **ring)
    axis.set_yscale("log")
    axis.set_xlabel(f"cache at {found.context} tokens and added factors, % of f16", fontsize=9)
    axis.set_ylabel("predicted nats per token", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(which="major", alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(fontsize=8, frameon=False, title=_title(found), title_fontsize=8)


def _label(line: Line, found: Frontier) -> str:
    us = line.own.us
    return line.name if us is None else f"{line.name}: {us[found.depths.index(LABELLED)]:.1f} µs"


def _title(found: Frontier) -> str:
    """The legend's title: what its times are, and the time of full f16 rows."""
    if found.full_us is None or all(line.own.us is None for line in found.lines):
        return "KV heads that share a latent"
    full = f"full f16 {found.full_us[found.depths.index(LABELLED)]:.1f} µs"
    return f"KV heads that share a latent: µs a layer\nat {LABELLED} tokens, {found.gpu}\n({full})"
